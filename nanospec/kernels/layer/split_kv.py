"""Divides the KV cache among the programs of attention, and combines their partial results (flash decoding).

A state holds the partial result of some columns (a column is a query of one head) over some cache positions:

    m    [columns]               the maximum score as an exponent of 2, rounded up to an integer
    z    [TILE // 16, columns]   sums of 2^(score - m) per 16 positions of a tile (sum: FlashAttention's l)
    acc  [D, columns]            sums of 2^(score - m) * value

All are float32; the output is acc / sum(z). As m is an integer, rescaling multiplies by a power of two, which
is exact. So z and acc are plain sums in a fixed order: the tiles of a span, then the spans. They do not
depend on how spans or tiles are divided among programs. A fully masked tile adds zeros. Fused multiply-adds
are explicit where the compiler could otherwise choose.

Estimated, not measured, for D = 128 in bf16 on an H200 (132 multiprocessors with 2 programs each): a single
row is limited by latency, so each tile gets its own program. From 256 programs on, spans are as fast.
Programs without a unit exit at once but together cost about a microsecond, so at most 32768 / columns are
launched. Many rows, or the many tiles of a prompt's queries, fill the GPU unsplit: each program adds up its
spans, and no memory is needed for partial results.
"""

from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Gpu, next_power_of_2

SPAN = tl.constexpr(512)  # positions
FLOOR = tl.constexpr(-8388608.0)  # -2^23, below any m; float32 represents integers exactly down to it

# (maximum columns, cache positions per tile, warps, stages) by GPU family and padded head dimension: enough
# loads in flight to hide the memory latency, without register spills. With the maximum columns (prompts, long
# drafts) 8 warps are used. The tile determines the order of sums.
CONFIGS = {
    "sm_80": {64: (32, 64, 4, 4), 128: (32, 64, 4, 3), 256: (32, 32, 8, 3)},
    "sm_86": {64: (32, 64, 4, 3), 128: (32, 64, 4, 2), 256: (32, 32, 8, 2)},
    "sm_90": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 64, 8, 3)},
    "sm_100": {64: (64, 64, 4, 2), 128: (32, 64, 4, 3), 256: (32, 32, 8, 2)},
    "gfx942": {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 4, 1)},
}

State = namedtuple("State", "m z acc")

# States of units in memory, float32: m [units, T, Hq], z [units, T, Hq, TILE // 16], acc [units, T, Hq, D].
# All None without SPLIT.
Partials = namedtuple("Partials", "m z acc")


class Split(NamedTuple):
    """The division of attention among programs."""

    columns: int  # columns of a tile of queries: queries * query heads per KV head, padded
    query_tiles: int  # of a row, times KV heads: dimension 0 of the grid
    programs: int  # programs that share the cache for such a tile; if 1, it accumulates the spans directly
    max_tiles: int  # queries that attend to at most this many tiles are split by tiles, others by spans
    units: int  # number of partial results per query
    tile: int  # cache positions per tile
    block_d: int  # the padded head dimension
    warps: int
    stages: int


