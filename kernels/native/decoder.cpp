// `Model.forward` of models/decoder.py for bfloat16 on a CPU: one call, all threads in it from the first layer to the
// last. decoder.py, rope_cache.py and attention.py say what is computed; here is how.
//
// Products read each weight once, in strips of 32 of its rows (`Weight`), and multiply up to 12 tokens with it at a
// time. Attention is the same product twice: keys and values are laid out as strips, 32 at a time.
//
// The bits of a token depend on itself and what it sees, never on the tokens or rows beside it, on the number of
// threads or on who computes what: every sum has one order, given by the shape of a weight or by absolute positions.

#include <algorithm>
#include <cmath>
#include <memory>
#include <omp.h>

#include "arithmetic.h"
#include "threads.h"

namespace {

// A matrix [rows, columns], packed as [ceil(rows / 32)][columns / 2][32][2], with rows of zeros at the end.
struct Weight {
    const bf16* data;
    const bf16* bias;  // [rows] or null
    long rows, columns;

    const Words* strip(long i) const { return (const Words*)(data + i * columns * WIDTH); }
    long strips() const { return (rows + WIDTH - 1) / WIDTH; }
};

struct Norm {
    const bf16* weight;
    float eps;
};

struct Layer {
    Norm input_norm, q_norm, k_norm, post_norm;  // of q and k: weight null if there are none
    Weight qkv, o, gate_up, down;
    long window;  // 0: none
};

struct Model {
    long num_layers, hidden, heads, kv_heads, head_dim, inner;
    const bf16* embedding;  // [vocab, hidden]
    const float* cos_sin;   // [positions, head_dim]
    Norm norm;
    const Layer* layers;
};

// kernels/batch.py
struct Batch {
    long tokens, rows, max_blocks;
    const int *input_ids, *positions, *slots;      // [tokens]
    const int *block_table;                        // [rows, max_blocks]
    const int *q_start, *q_len, *base_len;         // [rows]
    const int64_t* ancestors;                      // [tokens] or null
};

struct Cache {  // [num_layers, 2, kv_heads, num_blocks, block_size, head_dim]
    bf16* data;
    long num_blocks, block_size;
};

// ---- products -----------------------------------------------------------------------------------

constexpr long AHEAD = 16;      // pairs of columns that are asked for before they are needed: 2 KiB
constexpr long CHUNK = 8 * MOST;  // tokens to a task

using Multiply = void (*)(const bf16*, long, const Words*, long, const Words*, Sums&);
constexpr Multiply MULTIPLY[] = {nullptr,     multiply<1>, multiply<2>,  multiply<3>,  multiply<4>,
                                 multiply<5>, multiply<6>, multiply<7>,  multiply<8>,  multiply<9>,
                                 multiply<10>, multiply<11>, multiply<12>};

// Cuts `count` rows into as few equal parts of at most MOST as there can be: f(first, size).
template <class F>
void in_parts(long count, F f) {
    long parts = (count + MOST - 1) / MOST;
    for (long i = 0; i < parts; i++) {
        long first = count * i / parts;
        f(first, count * (i + 1) / parts - first);
    }
}

// x [tokens, columns] times the rows of a weight: done(t, m, column, sums) is called for m tokens from t on and 32 rows of
// the weight from `column` on. With `pair`, the sums of the rows that lie rows / 2 further come with them.
template <bool PAIR = false, class Done>
void product(Team& team, const Weight& w, const bf16* x, long tokens, Done done) {
    const long strips = PAIR ? w.strips() / 2 : w.strips(), pairs = w.columns / 2, chunks = (tokens + CHUNK - 1) / CHUNK;
    team.each(strips * chunks, [&](long task, long next) {
        long s = task / chunks, from = task % chunks * CHUNK, count = std::min(CHUNK, tokens - from);
        const Words* strips_of[2] = {w.strip(s), PAIR ? w.strip(s + strips) : nullptr};
        const Words* after[2] = {PAIR ? strips_of[1] : w.strip(std::min(next / chunks, strips - 1)), w.strip(std::min(next / chunks, strips - 1))};
        bool first_time = true;
        in_parts(count, [&](long i, long m) {
            Sums sums[1 + PAIR];
            const bf16* rows = x + (from + i) * w.columns;
            for (int half = 0; half <= PAIR; half++) {
                const Words* strip = strips_of[half];
                for (long j = 0; j < m; j++) sums[half].of[j][0] = sums[half].of[j][1] = Floats{};
                long near = first_time ? std::max(pairs - AHEAD, 0L) : pairs;
                MULTIPLY[m](rows, w.columns, strip, near, strip + (first_time ? 2 * AHEAD : 0), sums[half]);
                if (near < pairs)
                    MULTIPLY[m](rows + 2 * near, w.columns, strip + 2 * near, pairs - near, after[half], sums[half]);
            }
            first_time = false;
            done(from + i, m, s * WIDTH, sums);
        });
    });
}

// Calls f(t, row, value) for the sums of m tokens from t on, with the bias added.
template <class F>
void for_each(const Weight& w, long t, long m, long column, const Sums& sums, F f) {
    long width = std::min<long>(WIDTH, w.rows - column);
    for (long i = 0; i < m; i++) {
        const float* value = (const float*)sums.of[i];
        for (long j = 0; j < width; j++) f(t + i, column + j, value[j] + (w.bias ? to_float(w.bias[column + j]) : 0));
    }
}

// out [tokens, rows] = x @ weight.T + bias
void linear(Team& team, const Weight& w, const bf16* x, long tokens, bf16* out) {
    product(team, w, x, tokens, [&](long t, long m, long column, const Sums* sums) {
        for_each(w, t, m, column, *sums, [&](long t, long n, float value) { out[t * w.rows + n] = to_bf16(value); });
    });
}

void linear_add(Team& team, const Weight& w, const bf16* x, long tokens, bf16* to) {
    product(team, w, x, tokens, [&](long t, long m, long column, const Sums* sums) {
        for_each(w, t, m, column, *sums, [&](long t, long n, float value) {
            bf16& at = to[t * w.rows + n];
            at = to_bf16(to_float(at) + value);
        });
    });
}

// out [tokens, rows / 2] = silu(gate) * up of x @ [gate; up].T
void swiglu(Team& team, const Weight& w, const bf16* x, long tokens, bf16* out) {
    const long inner = w.rows / 2;
    product<true>(team, w, x, tokens, [&](long t, long m, long column, const Sums* sums) {
        for (long i = 0; i < m; i++)
            for (int half = 0; half < 2; half++) {
                Floats gate = sums[0].of[i][half], up = sums[1].of[i][half];
                if (w.bias)
                    for (int j = 0; j < LANES; j++) {
                        gate[j] += to_float(w.bias[column + half * LANES + j]);
                        up[j] += to_float(w.bias[inner + column + half * LANES + j]);
                    }
                // silu(x) = x / (1 + e^-x), from e^-|x|, which does not overflow
                Floats small = exp2_of((gate < 0 ? gate : -gate) * 1.44269504f);
                Floats value = gate * (gate < 0 ? small : splat(1)) / (1 + small) * up;
                bf16* to = out + (t + i) * inner + column + half * LANES;
                store(value, to);
            }
    });
}

// ---- norms, rotation, cache ----------------------------------------------------------------------

float inverse_rms(const bf16* x, long n, float eps) {
    Floats squares{};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) squares[j] += to_float(x[i + j]) * to_float(x[i + j]);
    for (int j = 0; i + j < n; j++) squares[j] += to_float(x[i + j]) * to_float(x[i + j]);
    return 1 / std::sqrt(sum(squares) / n + eps);
}

