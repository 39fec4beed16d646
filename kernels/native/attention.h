// Attention over the pages of the KV cache: a query's product with keys, softmax, and the product with values.
//
// Keys and values are laid out as strips of 32, so that both are the product of `arithmetic.h`, for the queries of all
// heads that share them at once. A query's positions are cut into spans with fixed borders, whose results are joined
// in order: so its bits depend neither on the queries beside it, nor on whether its spans ran apart.

#pragma once
#include <cmath>
#include <vector>

#include "product.h"

constexpr long SPAN = 256;     // positions whose softmax is computed at once; the spans of a query are joined in order
constexpr long TOGETHER = 48;  // queries of all heads of a group that are treated together, if a group is not larger
constexpr long MAX_GROUP = 64, MAX_DIM = 256;

// Some queries of one row, for one head of keys and values and the heads that share it.
struct Piece {
    long row, head, first, count;  // queries first .. first + count - 1 of the row
    long begin, end;               // cache indices
};

// What a query sees: cache indices low .. high - 1, and from `own` on those set in `bits`.
struct Seen {
    long low, high, own;
    uint64_t bits;

    // Makes those of the scores of 32 positions from `first` on that are not seen -infinity.
    void hide(float* scores, long first) const {
        if (first >= low && first + WIDTH <= high) return;
        for (long n = 0; n < WIDTH; n++) {
            const long j = first + n, bit = j - own;
            const bool seen = (j >= low && j < high) || (bit >= 0 && bit < 64 && (bits >> (bit & 63) & 1));
            scores[n] = seen ? scores[n] : -INFINITY;
        }
    }
};

inline Seen seen_by(const Batch& batch, long row, long i, long window) {
    const long base = batch.base_len[row], t = batch.q_start[row] + i;
    const long low = window ? std::max(batch.positions[t] - window + 1, 0L) : 0;
    if (batch.ancestors) return {low, base, base, uint64_t(batch.ancestors[t])};
    return {low, base + i + 1, base, 0};
}

// Weighted sums of values [wide] over some positions, with the weights exp2(score - largest), whose sum is `total`.
struct Partial {
    float largest, total;
    alignas(64) float sums[MAX_DIM];

    void join(const Partial& next, long wide) {
        const float most = std::max(largest, next.largest);
        const float before = exp2_of(splat(largest - most))[0], after = exp2_of(splat(next.largest - most))[0];
        for (long d = 0; d < wide; d++) sums[d] = sums[d] * before + next.sums[d] * after;
        total = total * before + next.total * after;
        largest = most;
    }
};

// rows and columns of a 16 x 16 matrix are exchanged: 2 x 2 blocks of 1, then of 2, 4, 8
template <int STEP = 1>
void transpose(Words (&rows)[LANES]) {
    Words upper, lower;
    for (unsigned j = 0; j < LANES; j++) {
        upper[j] = j & STEP ? LANES + j - STEP : j;
        lower[j] = j & STEP ? LANES + j : j + STEP;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) {
            Words a = rows[i], b = rows[i + STEP];
            rows[i] = __builtin_shuffle(a, b, upper);
            rows[i + STEP] = __builtin_shuffle(a, b, lower);
        }
    if constexpr (STEP < LANES / 2) transpose<2 * STEP>(rows);
}

struct Attention {
    const Model& model;
    const Batch& batch;
    const Cache& cache;
    const bf16 *keys, *values;  // [kv_heads, num_blocks, block_size, dim] of a layer
    long window;
    const bf16* qkv;  // q rotated
    bf16* out;        // [tokens, heads * dim]

    const long dim = model.head_dim, wide = (dim + WIDTH - 1) / WIDTH * WIDTH, group = model.heads / model.kv_heads;

    // What one thread needs to compute.
    struct Scratch {
        alignas(64) Words strips[SPAN * MAX_DIM / 2 / LANES];
        alignas(64) float scores[MAX_GROUP][SPAN];
        alignas(64) bf16 weights[MAX_GROUP][SPAN], q[MAX_GROUP * MAX_DIM];
        const bf16* entries[SPAN];
        Seen seen[MAX_GROUP];
        Partial part[MAX_GROUP], total[MAX_GROUP];
    };

