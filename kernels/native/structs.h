// What Python hands over: `nanospec/models/compiled.py` and `packed.py` declare the same. Numbers are bfloat16.

#pragma once
#include "arithmetic.h"

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
