// Products of tokens with a packed weight, with a fused epilogue.

#pragma once
#include <algorithm>

#include "amx.h"
#include "quantized.h"

// MULTIPLY[M] is `multiply` for M rows.
template <class Matrix>
using Multiply = void (*)(const bf16*, long, const Matrix&, long, Sums);
#ifdef __AVX512F__
template <class Matrix, int M> constexpr Multiply<Matrix> OF = multiply<Matrix, M>;
#else
template <class Matrix, int M> constexpr Multiply<Matrix> OF = multiply_narrow<Matrix, M>;
#endif
template <class Matrix>
constexpr Multiply<Matrix> MULTIPLY[] = {
    nullptr,       OF<Matrix, 1>, OF<Matrix, 2>, OF<Matrix, 3>,  OF<Matrix, 4>,  OF<Matrix, 5>,  OF<Matrix, 6>,
    OF<Matrix, 7>, OF<Matrix, 8>, OF<Matrix, 9>, OF<Matrix, 10>, OF<Matrix, 11>, OF<Matrix, 12>,
};

constexpr long MAX_REGISTER_ROWS = std::size(MULTIPLY<Strip>) - 1;  // sums of 2 vectors fit in registers

// Returns whether AMX is used for this number of pairs of rows of a matrix; if so, for any number of rows of x.
template <class Matrix>
bool uses_amx(long pairs) { return has_amx() && pairs % Matrix::RUN == 0; }

// Returns the maximum number of rows of x that can be multiplied at once.
template <class Matrix>
long most_rows(long pairs) {
    return uses_amx<Matrix>(pairs) ? MAX_AMX_ROWS : MAX_REGISTER_ROWS;
}

// `multiply` for m <= most_rows rows.
template <class Matrix>
void multiply_rows(long m, const bf16* x, long stride, const Matrix& matrix, long pairs, Sums sums) {
    if (uses_amx<Matrix>(pairs)) return multiply_amx(m, x, stride, matrix, pairs, sums);
    MULTIPLY<Matrix>[m](x, stride, matrix, pairs, sums);
}

// Divides `count` rows into the minimum number of parts of at most `most`, of nearly equal size: f(first, size, i).
template <class F>
void in_parts(long count, long most, F f) {
    const long parts = (count + most - 1) / most;
    for (long i = 0; i < parts; i++) {
        const long first = count * i / parts;
        f(first, count * (i + 1) / parts - first, i);
    }
}

static_assert(MAX_PRODUCT_ROWS >= std::max(MAX_AMX_ROWS, MAX_REGISTER_ROWS));

// A packed weight and rows of x in bfloat16, the operands of `multiply_all`.
struct Bfloat16Operands {
    const Weight& w;
    Rows x;
    long pairs = w.columns / 2;

    long most_rows() const { return ::most_rows<Strip>(pairs); }
    // For few tokens, hardware prefetching alone is faster on AMD processors and with AMX.
    bool prefetches(long tokens) const {
        return tokens > (uses_amx<Strip>(pairs) ? MAX_AMX_ROWS / 2 : AMD ? MAX_REGISTER_ROWS / 3 : 0);
    }
    void multiply(long t, long m, long strip, const char* ahead, long bytes, Sums sums) const {
        multiply_rows(m, x[t], x.stride, Strip{(const Words*)w.strip(strip), ahead, bytes / pairs}, pairs, sums);
    }
};

