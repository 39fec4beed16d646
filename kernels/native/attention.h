// Attention over the pages of the KV cache: a query's product with keys, softmax, and the product with values.
//
// Both products are that of `arithmetic.h`, on the tiles of the cache as they are, for the queries of all heads that
// share them at once. A query's positions are cut into spans with fixed borders, whose results are joined
// in order: so its bits depend neither on the queries beside it, nor on whether its spans ran apart.

#pragma once
#include <cmath>
#include <vector>

#include "cache.h"
#include "product.h"

constexpr long SPAN = 256;     // positions whose softmax is computed at once; the spans of a query are joined in order
constexpr long TOGETHER = 96;  // queries of all heads of a group that are treated together, if a group is not larger
constexpr long MAX_GROUP = 64, MAX_DIM = 256;  // as models/compiled.py has them
constexpr long APART = 64 << 20;               // bytes that results of spans may take

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

// Weighted sums of values [dim] over some positions, with the weights exp2(score - largest), whose sum is `total`.
struct Partial {
    float largest, total;
    alignas(64) float sums[MAX_DIM];

    void join(const Partial& next, long dim) {
        const float most = std::max(largest, next.largest);
        const float before = exp2_of(splat(largest - most))[0], after = exp2_of(splat(next.largest - most))[0];
        for (long d = 0; d < dim; d += LANES)
            *(Floats*)(sums + d) = load(sums + d) * before + load(next.sums + d) * after;
        total = total * before + next.total * after;
        largest = most;
    }
};

// 32 keys as columns: two tiles [dim / 2][16][2]. The values, a page further, will be needed next.
struct Keys {
    const bf16 *tile, *other;
    long page;
    static constexpr long RUN = 16;

    static long stride() { return LANES * sizeof(uint32_t); }
    const bf16* left(long p) const { return tile + p * WIDTH; }
    const bf16* right(long p) const { return other + p * WIDTH; }
    void prefetch(long p, long count) const {
        for (; count--; p++) {
            __builtin_prefetch(left(p) + page, 0, 2);
            __builtin_prefetch(right(p) + page, 0, 2);
        }
    }
};

// 32 numbers of each value as columns: from `first` on, in tiles [8][dim][2] a page after those of the keys.
struct Values {
    const bf16 *const *keys, *const *next;  // tiles of keys that will be needed later
    long page, first, dim;
    static constexpr long RUN = 8;

    long stride() const { return dim * sizeof(uint32_t); }
    const bf16* left(long p) const { return keys[p / 8] + page + (p % 8 * dim + first) * 2; }
    const bf16* right(long p) const { return left(p) + WIDTH; }
    void prefetch(long p, long count) const {
        for (; count--; p++) {
            const bf16* ahead = next[p / 8] + (first / WIDTH * 8 + p % 8) * 2 * WIDTH;
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + WIDTH, 0, 2);
        }
    }
};

struct Attention {
    const Model& model;
    const Batch& batch;
    const Cache& cache;
    long layer, window;
    Rows qkv;  // q rotated
    Rows out;  // heads * dim numbers each

    const long dim = model.head_dim, group = model.heads / model.kv_heads;
    const float cap = model.softcap, root = std::sqrt(float(model.query_scalar));

    // What one thread needs to compute.
    struct Scratch {
        // Rows a multiple of 512 bytes apart would share lines of the first-level cache.
        static constexpr long ROWS = std::max(TOGETHER, MAX_GROUP), SCORES = SPAN + LANES, WEIGHTS = SPAN + WIDTH;
        alignas(64) float scores[ROWS][SCORES];
        alignas(64) bf16 weights[ROWS][WEIGHTS], q[ROWS * MAX_DIM];
        const bf16 *keys[SPAN / LANES], *next[SPAN / LANES];  // tiles of this span and the next one
        Seen seen[ROWS];
        Partial part[ROWS], total[ROWS];
    };

    // The tiles of keys that hold the SPAN cache indices from `begin` on, a multiple of 16; the last of a piece again
    // where it has no more.
    void find(const Piece& p, long begin, const bf16** tiles) const {
        const Head head(cache, layer, p.head);
        const int* blocks = batch.block_table + p.row * batch.max_blocks;
        const int shift = __builtin_ctzl(cache.block_size);  // a power of two
        for (long n = 0; n < SPAN; n += LANES) {
            const long j = std::min(begin + n, p.end - 1);
            *tiles++ = head.tile(blocks[j >> shift], j & (cache.block_size - 1));
        }
    }

    // The first index that a piece is to look at: a border of spans, which are the same for all pieces. Not below its
    // end if all of it lies before the window.
    long start(const Piece& p) const {
        long low = p.end;
        for (long i = 0; i < p.count; i++) {  // in a tree, later queries may see earlier ones
            const Seen seen = seen_by(batch, p.row, p.first + i, window);
            low = std::min({low, seen.low, seen.own});
        }
        return std::max(p.begin, low / SPAN * SPAN);
    }