    // Where the keys or values of a head at cache indices begin .. end - 1 of a row are; zeros after that.
    void find(const bf16* of, const Piece& p, long begin, long end, const bf16** entries) const {
        static const bf16 nothing[MAX_DIM] = {};
        const int* block = batch.block_table + p.row * batch.max_blocks + begin / cache.block_size;
        long offset = begin % cache.block_size;
        for (long j = begin; j < end; offset = 0, block++) {
            const bf16* at = of + ((p.head * cache.num_blocks + *block) * cache.block_size + offset) * dim;
            for (; offset < cache.block_size && j < end; offset++, j++, at += dim) *entries++ = at;
        }
        for (long j = end; (j - begin) % WIDTH; j++) *entries++ = nothing;
    }

    // 32 keys as a strip [dim / 2][32].
    void pack_keys(const bf16* const* entries, Words* strip) const {
        Words blocks[MAX_DIM / WIDTH][LANES];
        for (long half = 0; half < 2; half++, entries += LANES) {
            for (long i = 0; i < LANES; i++) {  // in the order of their addresses, for the processor to look ahead
                long d = 0;
                for (; d + WIDTH <= dim; d += WIDTH) blocks[d / WIDTH][i] = *(const Words*)(entries[i] + d);
                if (d == dim) continue;
                blocks[d / WIDTH][i] = Words{};
                memcpy(&blocks[d / WIDTH][i], entries[i] + d, (dim - d) * sizeof(bf16));
            }
            for (long d = 0; d < dim; d += WIDTH) {
                Words(&block)[LANES] = blocks[d / WIDTH];
                transpose(block);
                for (long i = 0; i < std::min<long>(LANES, (dim - d) / 2); i++) strip[d + 2 * i + half] = block[i];
            }
        }
    }

    // The values at two positions as a pair of each of the strips [wide / 32][pairs][32].
    void pack_values(const bf16* const* entries, Words* strips, long pairs) const {
        for (long d = 0; d < wide; d += WIDTH, strips += 2 * pairs) {
            uint32_t* to = (uint32_t*)strips;
            if (d + WIDTH <= dim)
                for (long k = 0; k < WIDTH; k++) to[k] = entries[0][d + k] | uint32_t(entries[1][d + k]) << 16;
            else
                for (long k = 0; k < WIDTH; k++)
                    to[k] = d + k < dim ? entries[0][d + k] | uint32_t(entries[1][d + k]) << 16 : 0;
        }
    }

    // Positions begin .. end - 1, at most SPAN, for all queries of a piece.
    void span(const Piece& p, long begin, long end, Scratch& at, Partial* result) const {
        const float scale = LOG2_E / std::sqrt(float(dim));
        const long rows = p.count * group, strips = (end - begin + WIDTH - 1) / WIDTH, pairs = strips * LANES;
        find(keys, p, begin, end, at.entries);
        for (long s = 0; s < strips; s++) {
            pack_keys(at.entries + s * WIDTH, at.strips);
            in_parts(rows, [&](long i, long m, long) {
                Sums sums;
                MULTIPLY[m](at.q + i * dim, dim, at.strips, dim / 2, sums, nullptr, 0);
                for (long k = 0; k < m; k++) {
                    float* to = at.scores[i + k] + s * WIDTH;
                    *(Floats*)to = sums.of[k][0] * scale;
                    *(Floats*)(to + LANES) = sums.of[k][1] * scale;
                    at.seen[(i + k) / group].hide(to, begin + s * WIDTH);
                }
            });
        }
        for (long i = 0; i < rows; i++) {
            Floats most = splat(-1e30f), total{};
            for (long j = 0; j < strips * WIDTH; j += LANES) {
                Floats s = *(Floats*)(at.scores[i] + j);
                most = s > most ? s : most;
            }
            result[i].largest = largest(most);
            for (long j = 0; j < strips * WIDTH; j += LANES) {
                Floats weight = exp2_of(*(Floats*)(at.scores[i] + j) - result[i].largest);
                total += weight;
                store(weight, at.weights[i] + j);
            }
            result[i].total = sum(total);
        }
        find(values, p, begin, end, at.entries);
        for (long n = 0; n < pairs; n++) pack_values(at.entries + 2 * n, at.strips + 2 * n, pairs);
        for (long d = 0; d < wide; d += WIDTH) {
            const Words* strip = at.strips + d / WIDTH * pairs * 2;
            in_parts(rows, [&](long i, long m, long) {
                Sums sums;
                MULTIPLY[m](at.weights[i], SPAN, strip, pairs, sums, nullptr, 0);
                for (long k = 0; k < m; k++) memcpy(result[i + k].sums + d, sums.of[k], WIDTH * sizeof(float));
            });
        }
    }

