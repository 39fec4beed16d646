// Products of some tokens with a packed weight, and what is done with the sums before they are forgotten.

#pragma once
#include <algorithm>

#include "narrow.h"
#include "structs.h"
#include "threads.h"

constexpr long CHUNK = 8 * MOST;  // tokens to a task
constexpr long READ_BOUND = 4;    // tokens whose products take no longer than reading the weight

// Products of M rows, by M, with some kind of matrix.
template <class Matrix>
using Multiply = void (*)(const bf16*, long, const Matrix&, long, Sums&);
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

// Cuts `count` rows into as few parts of at most MOST as there can be, of nearly the same size: f(first, size, i).
template <class F>
void in_parts(long count, F f) {
    const long parts = (count + MOST - 1) / MOST;
    for (long i = 0; i < parts; i++) {
        const long first = count * i / parts;
        f(first, count * (i + 1) / parts - first, i);
    }
}

// The rows of x, one for each token, times those of a weight: done(t, m, row, sums) gets the sums of m tokens from t on
// and 32 rows of the weight from `row` on. With PAIR, those of the rows that lie half the weight further come with them.
//
// A task is a strip with up to CHUNK tokens. While it is computed, the strip that this thread will take next is on its
// way to the cache. Where nothing but reading takes time, the processor's own prefetching is faster alone.
template <bool PAIR = false, class Done>
void product(Team& team, const Weight& w, Rows x, long tokens, Done done) {
    const long strips = w.strips() / (1 + PAIR), pairs = w.columns / 2, chunks = (tokens + CHUNK - 1) / CHUNK;
    const long bytes = pairs * 2 * sizeof(Words);
    team.each(strips * chunks, [&](long task, long next) {
        const long s = task / chunks, from = task % chunks * CHUNK, count = std::min(CHUNK, tokens - from);
        const long after = next / chunks, parts = (count + MOST - 1) / MOST;
        in_parts(count, [&](long first, long m, long part) {
            Sums sums[1 + PAIR];
            for (int half = 0; half <= PAIR; half++) {
                const char* ahead = (const char*)w.strip(after + half * strips) + bytes / parts * part;
                const Strip strip{w.strip(s + half * strips), ahead, tokens > READ_BOUND ? bytes / pairs / parts : 0};
                MULTIPLY<Strip>[m](x[from + first], x.stride, strip, pairs, sums[half]);
            }
            done(from + first, m, s * WIDTH, sums);
        });
    });
}

// Calls f(t, row, values, n) with the sums of token t and n <= 16 rows of the weight from `row` on, bias included.
template <class F>
void with_bias(const Weight& w, long t, long m, long row, const Sums& sums, F f) {
    for (int half = 0; half < 2; half++, row += LANES) {
        const long n = std::min<long>(LANES, w.rows - row);
        if (n <= 0) return;
        const Floats bias = w.bias ? load(w.bias + row, n) : Floats{};
        for (long i = 0; i < m; i++) f(t + i, row, sums.of[i][half] + bias, n);
    }
}

// out = x @ weight.T + bias
inline void linear(Team& team, const Weight& w, Rows x, long tokens, Rows out) {
    product(team, w, x, tokens, [&](long t, long m, long row, const Sums* sums) {
        with_bias(w, t, m, row, *sums, [&](long t, long row, Floats values, long n) {
            store(values, out[t] + row, n);
        });
    });
}

// to += x @ weight.T + bias
inline void linear_add(Team& team, const Weight& w, Rows x, long tokens, Rows to) {
    product(team, w, x, tokens, [&](long t, long m, long row, const Sums* sums) {
        with_bias(w, t, m, row, *sums, [&](long t, long row, Floats values, long n) {
            bf16* at = to[t] + row;
            store(load(at, n) + values, at, n);
        });
    });
}

// out = silu(gate) * up of x @ [gate; up].T + bias; half the weight's rows a multiple of 32
inline void swiglu(Team& team, const Weight& w, Rows x, long tokens, Rows out) {
    const long inner = w.rows / 2;
    product<true>(team, w, x, tokens, [&](long t, long m, long row, const Sums* sums) {
        for (int half = 0; half < 2; half++, row += LANES)
            for (long i = 0; i < m; i++) {
                Floats gate = sums[0].of[i][half], up = sums[1].of[i][half];
                if (w.bias) gate += load(w.bias + row), up += load(w.bias + inner + row);
                // silu(x) = x / (1 + e^-x); from e^-|x|, which does not overflow
                const Floats small = exp2_of((gate < 0 ? gate : -gate) * LOG2_E);
                store(gate * (gate < 0 ? small : splat(1)) / (1 + small) * up, out[t + i] + row);
            }
    });
}
