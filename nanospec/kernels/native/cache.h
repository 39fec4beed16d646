// The KV cache in the layout of `packed.py`, and functions to write and move entries.

#pragma once
#include "structs.h"

// [num_blocks, num_layers, kv_heads, 2, block_size / 16, tile]
struct Cache {
    bf16* data;
    long num_layers, kv_heads, block_size, dim;
};

// The keys and values of one KV head in one layer.
struct Head {
    bf16* data;  // in block 0
    long block_size, dim, next;  // `next`: elements between blocks

    Head(const Cache& c, long layer, long head)
        : data(c.data + (layer * c.kv_heads + head) * 2 * c.block_size * c.dim), block_size(c.block_size), dim(c.dim),
          next(c.num_layers * c.kv_heads * 2 * c.block_size * c.dim) {}

    long to_values() const { return block_size * dim; }  // elements from the keys of a block to its values

    // Returns the tile of keys that contains position i of a block.
    bf16* tile(long block, long i) const { return data + block * next + i / LANES * LANES * dim; }

    // A tile of keys is [dim / 2][16][2]: element d of the key at position i is key_in(tile, i)[d / 2 * 32 + d % 2].
    static bf16* key_in(bf16* tile, long i) { return tile + i % LANES * 2; }

    // A tile of values is [8][dim][2]: element d of the value at position i is value_in(tile, i)[2 * d].
    bf16* value_in(bf16* tile, long i) const { return tile + i % LANES / 2 * 2 * dim + i % 2; }

    bf16* key(long slot) const { return key_in(tile(slot / block_size, slot % block_size), slot); }
    bf16* value(long slot) const { return value_in(tile(slot / block_size, slot % block_size) + to_values(), slot); }

    void write(long slot, const bf16* k, const bf16* v) const {
        bf16 *to_key = key(slot), *to_value = value(slot);
        for (long d = 0; d < dim; d += 2) memcpy(to_key + d * LANES, k + d, 2 * sizeof(bf16));
        for (long d = 0; d < dim; d++) to_value[2 * d] = finite(v[d]);
    }

    // Copies a key and a value between tiles.
    void copy(const bf16* k, const bf16* v, bf16* to_key, bf16* to_value) const {
        for (long d = 0; d < dim; d += 2) memcpy(to_key + d * LANES, k + d * LANES, 2 * sizeof(bf16));
        for (long d = 0; d < dim; d++) to_value[2 * d] = v[2 * d];
    }

    void move(long from, long to) const { copy(key(from), value(from), key(to), value(to)); }

    // Replaces NaN by 0 and infinity by the largest number: 0 * NaN would affect queries that mask the token.
    static bf16 finite(bf16 x) {
        if ((x & 0x7F80) != 0x7F80) return x;
        return x & 0x7F ? 0 : (x & 0x8000) | 0x7F7F;
    }
};