    // All positions of a piece, in spans whose borders are the same for all pieces; to `result` [count * group].
    void operator()(const Piece& p, Scratch& at, Partial* result) const {
        const long rows = p.count * group, width = (model.heads + 2 * model.kv_heads) * dim;
        long low = p.end;
        for (long i = 0; i < p.count; i++) {
            at.seen[i] = seen_by(batch, p.row, p.first + i, window);
            low = std::min({low, at.seen[i].low, at.seen[i].own});  // in a tree, later queries may see earlier ones
            const bf16* q = qkv + (batch.q_start[p.row] + p.first + i) * width + p.head * group * dim;
            memcpy(at.q + i * group * dim, q, group * dim * sizeof(bf16));
        }
        const long start = std::min(std::max(p.begin, low / SPAN * SPAN), (p.end - 1) / SPAN * SPAN);
        span(p, start, std::min(start + SPAN, p.end), at, result);
        for (long begin = start + SPAN; begin < p.end; begin += SPAN) {
            span(p, begin, std::min(begin + SPAN, p.end), at, at.part);
            for (long i = 0; i < rows; i++) result[i].join(at.part[i], wide);
        }
    }

    void write(const Piece& p, const Partial* result) const {
        for (long i = 0; i < p.count; i++) {
            bf16* to = out + (batch.q_start[p.row] + p.first + i) * model.heads * dim + p.head * group * dim;
            for (long g = 0; g < group; g++, result++)
                for (long d = 0; d < dim; d++) *to++ = to_bf16(result->sums[d] / result->total);
        }
    }
};

// What attention of a batch is cut into, for all layers.
struct Plan {
    std::vector<Piece> pieces;  // whole, or each span apart where there are too few of them for all threads
    std::vector<long> first;    // of each whole piece, its first one in `pieces`; and their number
    bool apart;

    Plan(const Model& model, const Batch& batch, int threads) {
        const long group = model.heads / model.kv_heads, most = std::max(TOGETHER / group, 1L);
        std::vector<Piece> whole;
        bool long_one = false;
        for (long row = 0; row < batch.num_rows; row++)
            for (long i = 0; i < batch.q_len[row]; i += most)
                for (long head = 0; head < model.kv_heads; head++) {
                    const long count = std::min(most, batch.q_len[row] - i);
                    const long seen = batch.ancestors ? batch.q_len[row] : i + count;
                    whole.push_back({row, head, i, count, 0, batch.base_len[row] + seen});
                    long_one |= whole.back().end > SPAN;
                }
        apart = long_one && long(whole.size()) < 4 * threads;
        for (Piece p : whole) {
            first.push_back(pieces.size());
            const long end = p.end, step = apart ? SPAN : end;
            for (; p.begin < end; p.begin += step) {
                p.end = std::min(p.begin + step, end);
                pieces.push_back(p);
            }
        }
        first.push_back(pieces.size());
    }
};

inline void attention(Team& team, const Attention& attend, const Plan& plan, Attention::Scratch& at, Partial* parts) {
    const long rows = std::max(TOGETHER, attend.group);
    team.each(plan.pieces.size(), [&](long i, long) {
        attend(plan.pieces[i], at, plan.apart ? parts + i * rows : at.total);
        if (!plan.apart) attend.write(plan.pieces[i], at.total);
    });
    if (!plan.apart) return;
    team.each(plan.first.size() - 1, [&](long i, long) {
        Partial* total = parts + plan.first[i] * rows;
        const Piece& p = plan.pieces[plan.first[i]];
        for (long j = plan.first[i] + 1; j < plan.first[i + 1]; j++)
            for (long k = 0; k < p.count * attend.group; k++) total[k].join(parts[j * rows + k], attend.wide);
        attend.write(p, total);
    });
}