def split_kv(
    rows: int, q_len: int, kv_len: int, heads: tuple[int, int, int], gpu: Gpu, tree: bool = False
) -> Split:
    """Divide rows of up to `q_len` queries over up to `kv_len` positions; `heads` are (Hq, Hkv, D).

    For trees, tiles of queries are smaller, because tiles with drafts are processed once per node. The cache
    and the partial results are divided as for chains."""
    num_heads, num_kv_heads, head_dim = heads
    group = num_heads // num_kv_heads
    block_d = max(next_power_of_2(head_dim), 64)
    widest, tile, warps, stages = CONFIGS[gpu.family][block_d]
    min_columns = max(next_power_of_2(group), 16)
    columns = max(min(next_power_of_2(group * q_len), widest), min_columns)
    query_tiles = num_kv_heads * triton.cdiv(q_len, columns // group)
    tiles = triton.cdiv(kv_len, tile)
    spans = triton.cdiv(kv_len, SPAN.value)
    max_tiles = min(256 // max(query_tiles * rows, 1), tiles)
    programs = max(min(32768 // max(columns * query_tiles * rows, 1), spans), max_tiles, 1)
    if query_tiles * rows >= 2 * gpu.multiprocessors:  # two programs fit on each, so these fill the GPU
        programs = 1
    if tree:
        columns = max(min(columns, widest // 2), min_columns)
        query_tiles = num_kv_heads * triton.cdiv(q_len, columns // group)
    units, warps = max(spans, max_tiles) if programs > 1 else 0, 8 if columns >= widest else warps
    return Split(columns, query_tiles, programs, max_tiles, units, tile, block_d, warps, stages)


def empty_partials(q: Tensor, split: Split) -> Partials:
    """Return memory for the partial results of q [T, Hq, D]; all None if one program has the whole cache."""
    if split.programs == 1:
        return Partials(None, None, None)
    size = split.units, *q.shape[:2]
    shapes = size, (*size, split.tile // 16), (*size, q.shape[2])
    return Partials(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))


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


@triton.jit
def query_rows(work, first, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Return the rows of q [T * Hq, D], relative to `work.row`, of the columns from `first` on, and a mask of
    the columns in range."""
    column = first + tl.arange(0, COLUMNS)
    return (column // C.GROUP * work.num_kv_heads) * C.GROUP + column % C.GROUP, column < work.num_columns


@triton.jit
def element_offsets(rows, valid, C: tl.constexpr):
    """Return the offsets [D, columns] of the elements of rows, and a mask of those in range."""
    d = tl.arange(0, C.BLOCK_D)
    return rows[None, :] * C.HEAD_DIM + d[:, None], valid[None, :] & (d < C.HEAD_DIM)[:, None]


@triton.jit
def load_queries(q, work, C: tl.constexpr):
    """Load a tile of queries [D, COLUMNS]."""
    rows, valid = query_rows(work, 0, C.COLUMNS, C)
    at, inside = element_offsets(rows, valid, C)
    return tl.load(q + work.row * C.HEAD_DIM + at, inside, other=0.0)


@triton.jit
def end_unit(partials, unit, total, state, work, C: tl.constexpr):
    """With SPLIT, store the state of a unit; without, add it to `total`. Return the total."""
    if C.SPLIT:
        rows, valid = query_rows(work, 0, C.COLUMNS, C)
        m, z, acc = partial_pointers(partials, unit, rows, work, C)
        tl.store(m, state.m, valid)
        tl.store(z, state.z, valid[None, :])
        at, inside = element_offsets(rows, valid, C)
        tl.store(acc + at, state.acc, inside)
    else:
        total = add_states(total, state, C)
    return total


@triton.jit
def partial_pointers(partials, unit, rows, work, C: tl.constexpr):
    """Return pointers to m and z of these rows of a unit, and to the beginning of its `acc`."""
    base = work.row + unit * work.stride
    z = rows[None, :] * (C.TILE // 16) + tl.arange(0, C.TILE // 16)[:, None]
    return partials.m + base + rows, partials.z + base * (C.TILE // 16) + z, partials.acc + base * C.HEAD_DIM


@triton.jit
def store_output(out, state, first, COLUMNS: tl.constexpr, work, C: tl.constexpr):
    """Store acc / sum(z) to `out` [T * Hq, D] for the columns from `first` on."""
    rows, valid = query_rows(work, first, COLUMNS, C)
    at, inside = element_offsets(rows, valid, C)
    z = tl.where(valid[None, :], sum_pairs(state.z, C.TILE // 32), 1.0)  # log2 of 2 or 4 rows
    tl.store(out + work.row * C.HEAD_DIM + at, (state.acc / z).to(out.dtype.element_ty), inside)


@triton.jit
def combine(partials, out, column, work, C: tl.constexpr):
    """Add up the units of a column in order and store the output. If they are tiles, those of each span are
    added up first. As many units as a span has tiles are loaded at once, so that their latencies overlap."""
    UNITS: tl.constexpr = SPAN // C.TILE
    # If units are tiles: tiles of the first span that lie before the window.
    missing = tl.where(work.size == 1, work.first % UNITS, 0)
    total, state = empty_state(1, C), empty_state(1, C)
    for begin in range(-missing, work.count, UNITS):
        states = ()
        for i in tl.static_range(UNITS):
            states += (load_state(partials, begin + i, column, work, C),)
        for i in tl.static_range(UNITS):
            one = State(states[i][0], states[i][1], states[i][2])  # triton 3.6 loses the field names
            state = add_states(state, one, C)
        if work.size == 1:  # the tiles of a span are complete
            total, state = add_states(total, state, C), empty_state(1, C)
    store_output(out, add_states(total, state, C), column, 1, work, C)


@triton.jit
def load_state(partials, unit, column, work, C: tl.constexpr):
    """Load the state of a column of a unit; an empty one if there is no such unit."""
    rows, valid = query_rows(work, column, 1, C)
    m, z, acc = partial_pointers(partials, unit, rows, work, C)
    valid = valid & ((unit >= 0) & (unit < work.count))
    at, inside = element_offsets(rows, valid, C)
    m, z = tl.load(m, valid, FLOOR), tl.load(z, valid[None, :], 0.0)
    return State(m, z, tl.load(acc + at, inside, 0.0))
