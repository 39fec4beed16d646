// Attention over the paged KV cache: scores (queries times keys), softmax, and weights times values.
//
// Both products use `multiply` of arithmetic.h directly on the tiles of the cache, for all query heads that share a KV
// head. The cache is divided into spans at fixed positions, and the partial results of the spans are combined in order.
// So the output of a query depends neither on the other queries of the batch nor on the assignment of spans to threads.
//
// In a tree, the output of a node at depth d is bitwise identical to that in a chain of its ancestors: their keys and
// values are copied to positions base .. base + d of temporary tiles (`gather_path`). Spans that end before `base` are
// the same for all nodes and are computed together; only the last one or two are computed per node.

#pragma once
#include <cmath>
#include <vector>

#include "cache.h"
#include "product.h"

constexpr long SPAN = 256;     // positions per span
constexpr long MAX_ROWS = 96;  // maximum rows of a piece: queries * query heads per KV head; >= MAX_GROUP
constexpr long MAX_GROUP = 64, MAX_DIM = 256;  // same as in models/cpu.py
constexpr long MAX_NODES = 64, COPIES = MAX_NODES / LANES + 1;  // nodes of a tree; tiles for copies of them
constexpr long MAX_PARTIAL_BYTES = 64 << 20;                    // of the partial results of spans

// A unit of work: some queries of one row, for one KV head and the query heads that share it.
struct Piece {
    long row, head, first, count;  // queries first .. first + count - 1 of the row
    long begin, end;               // cache indices
};

// The positions that a query attends to: low .. high - 1.
struct Visible {
    long low, high;

    // Sets the scores of the other positions to -infinity, among the 32 from `first` on.
    void mask(float* scores, long first) const {
        if (first >= low && first + WIDTH <= high) return;
        for (long n = 0; n < WIDTH; n++) scores[n] = first + n >= low && first + n < high ? scores[n] : -INFINITY;
    }
};

// In a block, which has no branches, the mask of each query has the bits of all, so it attends beyond itself.
inline Visible visible_to(const Batch& batch, long row, long i, long window) {
    const long query = batch.q_start[row] + i, position = batch.positions[query];
    const long high = batch.ancestors ? batch.base_len[row] + __builtin_popcountll(batch.ancestors[query]) : position + 1;
    return {window ? std::max(position - window + 1, 0L) : 0, high};
}

// The partial result of some positions: the sum of their values [dim] weighted by exp2(score - largest), and the sum of
// the weights.
struct Partial {
    float largest, total;
    alignas(64) float sums[MAX_DIM];

    void merge(const Partial& next, long dim) {
        const float most = std::max(largest, next.largest);
        const float before = exp2_of(splat(largest - most))[0], after = exp2_of(splat(next.largest - most))[0];
        for (long d = 0; d < dim; d += LANES)
            *(Floats*)(sums + d) = load(sums + d) * before + load(next.sums + d) * after;
        total = total * before + next.total * after;
        largest = most;
    }
};
constexpr Partial EMPTY{-1e30f, 0, {}};

// 16 positions of the cache: keys [dim / 2][16][2] and values [8][dim][2].
struct Tile {
    bf16 *keys, *values;
};

// The keys of two tiles as a matrix of 32 columns. Prefetches the values of the same tiles, which are read next.
struct Keys {
    Tile one, other;
    static constexpr long RUN = 16;

    static long stride() { return LANES * sizeof(uint32_t); }
    const bf16* left(long p) const { return one.keys + p * WIDTH; }
    const bf16* right(long p) const { return other.keys + p * WIDTH; }
    void prefetch(long p, long count) const {
        for (; count--; p++) {
            __builtin_prefetch(one.values + p * WIDTH, 0, 2);
            __builtin_prefetch(other.values + p * WIDTH, 0, 2);
        }
    }
};

// Elements first .. first + 31 of each value as a matrix of 32 columns. Prefetches the keys of the `next` tiles.
struct Values {
    const Tile *tiles, *next;
    long first, dim;
    static constexpr long RUN = 8;

