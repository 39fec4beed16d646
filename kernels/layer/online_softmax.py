"""The running softmax of attention, in an order of sums that does not depend on how the cache is divided.

A state is what is known of some columns (a column is a query of one head) after some cache positions:

    m    [columns]                  the largest score in units of log 2, rounded up to an integer
    z    [TILE // 16, columns]      sums of 2^(score - m), one for each 16 positions of a tile
    acc  C.PARTS x [PART, columns]  sums of 2^(score - m) * value

All are float32. As m is an integer, rescaling multiplies by a power of two, which is exact, so z and acc are
plain sums in order, to which a tile of which a column sees nothing adds zeros. Where the compiler could
choose to fuse, a fused multiply-add is written out. Heads of 128 or more dimensions are in two parts: with
the whole sum and its addend in one piece, every register would be taken.
"""

from collections import namedtuple

import triton
import triton.language as tl

FLOOR = tl.constexpr(-8388608.0)  # -2^23, less than any m; integers are exact down to it

State = namedtuple("State", "m z acc")


@triton.jit
def empty_state(COLUMNS: tl.constexpr, C: tl.constexpr):
    """Return the state before any position."""
    acc = ()
    for _ in tl.static_range(C.PARTS):
        acc += (tl.zeros([C.PART, COLUMNS], tl.float32),)
    return State(tl.full([COLUMNS], FLOOR, tl.float32), tl.zeros([C.TILE // 16, COLUMNS], tl.float32), acc)


@triton.jit
def add_tile(state, s, values, scale, C: tl.constexpr):
    """Add a tile with scores s [TILE, columns], to be multiplied by `scale`, and values C.PARTS x [TILE,
    PART]."""
    tile_m = tl.maximum(tl.ceil(tl.max(s, 0) * scale), FLOOR)
    p = tl.exp2(tl.fma(s, scale, -tile_m[None, :]))
    m = tl.maximum(state.m, tile_m)
    old, new = _power_of_2(state.m - m)[None, :], _power_of_2(tile_m - m)[None, :]
    z = tl.fma(_sum_16(p), new, state.z * old)
    p = p.to(values[0].dtype)
    acc = ()
    for i in tl.static_range(C.PARTS):
        value = tl.dot(tl.trans(values[i]), p, input_precision="ieee")  # [PART, columns]
        acc += (tl.fma(value, new, state.acc[i] * old),)
    return State(m, z, acc)


@triton.jit
def add_states(first, second, C: tl.constexpr):
    """Add the state of later positions to that of earlier ones."""
    m = tl.maximum(first.m, second.m)
    f, g = _power_of_2(first.m - m)[None, :], _power_of_2(second.m - m)[None, :]
    acc = ()
    for i in tl.static_range(C.PARTS):
        acc += (tl.fma(second.acc[i], g, first.acc[i] * f),)
    return State(m, tl.fma(second.z, g, first.z * f), acc)


@triton.jit
def total_weight(z):
    """Sum z by pairs: [TILE // 16, columns] -> [columns]."""
    if z.shape[0] == 4:
        z = tl.sum(tl.reshape(z, [2, 2, z.shape[1]]), 0)
    return tl.sum(z, 0)


@triton.jit
def _sum_16(p):
    """Sum groups of 16 rows by pairs: [rows, columns] -> [rows // 16, columns]. The order is the same for any
    layout, and tensor cores leave their results so that it needs no exchange between warps."""
    GROUPS: tl.constexpr = p.shape[0] // 16
    COLUMNS: tl.constexpr = p.shape[1]
    p = tl.sum(tl.reshape(p, [GROUPS, 2, 8, COLUMNS]), 1)
    for step in tl.static_range(3):
        p = tl.sum(tl.reshape(p, [GROUPS, 2, 4 >> step, COLUMNS]), 1)
    return tl.reshape(p, [GROUPS, COLUMNS])


@triton.jit
def _power_of_2(k):
    """Return 2^k as float32, exactly, for integers k <= 0; 0 below the smallest normal number."""
    # The lowest bits of the float k + 127 + 2^23 are those of the integer k + 127.
    return ((tl.maximum(k, -127.0) + 8388735.0).to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