void normalise(const bf16* x, long n, const Norm& norm, bf16* out) {
    float factor = inverse_rms(x, n, norm.eps);
    for (long i = 0; i < n; i++) out[i] = to_bf16(to_float(x[i]) * factor * to_float(norm.weight[i]));
}

void rms_norm(Team& team, const bf16* x, long tokens, long n, const Norm& norm, bf16* out) {
    team.each(tokens, [&](long t, long) { normalise(x + t * n, n, norm, out + t * n); });
}

// A head [dim] after its norm, turned by the angles of its position.
void rotate(bf16* x, long dim, const Norm& norm, const float* cos_sin) {
    if (norm.weight) normalise(x, dim, norm, x);
    const long half = dim / 2;
    for (long i = 0; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[i + half]), c = cos_sin[i], s = cos_sin[i + half];
        x[i] = to_bf16(a * c - b * s);
        x[i + half] = to_bf16(b * c + a * s);
    }
}

// NaN becomes 0 and infinity the largest number: 0 * NaN would reach queries that do not see its token.
bf16 finite(bf16 x) {
    if ((x & 0x7F80) != 0x7F80) return x;
    return x & 0x7F ? 0 : (x & 0x8000) | 0x7F7F;
}

// Rotates q in place in qkv [tokens, (heads + 2 kv_heads) * dim]; k and v go to the layer's cache.
void rope_cache(Team& team, const Model& m, const Layer& layer, const Batch& batch, bf16* qkv, bf16* cache, long cache_head) {
    const long dim = m.head_dim, width = (m.heads + 2 * m.kv_heads) * dim;
    team.each(batch.tokens, [&](long t, long) {
        const float* angles = m.cos_sin + batch.positions[t] * dim;
        bf16* head = qkv + t * width;
        for (long h = 0; h < m.heads; h++, head += dim) rotate(head, dim, layer.q_norm, angles);
        if (batch.slots[t] < 0) return;
        bf16* to = cache + batch.slots[t] * dim;
        for (long h = 0; h < m.kv_heads; h++, head += dim, to += cache_head) {
            rotate(head, dim, layer.k_norm, angles);
            memcpy(to, head, dim * sizeof(bf16));
        }
        for (long h = 0; h < m.kv_heads; h++, head += dim, to += cache_head)
            for (long i = 0; i < dim; i++) to[i] = finite(head[i]);
    });
}

