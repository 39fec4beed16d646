// What a forward pass reads and writes, as `nanospec/models/compiled.py` passes it: words of 8 bytes, each an address or
// a number. Numbers behind addresses are bfloat16 unless the type says otherwise.

#pragma once
#include "arithmetic.h"
#include "step.h"

// A matrix [rows, columns], packed as [ceil(rows / 32)][columns / 2][32][2], with rows of zeros at the end.
struct Weight {
    const bf16* data;
    const bf16* bias;  // [rows] or null
    long rows, columns;

    const Words* strip(long i) const { return (const Words*)(data + i * columns * WIDTH); }
    long strips() const { return (rows + WIDTH - 1) / WIDTH; }
};

// A row of numbers for each token.
struct Rows {
    bf16* data;
    long stride;  // numbers from one row to the next

    bf16* operator[](long t) const { return data + t * stride; }
};

struct Layer {
    const bf16 *input_norm, *q_norm, *k_norm, *post_norm;  // of q and k: null if there are none
    Weight qkv, o, gate_up, down;
    long window;  // 0: none
};

struct Model {
    long num_layers, hidden, heads, kv_heads, head_dim, inner;
    double eps;             // of all norms
    const bf16* embedding;  // [vocabulary, hidden]
    const float* cos_sin;   // [positions, head_dim]
    const bf16* norm;       // the final one
    const Layer* layers;
};
