// What a forward pass reads and writes, as `nanospec/models/cpu.py` passes it: words of 8 bytes, each an address or
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

using Norm = const float*;  // with zeros behind it, up to a multiple of 16

struct Layer {
    Norm input_norm, q_norm, k_norm, o_norm, post_norm, down_norm;  // of q, k and what o and down give: null if none
    Weight qkv, o, gate_up, down;
    long window;           // 0: none
    const float* cos_sin;  // [positions, head_dim]
};

struct Model {
    long num_layers, hidden, heads, kv_heads, head_dim, inner;
    double eps;              // of all norms
    double query_scalar;     // q . k is divided by its root
    double softcap;          // of that, 0: none
    double embedding_scale;
    long gelu;               // the gate's function; 0: silu
    const bf16* embedding;   // [vocabulary, hidden]
    Norm norm;               // the final one
    const Layer* layers;
};