    // Positions begin .. end - 1, at most SPAN, for `rows` of q.
    void span(long begin, long end, long rows, Scratch& at, Partial* result) const {
        const float scale = cap ? LOG2_E * cap : LOG2_E / root;
        const long tiles = (end - begin + LANES - 1) / LANES, page = cache.block_size * dim;
        for (long s = 0; s < tiles; s += 2) {
            const Keys keys{at.keys[s], at.keys[s + 1], page};
            in_parts(rows, most_rows<Keys>(dim / 2), [&](long i, long m, long) {
                multiply_rows(m, at.q + i * dim, dim, keys, dim / 2, {at.scores[i] + s * LANES, at.SCORES});
            });
            for (long i = 0; i < rows; i++) {
                float* scores = at.scores[i] + s * LANES;
                for (long j = 0; cap && j < WIDTH; j += LANES)
                    *(Floats*)(scores + j) = tanh_of(load(scores + j) / (root * cap));
                at.seen[i].hide(scores, begin + s * LANES);
            }
        }
        for (long i = 0; i < rows; i++) {
            Floats most = splat(-1e30f);
            for (long j = 0; j < tiles * LANES; j += LANES) most = larger(load(at.scores[i] + j), most);
            result[i].largest = largest(most) * scale;
        }
        for (long i = 0; i < rows; i++) {
            Floats total{};
            for (long j = 0; j < tiles * LANES; j += LANES) {
                const Floats weight = exp2_of(load(at.scores[i] + j) * scale - result[i].largest);
                total += weight;
                store(weight, at.weights[i] + j);
            }
            result[i].total = sum(total);
        }
        for (long d = 0; d < dim; d += WIDTH) {
            const long from = std::min(d, dim - WIDTH);  // the last columns may begin within those before
            const Values values{at.keys, at.next, page, from, dim};
            in_parts(rows, most_rows<Values>(tiles * LANES / 2), [&](long i, long m, long) {
                const Sums sums{result[i].sums + from, sizeof(Partial) / sizeof(float)};
                multiply_rows(m, at.weights[i], at.WEIGHTS, values, tiles * LANES / 2, sums);
            });
        }
    }

    // All positions of a piece, in spans; to `result` [count * group]. `after` is what will be computed then.
    void operator()(const Piece& p, const Piece& after, Scratch& at, Partial* result) const {
        const long rows = p.count * group, first = start(p);
        for (long i = 0; i < p.count; i++) {
            std::fill_n(at.seen + i * group, group, seen_by(batch, p.row, p.first + i, window));
            const bf16* q = qkv[batch.q_start[p.row] + p.first + i] + p.head * group * dim;
            memcpy(at.q + i * group * dim, q, group * dim * sizeof(bf16));
        }
        if (first >= p.end) std::fill_n(result, rows, Partial{-1e30f, 0, {}});
        for (long begin = first; begin < p.end; begin += SPAN) {
            const bool last = begin + SPAN >= p.end;
            find(p, begin, at.keys);
            find(last ? after : p, last ? start(after) : begin + SPAN, at.next);
            span(begin, std::min(begin + SPAN, p.end), rows, at, begin == first ? result : at.part);
            if (begin != first)
                for (long i = 0; i < rows; i++) result[i].join(at.part[i], dim);
        }
    }

    void write(const Piece& p, const Partial* result) const {
        for (long i = 0; i < p.count; i++) {
            bf16* to = out[batch.q_start[p.row] + p.first + i] + p.head * group * dim;
            for (long g = 0; g < group; g++, result++, to += dim)
                for (long d = 0; d < dim; d += LANES)
                    store(load(result->sums + d) / result->total, to + d, std::min<long>(LANES, dim - d));
        }
    }
};

// What attention of a batch is cut into, for all layers.
struct Plan {
    std::vector<Piece> pieces;  // whole, or each span apart where there are too few of them for all threads
    std::vector<long> first;    // of each whole piece, its first one in `pieces`; and their number
    bool apart;
    long rows = 0;  // that a piece has at most

    Plan(const Model& model, const Batch& batch, int threads) {
        const long group = model.heads / model.kv_heads, most = std::max(TOGETHER / group, 1L);
        std::vector<Piece> whole;
        long spans = 0;
        for (long row = 0; row < batch.num_rows; row++)
            for (long head = 0; head < model.kv_heads; head++)  // whose keys and values stay in the cache
                for (long i = 0; i < batch.q_len[row]; i += most) {
                    const long count = std::min(most, batch.q_len[row] - i);
                    whole.push_back({row, head, i, count, 0, batch.base_len[row] + i + count});
                    spans += (whole.back().end + SPAN - 1) / SPAN;
                    rows = std::max(rows, count * group);
                }
        const long count = whole.size(), bytes = spans * rows * sizeof(Partial);
        apart = count < spans && count < 4 * threads && bytes <= APART;
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
    team.each(plan.pieces.size(), [&](long i, long next) {
        attend(plan.pieces[i], plan.pieces[next], at, plan.apart ? parts + i * plan.rows : at.total);
        if (!plan.apart) attend.write(plan.pieces[i], at.total);
    });
    if (!plan.apart) return;
    team.each(plan.first.size() - 1, [&](long i, long) {
        Partial* total = parts + plan.first[i] * plan.rows;
        const Piece& p = plan.pieces[plan.first[i]];
        for (long j = plan.first[i] + 1; j < plan.first[i + 1]; j++)
            for (long k = 0; k < p.count * attend.group; k++) total[k].join(parts[j * plan.rows + k], attend.dim);
        attend.write(p, total);
    });
}
