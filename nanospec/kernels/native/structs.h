// The arguments of a forward pass, as passed by `nanospec/models/cpu.py`: 8-byte words, each an address or a number.

#pragma once
#include "arithmetic.h"
#include "step.h"

// A matrix [rows, columns], packed in strips of 32 rows and padded with zero rows: in bfloat16 as [columns / 2][32][2],
// else as the blocks of `quantized.h`.
struct Weight {
    const char* data;
    const bf16* bias;  // [rows] or null
    long rows, columns;
    long bits;          // 16, 8 or 4
    long group;         // columns per scale, 32 or 64
    long has_minima;    // whether groups have a minimum, else codes have an offset
    double factor;      // by which stored scales and minima are multiplied
    long strip_bytes;

    const char* strip(long i) const { return data + i * strip_bytes; }
    long strips() const { return (rows + WIDTH - 1) / WIDTH; }
};

// A matrix with one row per token.
struct Rows {
    bf16* data;
    long stride;  // elements between rows

    bf16* operator[](long t) const { return data + t * stride; }
};

using Norm = const float*;  // a weight, padded with zeros to a multiple of 16

struct Layer {
    Norm input_norm, q_norm, k_norm, o_norm, post_norm, down_norm;  // q, k, o, down: null if absent
    Weight qkv, o, gate_up, down;
    long window;           // sliding window, 0: none
    const float* cos_sin;  // [positions, head_dim]
};

struct Model {
    long num_layers, hidden, heads, kv_heads, head_dim, inner;
    double eps;              // of all norms
    double query_scalar;     // scores are q . k / sqrt(query_scalar)
    double softcap;          // of the scores, 0: none
    double embedding_scale;
    long gelu;               // activation of the gate: gelu, or silu if 0
    Weight embedding;        // [vocabulary, hidden], not packed in bfloat16
    Norm norm;               // final norm
    const Layer* layers;
};