// ---- attention -----------------------------------------------------------------------------------

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

    bool operator()(long j) const {
        return (j >= low && j < high) || (j >= own && j < own + 64 && (bits >> (j - own) & 1));
    }
};

Seen seen_by(const Batch& batch, long row, long i, long window) {
    const long base = batch.base_len[row], t = batch.q_start[row] + i;
    const long low = window ? std::max(batch.positions[t] - window + 1, 0L) : 0;
    if (batch.ancestors) return {low, base, base, uint64_t(batch.ancestors[t])};
    return {low, base + i + 1, base, 0};
}

// Weighted sums of values [wide] over some positions, with the weights exp2(score - largest), whose sum is `total`.
struct Partial {
    float largest = -1e30f, total = 0;
    alignas(64) float sums[MAX_DIM];

    void join(const Partial& next, long wide) {
        const float most = std::max(largest, next.largest);
        const float before = exp2_of(splat(largest - most))[0], after = exp2_of(splat(next.largest - most))[0];
        for (long d = 0; d < wide; d++) sums[d] = sums[d] * before + next.sums[d] * after;
        total = total * before + next.total * after;
        largest = most;
    }
};

void transpose(Words (&rows)[LANES]) {  // 16 x 16
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        Words upper, lower;
        for (unsigned j = 0; j < LANES; j++) {
            upper[j] = j & step ? LANES + j - step : j;
            lower[j] = j & step ? LANES + j : j + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                Words a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, upper);
                rows[i + step] = __builtin_shuffle(a, b, lower);
            }
    }
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
        Seen seen[MAX_GROUP];
        Partial part[MAX_GROUP], total[MAX_GROUP];
    };

    // The key or value of a head at a cache index of a row; zeros from `end` on.
    const bf16* entry(const bf16* of, const Piece& p, long j, long end) const {
        static const bf16 nothing[MAX_DIM] = {};
        if (j >= end) return nothing;
        const long block = batch.block_table[p.row * batch.max_blocks + j / cache.block_size];
        return of + ((p.head * cache.num_blocks + block) * cache.block_size + j % cache.block_size) * dim;
    }

    // The keys of 32 positions from j on as a strip [dim / 2][32].
    void pack_keys(const Piece& p, long j, long end, Words* strip) const {
        for (long half = 0; half < 2; half++)
            for (long d = 0; d < dim; d += 2 * LANES) {
                const long n = std::min<long>(2 * LANES, dim - d);
                Words block[LANES] = {};
                for (long i = 0; i < LANES; i++)
                    memcpy(&block[i], entry(keys, p, j + half * LANES + i, end) + d, n * sizeof(bf16));
                transpose(block);
                for (long i = 0; i < n / 2; i++) strip[d + 2 * i + half] = block[i];
            }
    }

    // The values of positions j and j + 1 as the pair of that number of strips [wide / 32][pairs][32].
    void pack_values(const Piece& p, long j, long end, Words* strips, long pair, long pairs) const {
        const bf16 *a = entry(values, p, j, end), *b = entry(values, p, j + 1, end);
        for (long d = 0; d < wide; d += WIDTH) {
            uint32_t* to = (uint32_t*)(strips + (d / WIDTH * pairs + pair) * 2);
            for (long k = 0; k < WIDTH; k++) to[k] = d + k < dim ? a[d + k] | uint32_t(b[d + k]) << 16 : 0;
        }
    }

    // Positions begin .. end - 1, at most SPAN, for all queries of a piece; to scratch.part.
    void span(const Piece& p, long begin, long end, Scratch& at) const {
        const float scale = 1.44269504f / std::sqrt(float(dim));
        const long rows = p.count * group, strips = (end - begin + WIDTH - 1) / WIDTH, pairs = strips * LANES;
        for (long s = 0; s < strips; s++) {
            const long j = begin + s * WIDTH;
            pack_keys(p, j, end, at.strips);
            in_parts(rows, [&](long i, long m) {
                Sums sums = {};
                MULTIPLY[m](at.q + i * dim, dim, at.strips, dim / 2, at.strips, sums);
                for (long k = 0; k < m; k++) {
                    const Seen& sees = at.seen[(i + k) / group];
                    const bool all = j >= sees.low && j + WIDTH <= sees.high;
                    const float* value = (const float*)sums.of[k];
                    for (long n = 0; n < WIDTH; n++)
                        at.scores[i + k][s * WIDTH + n] = all || sees(j + n) ? value[n] * scale : -INFINITY;
                }
            });
        }
        for (long i = 0; i < rows; i++) {
            Floats most = splat(-1e30f), total{};
            for (long j = 0; j < strips * WIDTH; j += LANES) {
                Floats s = *(Floats*)(at.scores[i] + j);
                most = s > most ? s : most;
            }
            at.part[i].largest = largest(most);
            for (long j = 0; j < strips * WIDTH; j += LANES) {
                Floats weight = exp2_of(*(Floats*)(at.scores[i] + j) - at.part[i].largest);
                total += weight;
                store(weight, at.weights[i] + j);
            }
            at.part[i].total = sum(total);
        }
        for (long n = 0; n < pairs; n++) pack_values(p, begin + 2 * n, end, at.strips, n, pairs);
        for (long d = 0; d < wide; d += WIDTH) {
            const Words* strip = at.strips + d / WIDTH * pairs * 2;
            in_parts(rows, [&](long i, long m) {
                Sums sums = {};
                MULTIPLY[m](at.weights[i], SPAN, strip, pairs, strip, sums);
                for (long k = 0; k < m; k++) memcpy(at.part[i + k].sums + d, sums.of[k], WIDTH * sizeof(float));
            });
        }
    }

    // All positions of a piece, in spans whose borders are the same for all pieces; to `result` [count * group].
    void operator()(const Piece& p, Scratch& at, Partial* result) const {
        const long rows = p.count * group, width = (model.heads + 2 * model.kv_heads) * dim;
        long low = p.end;
        for (long i = 0; i < p.count; i++) {
            at.seen[i] = seen_by(batch, p.row, p.first + i, window);
            low = std::min(low, at.seen[i].low);
            const bf16* q = qkv + (batch.q_start[p.row] + p.first + i) * width + p.head * group * dim;
            memcpy(at.q + i * group * dim, q, group * dim * sizeof(bf16));
        }
        for (long i = 0; i < rows; i++) result[i].largest = -1e30f, result[i].total = 0;
        for (long i = 0; i < rows; i++) std::fill_n(result[i].sums, wide, 0.0f);
        for (long begin = std::max(p.begin, low / SPAN * SPAN); begin < p.end; begin += SPAN) {
            span(p, begin, std::min(begin + SPAN, p.end), at);
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
        for (long row = 0; row < batch.rows; row++)
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

void attention(Team& team, const Attention& attend, const Plan& plan, Attention::Scratch& at, Partial* parts) {
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

// ---- the decoder ---------------------------------------------------------------------------------

constexpr int PHASES = 9;  // of a layer, at most

template <class T>
std::unique_ptr<T[]> room(long n) {
    return std::unique_ptr<T[]>(new T[n]);  // not initialised
}

template <class Work>
void run(int threads, int phases, Work work) {
    std::vector<Phase> all(phases);
#pragma omp parallel num_threads(threads)
    {
        Team team(all.data());
        work(team);
    }
}

}  // namespace

extern "C" {

// hidden [tokens, hidden] after the final norm; keys and values of the tokens to the cache.
void nanospec_forward(const Model* model, const Batch* batch, const Cache* cache, bf16* hidden, int threads) {
    const Model& m = *model;
    const long T = batch->tokens, H = m.hidden, D = m.head_dim, width = (m.heads + 2 * m.kv_heads) * D;
    const long per_head = cache->num_blocks * cache->block_size * D, per_layer = 2 * m.kv_heads * per_head;
    auto x = room<bf16>(T * H), normed = room<bf16>(T * H), qkv = room<bf16>(T * width);
    auto out = room<bf16>(T * m.heads * D), inner = room<bf16>(T * m.inner);
    const Plan plan(m, *batch, threads);
    auto parts = room<Partial>(plan.apart ? plan.pieces.size() * std::max(TOGETHER, m.heads / m.kv_heads) : 0);
    run(threads, PHASES * m.num_layers + 2, [&](Team& team) {
        auto scratch = std::make_unique<Attention::Scratch>();
        team.each(T, [&](long t, long) {
            memcpy(&x[t * H], m.embedding + batch->input_ids[t] * H, H * sizeof(bf16));
        });
        for (long i = 0; i < m.num_layers; i++) {
            const Layer& layer = m.layers[i];
            bf16* keys = cache->data + i * per_layer;
            rms_norm(team, x.get(), T, H, layer.input_norm, normed.get());
            linear(team, layer.qkv, normed.get(), T, qkv.get());
            rope_cache(team, m, layer, *batch, qkv.get(), keys, per_head);
            const Attention attend{m, *batch, *cache, keys, keys + m.kv_heads * per_head, layer.window, qkv.get(), out.get()};
            attention(team, attend, plan, *scratch, parts.get());
            linear_add(team, layer.o, out.get(), T, x.get());
            rms_norm(team, x.get(), T, H, layer.post_norm, normed.get());
            swiglu(team, layer.gate_up, normed.get(), T, inner.get());
            linear_add(team, layer.down, inner.get(), T, x.get());
        }
        rms_norm(team, x.get(), T, H, m.norm, hidden);
    });
}

// out [tokens, rows] = x [tokens, columns] @ weight.T + bias
void nanospec_linear(const Weight* weight, const bf16* x, long tokens, bf16* out, int threads) {
    run(threads, 1, [&](Team& team) { linear(team, *weight, x, tokens, out); });
}
}