    long stride() const { return dim * sizeof(uint32_t); }
    const bf16* left(long p) const { return tiles[p / 8].values + (p % 8 * dim + first) * 2; }
    const bf16* right(long p) const { return left(p) + WIDTH; }
    void prefetch(long p, long count) const {
        for (; count--; p++) {
            const bf16* ahead = next[p / 8].keys + (first / WIDTH * 8 + p % 8) * 2 * WIDTH;
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
    Rows out;  // [T, heads * dim]

    const long dim = model.head_dim, group = model.heads / model.kv_heads;
    const float cap = model.softcap, root = std::sqrt(float(model.query_scalar));

    // The working memory of one thread.
    struct Scratch {
        // Padded: rows with a stride of a multiple of 512 bytes would compete for the same lines of the L1 cache.
        static constexpr long ROWS = std::max(MAX_ROWS, MAX_GROUP), SCORES = SPAN + LANES, WEIGHTS = SPAN + WIDTH;
        alignas(64) float scores[ROWS][SCORES];
        alignas(64) bf16 weights[ROWS][WEIGHTS], q[ROWS * MAX_DIM];
        Tile tiles[SPAN / LANES], next[SPAN / LANES];  // of this span and the next one
        alignas(64) bf16 copies[COPIES][2][LANES * MAX_DIM];
        Visible visible[ROWS];
        Partial part[ROWS], total[ROWS];
    };

    // Returns the tile that contains cache index j of a row.
    Tile tile(const Head& head, long row, long j) const {
        const int block = batch.block_table[row * batch.max_blocks + (j >> __builtin_ctzl(cache.block_size))];
        bf16* keys = head.tile(block, j & (cache.block_size - 1));  // the size is a power of two
        return {keys, keys + head.to_values()};
    }

    // Looks up the tiles of SPAN cache indices from `begin` on, a multiple of 16. Past the end of the piece, its last
    // tile is repeated.
    void find(const Piece& p, long begin, Tile* tiles) const {
        const Head head(cache, layer, p.head);
        for (long n = 0; n < SPAN; n += LANES) *tiles++ = tile(head, p.row, std::min(begin + n, p.end - 1));
    }

    // Returns whether each query of a piece is the child of the previous one, so that the cache is in order of depth.
    bool is_chain(const Piece& p) const {
        if (!batch.ancestors) return true;
        const uint64_t path = batch.ancestors[batch.q_start[p.row] + p.first + p.count - 1];
        return !(path & (path + 1));  // true if all other queries are ancestors of the last
    }

    // Replaces the tiles of a span that hold tokens of this step by copies, in which the cached tokens are
    // followed only by the ancestors of query i, at consecutive positions.
    void gather_path(const Piece& p, long i, long begin, long end, Scratch& at) const {
        const Head head(cache, layer, p.head);
        const long base = batch.base_len[p.row], first = std::max(base / LANES * LANES, begin);
        uint64_t path = batch.ancestors[batch.q_start[p.row] + i];  // bits in order of depth, as parents come first
        for (long j = base; j < first; j++) path &= path - 1;       // skips the ancestors in the previous span
        for (long n = 0, from = first; from < end; n++, from += LANES) {
            const Tile cached = tile(head, p.row, from), copy{at.copies[n][0], at.copies[n][1]};
            memcpy(copy.keys, cached.keys, LANES * dim * sizeof(bf16));
            memcpy(copy.values, cached.values, LANES * dim * sizeof(bf16));
            for (long j = std::max(base, from); j < std::min(from + LANES, end); j++, path &= path - 1) {
                const long node = base + __builtin_ctzll(path);
                const Tile source = tile(head, p.row, node);
                head.copy(Head::key_in(source.keys, node), head.value_in(source.values, node),
                          Head::key_in(copy.keys, j), head.value_in(copy.values, j));
            }
            at.tiles[(from - begin) / LANES] = copy;
        }
    }

    // Returns the start of the first span that any query's window reaches, or `p.end` if there is none.
    long start(const Piece& p) const {
        long low = p.end;
        for (long i = 0; i < p.count; i++) {  // in a tree, the minimum need not be that of the first query
            const Visible visible = visible_to(batch, p.row, p.first + i, window);
            low = std::min(low, visible.low);
        }
        return std::max(p.begin, low / SPAN * SPAN);
    }

    // Computes the partial results of positions begin .. end - 1, at most SPAN, for rows first .. first + rows - 1 of q.
    void span(long begin, long end, long first, long rows, Scratch& at, Partial* result) const {
        const float scale = cap ? LOG2_E * cap : LOG2_E / root;
        const long tiles = (end - begin + LANES - 1) / LANES;
        for (long s = 0; s < tiles; s += 2) {
            const Keys keys{at.tiles[s], at.tiles[s + 1]};
            in_parts(rows, most_rows<Keys>(dim / 2), [&](long i, long m, long) {
                multiply_rows(m, at.q + (first + i) * dim, dim, keys, dim / 2, {at.scores[i] + s * LANES, at.SCORES});
            });
            for (long i = 0; i < rows; i++) {
                float* scores = at.scores[i] + s * LANES;
                for (long j = 0; cap && j < WIDTH; j += LANES)
                    *(Floats*)(scores + j) = tanh_of(load(scores + j) / (root * cap));
                at.visible[first + i].mask(scores, begin + s * LANES);
            }
        }
        result += first;
        for (long i = 0; i < rows; i++) {
            Floats most = splat(-1e30f);
            for (long j = 0; j < tiles * LANES; j += LANES) most = max_of(load(at.scores[i] + j), most);
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
            const long from = std::min(d, dim - WIDTH);  // the last columns may overlap the previous ones
            const Values values{at.tiles, at.next, from, dim};
            in_parts(rows, most_rows<Values>(tiles * LANES / 2), [&](long i, long m, long) {
                const Sums sums{result[i].sums + from, sizeof(Partial) / sizeof(float)};
                multiply_rows(m, at.weights[i], at.WEIGHTS, values, tiles * LANES / 2, sums);
            });
        }
    }

    // `span` for the nodes of a tree, one after the other, as they attend to different positions.
    void tree_span(const Piece& p, long begin, Scratch& at, Partial* result) const {
        for (long i = 0; i < p.count; i++) {
            const long first = i * group, end = std::min(begin + SPAN, at.visible[first].high);
            if (end <= begin) std::fill_n(result + first, group, EMPTY);
            else gather_path(p, p.first + i, begin, end, at), span(begin, end, first, group, at, result);
        }
    }

    // Computes a piece, span by span, into `result` [count * group]. `after`: the next piece of this thread, to prefetch.
    void operator()(const Piece& p, const Piece& after, Scratch& at, Partial* result) const {
        const long rows = p.count * group, first = start(p);
        const long shared = is_chain(p) ? p.end : batch.base_len[p.row];
        for (long i = 0; i < p.count; i++) {
            std::fill_n(at.visible + i * group, group, visible_to(batch, p.row, p.first + i, window));
            const bf16* q = qkv[batch.q_start[p.row] + p.first + i] + p.head * group * dim;
            memcpy(at.q + i * group * dim, q, group * dim * sizeof(bf16));
        }
        if (first >= p.end) std::fill_n(result, rows, EMPTY);
        for (long begin = first; begin < p.end; begin += SPAN) {
            const long end = std::min(begin + SPAN, p.end);
            Partial* to = begin == first ? result : at.part;
            find(p, begin, at.tiles);
            find(end == p.end ? after : p, end == p.end ? start(after) : end, at.next);
            if (end <= shared)
                span(begin, end, 0, rows, at, to);
            else
                tree_span(p, begin, at, to);
            if (begin != first)
                for (long i = 0; i < rows; i++) result[i].merge(at.part[i], dim);
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

// The division of a batch into pieces, which is the same for all layers. If there are too few pieces for all threads,
// `split_spans` is set: each span is a separate piece.
struct Plan {
    std::vector<Piece> pieces;
    std::vector<long> first;  // index in `pieces` of the first part of each whole piece, followed by the total number
    bool split_spans;
    long rows = 0;  // maximum number of rows of a piece

    Plan(const Model& model, const Batch& batch, int threads) {
        const long group = model.heads / model.kv_heads, most = std::max(MAX_ROWS / group, 1L);
        std::vector<Piece> whole;
        long spans = 0;
        for (long row = 0; row < batch.num_rows; row++)
            for (long head = 0; head < model.kv_heads; head++)  // outer loop, so that its K/V stay in the CPU's cache
                for (long i = 0; i < batch.q_len[row]; i += most) {
                    const long count = std::min(most, batch.q_len[row] - i);
                    const long last = batch.ancestors ? batch.q_len[row] : i + count;
                    whole.push_back({row, head, i, count, 0, batch.base_len[row] + last});
                    spans += (whole.back().end + SPAN - 1) / SPAN;
                    rows = std::max(rows, count * group);
                }
        const long count = whole.size(), bytes = spans * rows * sizeof(Partial);
        split_spans = count < spans && count < 4 * threads && bytes <= MAX_PARTIAL_BYTES;
        for (Piece p : whole) {
            first.push_back(pieces.size());
            const long end = p.end, step = split_spans ? SPAN : end;
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
        attend(plan.pieces[i], plan.pieces[next], at, plan.split_spans ? parts + i * plan.rows : at.total);
        if (!plan.split_spans) attend.write(plan.pieces[i], at.total);
    });
    if (!plan.split_spans) return;
    team.each(plan.first.size() - 1, [&](long i, long) {
        Partial* total = parts + plan.first[i] * plan.rows;
        const Piece& p = plan.pieces[plan.first[i]];
        for (long j = plan.first[i] + 1; j < plan.first[i + 1]; j++)
            for (long k = 0; k < p.count * attend.group; k++) total[k].merge(parts[j * plan.rows + k], attend.dim);
        attend.write(p, total);
    });
}