// Computes x @ weight.T. done(t, m, row, sums) receives the sums of m tokens from t on and 32 rows of the weight from
// `row` on; with PAIR, also those of the corresponding rows in the second half of the weight.
//
// A task is a strip and a chunk of tokens: enough tokens to amortize reading the strip, but few enough to stay in the
// cache and to create tasks for all threads. Meanwhile, the next strip of this thread is prefetched.
template <bool PAIR, class Operands, class Done>
void multiply_all(Team& team, const Operands& operands, long tokens, Done done) {
    const Weight& w = operands.w;
    const long strips = w.strips() / (1 + PAIR), most = operands.most_rows(), all = (tokens + most - 1) / most * strips;
    const long chunk = most * std::clamp(all / (4 * team.threads), 1L, 8L), chunks = (tokens + chunk - 1) / chunk;
    const bool fetch = operands.prefetches(tokens);
    team.each(chunks * strips, [&](long task, long next) {
        const long s = task % strips, from = task / strips * chunk, count = std::min(chunk, tokens - from);
        const long after = next % strips, parts = (count + most - 1) / most;
        in_parts(count, most, [&](long first, long m, long part) {
            alignas(64) float buffer[1 + PAIR][MAX_PRODUCT_ROWS * WIDTH];
            Sums sums[1 + PAIR];
            for (int half = 0; half <= PAIR; half++) {
                const char* ahead = w.strip(after + half * strips) + w.strip_bytes / parts * part;
                sums[half] = {buffer[half], WIDTH};
                operands.multiply(from + first, m, s + half * strips, ahead, fetch ? w.strip_bytes / parts : 0, sums[half]);
            }
            done(from + first, m, s * WIDTH, sums);
        });
    });
}

// Rows of x, and memory for their quantized form if the weight is quantized: two bytes per element.
struct Operand {
    Rows rows;
    bf16* memory;
};

template <bool PAIR = false, class Done>
void product(Team& team, const Weight& w, const Operand& x, long tokens, Done done) {
    if (w.bits == 16) return multiply_all<PAIR>(team, Bfloat16Operands{w, x.rows}, tokens, done);
    int8_t* const codes = (int8_t*)x.memory;
    const QuantizedRows rows{codes, (Factor*)(codes + tokens * w.columns), tokens};
    const auto quantize = w.group == 64 ? quantize_row<64> : quantize_row<32>;
    team.each(tokens, [&](long t, long) { quantize(x.rows[t], w, rows, t); });
    multiply_all<PAIR>(team, QuantizedOperands{w, rows}, tokens, done);
}

// out = x @ weight.T + bias; with ADD, out += x @ weight.T + bias
template <bool ADD = false>
void linear(Team& team, const Weight& w, const Operand& x, long tokens, Rows out) {
    product(team, w, x, tokens, [&](long t, long m, long row, const Sums* sums) {
        for (int half = 0; half < 2; half++, row += LANES) {
            const long n = std::min<long>(LANES, w.rows - row);
            if (n <= 0) return;
            const Floats bias = w.bias ? load(w.bias + row, n) : Floats{};
            for (long i = 0; i < m; i++) {
                const Floats values = load((*sums)[i] + half * LANES) + bias;
                bf16* to = out[t + i] + row;
                store(ADD ? load(to, n) + values : values, to, n);
            }
        }
    });
}

// out = silu(g) * u, or gelu(g) * u (tanh), for [g; u] = x @ weight.T + bias. Half of the weight's rows must be a
// multiple of 32.
inline void gated(Team& team, const Weight& w, bool gelu, const Operand& x, long tokens, Rows out) {
    const long inner = w.rows / 2;
    product<true>(team, w, x, tokens, [&](long t, long m, long row, const Sums* sums) {
        for (int half = 0; half < 2; half++, row += LANES)
            for (long i = 0; i < m; i++) {
                Floats gate = load(sums[0][i] + half * LANES), up = load(sums[1][i] + half * LANES);
                if (w.bias) gate += load(w.bias + row), up += load(w.bias + inner + row);
                // silu(x) = x / (1 + e^-x), gelu(x) = x / (1 + e^-y); uses e^-|y|, which does not overflow
                const Floats y = gelu ? 1.59576912f * (gate + 0.044715f * gate * gate * gate) : gate;
                const Floats small = exp2_of(minus_abs(y) * LOG2_E);
                const auto below = [](Part gate, Part small) { return gate < 0 ? small : Part{} + 1; };
                store(gate * by_parts(below, &gate, &small) / (1 + small) * up, out[t + i] + row);
            }
    });
}
