// The KV cache as `tiles.py` lays it out, and how keys and values get into it.

#pragma once
#include "structs.h"

// [num_blocks, num_layers, kv_heads, 2, block_size / 16, tile]
struct Cache {
    bf16* data;
    long num_layers, kv_heads, block_size, dim;
};

// One head of keys and values in one layer.
struct Head {
    bf16* data;  // in block 0
    long block_size, dim, next;  // `next`: from one block to the next

    Head(const Cache& c, long layer, long head)
        : data(c.data + (layer * c.kv_heads + head) * 2 * c.block_size * c.dim),
          block_size(c.block_size),
          dim(c.dim),
          next(c.num_layers * c.kv_heads * 2 * c.block_size * c.dim) {}

    long page() const { return block_size * dim; }  // from keys to values

    // The tile of keys that holds a position of a block.
    bf16* tile(long block, long i) const { return data + block * next + i / LANES * LANES * dim; }

    // A tile of keys is [dim / 2][16][2]: number d of the key in a slot is at key(slot)[d / 2 * 32 + d % 2].
    bf16* key(long slot) const { return tile(slot / block_size, slot % block_size) + slot % LANES * 2; }

    // A tile of values is [8][dim][2]: number d of the value in a slot is at value(slot)[2 * d].
    bf16* value(long slot) const {
        const long i = slot % LANES;
        return tile(slot / block_size, slot % block_size) + page() + i / 2 * 2 * dim + i % 2;
    }

    void write(long slot, const bf16* k, const bf16* v) const {
        bf16 *to_key = key(slot), *to_value = value(slot);
        for (long d = 0; d < dim; d += 2) memcpy(to_key + d * LANES, k + d, 2 * sizeof(bf16));
        for (long d = 0; d < dim; d++) to_value[2 * d] = finite(v[d]);
    }

    void move(long from, long to) const {
        const bf16 *k = key(from), *v = value(from);
        bf16 *to_key = key(to), *to_value = value(to);
        for (long d = 0; d < dim; d += 2) memcpy(to_key + d * LANES, k + d * LANES, 2 * sizeof(bf16));
        for (long d = 0; d < dim; d++) to_value[2 * d] = v[2 * d];
    }

    // NaN becomes 0 and infinity the largest number: 0 * NaN would reach queries that do not see its token.
    static bf16 finite(bf16 x) {
        if ((x & 0x7F80) != 0x7F80) return x;
        return x & 0x7F ? 0 : (x & 0x8000) | 0x7F7F;
    }
};
