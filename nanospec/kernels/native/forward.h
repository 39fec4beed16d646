// The functions of decoder.cpp that the drafter in eagle3.cpp uses, and their arguments.

#pragma once
#include <cmath>
#include <memory>

#include "cache.h"

// A matrix in memory. Rows with a stride of a multiple of 4 KB would compete for the same few lines of the L1 cache, so
// they are padded. Data is aligned to cache lines, to avoid reading one more line per row.
constexpr long PAGE_ELEMENTS = 4096 / sizeof(bf16);

struct Buffer : Rows {
    struct alignas(64) Line { bf16 elements[WIDTH]; };
    std::unique_ptr<Line[]> lines;

    Buffer(long rows, long columns) : Rows{nullptr, columns % PAGE_ELEMENTS ? columns : columns + WIDTH} {
        lines.reset(new Line[rows * stride / WIDTH + 1]);  // uninitialized
        data = lines[0].elements;
    }
};

// A copy of the residual stream after a number of layers.
struct State {
    long num_layers;
    Rows rows;
};

struct Forward {
    const Model* model;
    Cache cache;
    Batch batch;
    Rows hidden;  // output after the final norm; null to compute keys and values only
    const State* states;
    long num_states;
    long threads;
};

struct Linear {
    Weight weight;
    Rows x, out;
    long tokens, threads;
};

// out = norm(x); with ADD, out += norm(x)
template <bool ADD = false>
inline void normalize(const bf16* x, long n, Norm weight, float eps, bf16* out) {
    Floats squares{};
    for (long i = 0; i < n; i += LANES) {
        const Floats some = load(x + i, std::min<long>(LANES, n - i));
        squares += some * some;
    }
    const float factor = 1 / std::sqrt(sum(squares) / n + eps);
    for (long i = 0; i < n; i += LANES) {
        const long m = std::min<long>(LANES, n - i);
        if (ADD) store(load(out + i, m) + load(x + i, m) * factor * load(weight + i), out + i, m);
        else store(load(x + i, m) * factor * load(weight + i), out + i, m);
    }
}

// Writes the embedding of a token.
void embed(const Model& m, long id, bf16* out);

// If given, `start` [T, hidden] replaces the embeddings, and `qkv_inputs` [T, qkv.columns] the norm of the residual
// stream as the input of q, k and v of the first layer.
void forward(const Forward& args, Rows start = {}, Rows qkv_inputs = {});

extern "C" void nanospec_linear(const Linear* args);
