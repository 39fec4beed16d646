// `Model.forward` of models/decoder.py for bfloat16 on a CPU, in one call: the threads share each layer.
// The specification is in decoder.py, rope_cache.py and attention.py.
//
// The result of a token is bitwise independent of other rows, of tokens that it does not attend to, and of the number of
// threads: the order of every sum depends only on the shape of a weight or on absolute positions.

#include <memory>

#include "attention.h"
#include "forward.h"

namespace {

void rms_norm(Team& team, const Model& m, Rows x, long tokens, Norm weight, Rows out) {
    team.each(tokens, [&](long t, long) { normalize(x[t], m.hidden, weight, m.eps, out[t]); });
}

// to += h @ weight.T + bias, or to += norm(h @ weight.T + bias) with a norm.
void linear_add(
    Team& team, const Model& m, const Weight& w, Norm norm, const Operand& h, long tokens, Rows buffer, Rows to) {
    if (!norm) return linear<true>(team, w, h, tokens, to);
    linear(team, w, h, tokens, buffer);
    team.each(tokens, [&](long t, long) { normalize<true>(buffer[t], m.hidden, norm, m.eps, to[t]); });
}

// Normalizes a head if it has a norm, and applies RoPE.
void rotate(const Model& m, bf16* x, Norm norm, const float* cos_sin) {
    if (norm) normalize(x, m.head_dim, norm, m.eps, x);
    const long half = m.head_dim / 2;
    for (long i = 0; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[i + half]), c = cos_sin[i], s = cos_sin[i + half];
        x[i] = to_bf16(a * c - b * s);
        x[i + half] = to_bf16(b * c + a * s);
    }
}

// Rotates q and k in place, and writes k and v to the cache of layer i. A row of qkv holds q, k and v of a token.
void rope_cache(Team& team, const Model& m, const Layer& layer, const Batch& batch, Rows qkv, const Cache& cache, long i) {
    const long dim = m.head_dim;
    team.each(batch.num_tokens, [&](long t, long) {
        const float* angles = layer.cos_sin + batch.positions[t] * dim;
        bf16 *q = qkv[t], *k = q + m.heads * dim, *v = k + m.kv_heads * dim;
        for (long h = 0; h < m.heads; h++) rotate(m, q + h * dim, layer.q_norm, angles);
        if (batch.slots[t] < 0) return;
        for (long h = 0; h < m.kv_heads; h++) {
            rotate(m, k + h * dim, layer.k_norm, angles);
            Head(cache, i, h).write(batch.slots[t], k + h * dim, v + h * dim);
        }
    });
}

constexpr int PHASES = 16;  // maximum per layer

struct WriteKV {
    const Model* model;
    Cache cache;
    Batch batch;
    Rows x;
    long threads;
};

struct Lookup {
    Weight weight;
    const int64_t* ids;  // [tokens]
    Rows out;
    long tokens;
};

struct Move {
    Batch batch;
    Cache cache;
    const int *num_emitted, *path;  // [rows], [rows, width]
    long width;
};

}  // namespace

void embed(const Model& m, long id, bf16* out) {
    if (m.embedding.bits < 16) return dequantize_row(m.embedding, id, m.embedding_scale, out);
    const bf16* row = (const bf16*)m.embedding.data + id * m.hidden;
    for (long i = 0; i < m.hidden; i += LANES) {
        const long n = std::min<long>(LANES, m.hidden - i);
        store(load(row + i, n) * float(m.embedding_scale), out + i, n);
    }
}

