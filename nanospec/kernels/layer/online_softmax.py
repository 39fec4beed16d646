"""The state of a softmax over part of the cache, and its addition (online softmax).

A state holds the partial result of some columns (a column is a query of one head) over some cache positions:

    m    [columns]               the maximum score as an exponent of 2, rounded up to an integer
    z    [TILE // 16, columns]   sums of 2^(score - m) per 16 positions of a tile (sum: FlashAttention's l)
    acc  [D, columns]            sums of 2^(score - m) * value

All are float32; the output is acc / sum(z). As m is an integer, rescaling multiplies by a power of two, which
is exact. So z and acc are plain sums, and a fully masked tile adds zeros. Fused multiply-adds are explicit
where the compiler could otherwise choose.
"""

from collections import namedtuple

import triton
import triton.language as tl

FLOOR = tl.constexpr(-8388608.0)  # -2^23, below any m; float32 represents integers exactly down to it

State = namedtuple("State", "m z acc")


@triton.jit
def empty_state(COLUMNS: tl.constexpr, C: tl.constexpr):
    """Return the state of no positions."""
    z = tl.zeros([C.TILE // 16, COLUMNS], tl.float32)
    return State(tl.full([COLUMNS], FLOOR, tl.float32), z, tl.zeros([C.BLOCK_D, COLUMNS], tl.float32))


@triton.jit
def add_tile(state, s, v, scale, C: tl.constexpr):
    """Add a tile with scores s [TILE, columns], still to be scaled by `scale`, and values v [TILE, D]."""
    tile_m = tl.maximum(tl.ceil(tl.max(s, 0) * scale), FLOOR)
    p = tl.exp2(tl.fma(s, scale, -tile_m[None, :]))
    z = sum_pairs(p, 4)
    value = tl.dot(tl.trans(v), p.to(v.dtype), input_precision="ieee")
    return add_states(state, State(tile_m, z, value), C)


@triton.jit
def add_states(first, second, C: tl.constexpr):
    """Add the state of later positions to that of earlier ones."""
    m = tl.maximum(first.m, second.m)
    old, new = power_of_2(first.m - m)[None, :], power_of_2(second.m - m)[None, :]
    acc = tl.fma(second.acc, new, first.acc * old)
    return State(m, tl.fma(second.z, new, first.z * old), acc)


@triton.jit
def sum_pairs(x, STEPS: tl.constexpr):
    """Sum groups of 2^STEPS rows by pairs: [rows, columns] -> [rows >> STEPS, columns], in an order that does
    not depend on the layout. In the layout of tensor cores, 16 rows need no exchange between warps."""
    GROUPS: tl.constexpr = x.shape[0] >> STEPS
    COLUMNS: tl.constexpr = x.shape[1]
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, [GROUPS, 2, (1 << STEPS) >> (step + 1), COLUMNS]), 1)
    return tl.reshape(x, [GROUPS, COLUMNS])


@triton.jit
def power_of_2(k):
    """Return 2^k as float32, exactly, for integers k <= 0; 0 below the smallest normal number."""
    # The lowest bits of the float k + 127 + 2^23 are those of the integer k + 127.
    return ((tl.maximum(k, -127.0) + 8388735.0).to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