void forward(const Forward& args, Rows start, Rows qkv_inputs) {
    const Model& m = *args.model;
    const Batch& batch = args.batch;
    const Cache& cache = args.cache;
    const long T = batch.num_tokens, H = m.hidden, D = m.head_dim;
    const Buffer x(T, H), normed(T, H), qkv(T, (m.heads + 2 * m.kv_heads) * D), out(T, m.heads * D), inner(T, m.inner);
    const Plan plan(m, batch, args.threads);
    const Buffer quantized(T, std::max({m.layers[0].qkv.columns, m.heads * D, m.inner}));
    const auto keep = [&](Team& team, long num_layers) {
        const State *states = args.states, *end = states + args.num_states;
        const auto wanted = [=](const State& state) { return state.num_layers == num_layers; };
        if (std::none_of(states, end, wanted)) return;
        team.each(T, [&](long t, long) {
            for (const State* state = states; state != end; state++)
                if (wanted(*state)) std::copy_n(x[t], H, state->rows[t]);
        });
    };
    const std::unique_ptr<Partial[]> parts(plan.split_spans ? new Partial[plan.pieces.size() * plan.rows] : nullptr);
    run(args.threads, PHASES * m.num_layers + 3, [&](Team& team) {
        static thread_local Attention::Scratch scratch;
        const FpuMode mode;
        team.each(T, [&](long t, long) {
            if (start.data) std::copy_n(start[t], H, x[t]);
            else embed(m, batch.input_ids[t], x[t]);
        });
        for (long i = 0; i < m.num_layers; i++) {
            const Layer& layer = m.layers[i];
            keep(team, i);
            const bool given = qkv_inputs.data && !i;
            if (!given) rms_norm(team, m, x, T, layer.input_norm, normed);
            linear(team, layer.qkv, {given ? qkv_inputs : Rows(normed), quantized.data}, T, qkv);
            rope_cache(team, m, layer, batch, qkv, cache, i);
            if (!args.hidden.data && i + 1 == m.num_layers) return;
            const Attention attend{m, batch, cache, i, layer.window, qkv, out};
            attention(team, attend, plan, scratch, parts.get());
            linear_add(team, m, layer.o, layer.o_norm, {out, quantized.data}, T, normed, x);
            rms_norm(team, m, x, T, layer.post_norm, normed);
            gated(team, layer.gate_up, m.gelu, {normed, quantized.data}, T, inner);
            linear_add(team, m, layer.down, layer.down_norm, {inner, quantized.data}, T, normed, x);
        }
        keep(team, m.num_layers);
        rms_norm(team, m, x, T, m.norm, args.hidden);
    });
}

extern "C" void nanospec_forward(const Forward* args) { forward(*args); }

// Writes the keys and values that each layer computes from x, instead of from its own input (drafters/dflash.py).
extern "C" void nanospec_write_kv(const WriteKV* args) {
    const Model& m = *args->model;
    const long T = args->batch.num_tokens;
    const Buffer qkv(T, (m.heads + 2 * m.kv_heads) * m.head_dim), quantized(T, m.hidden);
    run(args->threads, PHASES * m.num_layers, [&](Team& team) {
        const FpuMode mode;
        for (long i = 0; i < m.num_layers; i++) {
            linear(team, m.layers[i].qkv, {args->x, quantized.data}, T, qkv);
            rope_cache(team, m, m.layers[i], args->batch, qkv, args->cache, i);
        }
    });
}

// Returns the name of the instruction set of the products.
extern "C" const char* nanospec_target() {
    if (has_amx()) return "AMX";
#ifdef BY_PAIRS
    return "avx512_bf16";
#elif defined __AVX512F__
    return "AVX-512";
#elif defined __AVXVNNI__
    return "AVX-VNNI";
#elif defined __AVX2__
    return "AVX2";
#else
    return "no AVX";
#endif
}

// kernels/speculation/kv_move.py
extern "C" void nanospec_kv_move(const Move* args) {
    const Batch& batch = args->batch;
    const Cache& cache = args->cache;
    for (long b = 0; b < batch.num_rows; b++) {
        const int* blocks = batch.block_table + b * batch.max_blocks;
        const auto slot = [&](long node) {
            const long i = batch.base_len[b] + node;
            return blocks[i / cache.block_size] * cache.block_size + i % cache.block_size;
        };
        for (long to = 1; to < args->num_emitted[b]; to++) {
            const long from = args->path[b * args->width + to];
            if (from == to) continue;
            for (long layer = 0; layer < cache.num_layers; layer++)
                for (long h = 0; h < cache.kv_heads; h++) Head(cache, layer, h).move(slot(from), slot(to));
        }
    }
}

extern "C" void nanospec_linear(const Linear* args) {
    const Weight& w = args->weight;
    const Buffer quantized(w.bits < 16 ? args->tokens : 0, w.columns);
    run(args->threads, 2, [&](Team& team) {
        const FpuMode mode;
        linear(team, w, {args->x, quantized.data}, args->tokens, args->out);
    });
}

// out = rows `ids` of a quantized weight
extern "C" void nanospec_rows(const Lookup* args) {
    for (long t = 0; t < args->tokens; t++) dequantize_row(args->weight, args->ids[t], 1, args->out[t]);
}
