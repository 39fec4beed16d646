"""Attention over the paged KV cache: the kernel for chains, which serves decoding, verification and prefill,
and the launcher of both kernels. `paged_tree.py` is the kernel for trees; shapes are those of `attention.py`.

A program processes a tile of queries, of all heads that share a KV head, so K/V are read once for them. The
output of a query is bitwise identical in decoding, as one of K + 1 queries, and in a chunk of any size:

* A query is a column of both matrix products; cache positions and head dimensions are the rows, always in
  full. The number of columns changes only the width of the instruction.
* The cache is divided at fixed positions, and its parts are added in order (`split_kv.py`).

With a softcap c, SOFTCAP = scale / c is applied inside the tanh of `scores`, and `Sizes.scale` is
c * log2(e).
"""

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..launch import LOG2_E, gpu_of, options, prefetch, release_next, wait_for_previous, wrapped
from .online_softmax import FLOOR, State, add_states, add_tile, empty_state, sum_pairs
from .split_kv import SPAN, find_work, split_kv, tile_range

# q and out [T, Hq, D]; k and v [Hkv, num_blocks, block_size, D].
Operands = namedtuple("Operands", "q k v out")

# head_stride: elements between KV heads. table_stride: between rows of the block table. scale: factor from
# scores to exponents of 2.
Sizes = namedtuple("Sizes", "num_kv_heads head_stride table_stride scale")

# States of units in memory, float32: m [units, T, Hq], z [units, T, Hq, TILE // 16], acc [units, T, Hq, D].
# All None without SPLIT.
Partials = namedtuple("Partials", "m z acc")

# Compile-time constants. GROUP: query heads per KV head. SOFTCAP: factor inside the tanh, 0 for none. SPLIT:
# whether several programs share the cache. TILE: cache positions. COLUMNS: columns of a tile of queries.
# BLOCK_D: the padded head dimension. PDL: see `launch.py`.
Constants = namedtuple("Constants", "GROUP HEAD_DIM BLOCK_SIZE WINDOW SOFTCAP SPLIT TILE COLUMNS BLOCK_D PDL")


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _attend(operands, batch, partials, num_tokens, max_tiles, sizes, C: tl.constexpr):
    """Grid: (tiles of queries * KV heads, rows, programs that share the cache)."""
    release_next(C.PDL)
    work = find_work(batch, num_tokens, max_tiles, sizes, C)
    keys, values, blocks = row_of_cache(operands, batch.block_table, sizes)
    first_unit = tl.program_id(2) * work.share
    if C.SPLIT:  # few programs, limited by latency
        place = locate(blocks, tile_range(first_unit, work)[0], work, C)
        prefetch_rows(keys, place, C)
        prefetch_rows(values, place, C)
    wait_for_previous(C.PDL)
    if first_unit >= work.count:
        return
    query = load_queries(operands.q, work, C)
    position = work.low + tl.arange(0, C.COLUMNS) // C.GROUP
    total = empty_state(C.COLUMNS, C)
    for unit in range(first_unit, tl.minimum(first_unit + work.share, work.count)):
        begin, end = tile_range(unit, work)
        state = empty_state(C.COLUMNS, C)
        if not C.SPLIT:  # once, before the loop, would suffice, but spills 8 bytes with 8 warps (triton 3.9)
            place = locate(blocks, begin, work, C)
        for tile in range(begin, end):
            k, v = load_rows(keys, place, C), load_rows(values, place, C)
            # Look up the next tile in advance: the compiler overlaps copies (4 groups on sm_90, 2 on sm_80)
            # with the products only if their addresses are known when the iteration begins.
            place = locate(blocks, tile + 1, work, C)
            state = add_tile(state, scores(k, query, tile, position, work, C), v, sizes.scale, C)
        total = end_unit(partials, unit, total, state, work, C)
    if not C.SPLIT:
        store_output(operands.out, total, 0, C.COLUMNS, work, C)


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _combine(operands, batch, partials, num_tokens, max_tiles, sizes, C: tl.constexpr):
    """Add up the units of split attention in order, tiles of a span first, and store the output. Grid: (tiles
    of queries * KV heads, rows, columns of such a tile), with one warp per column. As many units as a span
    has tiles are loaded at once, so that all latencies overlap."""
    release_next(C.PDL)
    work, column = find_work(batch, num_tokens, max_tiles, sizes, C), tl.program_id(2)
    wait_for_previous(C.PDL)
    if column >= work.num_columns:
        return
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
    store_output(operands.out, add_states(total, state, C), column, 1, work, C)


@triton.jit
def row_of_cache(operands, block_table, sizes):
    """Return pointers to the keys and the values of a KV head and to the blocks of a row."""
    head = (tl.program_id(0) % sizes.num_kv_heads).to(tl.int64) * sizes.head_stride
    b = tl.program_id(1).to(tl.int64)
    return operands.k + head, operands.v + head, block_table + b * sizes.table_stride


@triton.jit
def locate(blocks, tile, work, C: tl.constexpr):
    """Return the slots [TILE] of a tile in a head's cache; -1 from position `high` on, and before the window
    of `low`, where blocks may have been freed."""
    j = tile * C.TILE + tl.arange(0, C.TILE)
    return load_slots(blocks, j, (j < work.high) & (j > work.low - C.WINDOW), C)


@triton.jit
def load_slots(blocks, index, valid, C: tl.constexpr):
    """Return the slots of cache indices [TILE]; -1 where not `valid`."""
    block = tl.load(blocks + index // C.BLOCK_SIZE, valid, other=0)
    return tl.where(valid, block * C.BLOCK_SIZE + index % C.BLOCK_SIZE, -1)


@triton.jit
def load_rows(base, place, C: tl.constexpr):
    """Load the keys or values [TILE, D] at slots `place`, 0 where the slot is -1."""
    d, valid = tl.arange(0, C.BLOCK_D), (place >= 0)[:, None]
    if C.HEAD_DIM < C.BLOCK_D:
        valid = valid & (d < C.HEAD_DIM)[None, :]
    return tl.load(base + place[:, None] * C.HEAD_DIM + d[None, :], valid, other=0.0)


@triton.jit
def prefetch_rows(base, place, C: tl.constexpr):
    """Prefetch the keys or values at slots `place`. Lines that the previous kernel writes stay valid."""
    WIDTH: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
    d = tl.arange(0, triton.cdiv(C.BLOCK_D, WIDTH)) * WIDTH
    d = tl.minimum(d, C.HEAD_DIM - 1)[None, :]
    prefetch(base + tl.maximum(place, 0)[:, None] * C.HEAD_DIM + d, C.PDL)


@triton.jit
def scores(k, query, tile, position, work, C: tl.constexpr):
    """Return the products [TILE, COLUMNS] of keys and queries, -inf where a column at `position` does not
    attend to the cache entry. Most tiles need no mask: those that end at `low` or before and begin within the
    window of the last query."""
    s = tl.dot(k, query, input_precision="ieee")
    if C.SOFTCAP != 0:  # tanh(s * SOFTCAP) with an absolute error of 2e-7; 1 for infinity
        s = tl.fma(1.0 / (tl.exp2(s * (C.SOFTCAP * 2.8853900817779268)) + 1.0), -2.0, 1.0)
    if (tile >= (work.low + 1) // C.TILE) | (tile * C.TILE <= work.high - 1 - C.WINDOW):
        back = position[None, :] - (tile * C.TILE + tl.arange(0, C.TILE))[:, None]
        s = tl.where((back >= 0) & (back < C.WINDOW), s, float("-inf"))
    return s


@triton.jit
def columns_of(work, first, exist, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Return the rows of q [T * Hq, D] of the columns from `first` on, relative to `work.row`; the offsets of
    their elements [D, columns]; and masks of the columns and of the elements in range, all False unless
    `exist`. (With masks combined in another order, ptxas does not overlap the loads of `_combine`.)"""
    column = first + tl.arange(0, COLUMNS)
    rows = (column // C.GROUP * work.num_kv_heads) * C.GROUP + column % C.GROUP
    valid, d = (column < work.num_columns) & exist, tl.arange(0, C.BLOCK_D)
    at = rows[None, :] * C.HEAD_DIM + d[:, None]
    return rows, at, valid, valid[None, :] & (d < C.HEAD_DIM)[:, None]


@triton.jit
def load_queries(q, work, C: tl.constexpr):
    """Load a tile of queries [D, COLUMNS]."""
    _, at, _, inside = columns_of(work, 0, True, C.COLUMNS, C)
    return tl.load(q + work.row * C.HEAD_DIM + at, inside, other=0.0)


@triton.jit
def store_output(out, state, first, COLUMNS: tl.constexpr, work, C: tl.constexpr):
    """Store acc / sum(z) to `out` [T * Hq, D] for the columns from `first` on."""
    _, at, valid, inside = columns_of(work, first, True, COLUMNS, C)
    z = tl.where(valid[None, :], sum_pairs(state.z, C.TILE // 32), 1.0)  # log2 of 2 or 4 rows
    tl.store(out + work.row * C.HEAD_DIM + at, (state.acc / z).to(out.dtype.element_ty), inside)


@triton.jit
def end_unit(partials, unit, total, state, work, C: tl.constexpr):
    """With SPLIT, store the state of a unit; without, add it to `total`. Return the total."""
    if C.SPLIT:
        rows, at, valid, inside = columns_of(work, 0, True, C.COLUMNS, C)
        m, z, acc = partial_pointers(partials, unit, rows, work, C)
        tl.store(m, state.m, valid)
        tl.store(z, state.z, valid[None, :])
        tl.store(acc + at, state.acc, inside)
    else:
        total = add_states(total, state, C)
    return total


@triton.jit
def load_state(partials, unit, column, work, C: tl.constexpr):
    """Load the state of a column of a unit; an empty one if there is no such unit."""
    exists = (unit >= 0) & (unit < work.count)
    rows, at, valid, inside = columns_of(work, column, exists, 1, C)
    m, z, acc = partial_pointers(partials, unit, rows, work, C)
    m, z = tl.load(m, valid, FLOOR), tl.load(z, valid[None, :], 0.0)
    return State(m, z, tl.load(acc + at, inside, 0.0))


@triton.jit
def partial_pointers(partials, unit, rows, work, C: tl.constexpr):
    """Return pointers to m and z of these rows of a unit, and to the beginning of its `acc`."""
    base = work.row + unit * work.stride
    z = rows[None, :] * (C.TILE // 16) + tl.arange(0, C.TILE // 16)[:, None]
    return partials.m + base + rows, partials.z + base * (C.TILE // 16) + z, partials.acc + base * C.HEAD_DIM


def launch(
    attend: Any,
    q: Tensor,
    cache: Tensor,
    batch: Batch,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Launch `attend`, the kernel of chains or of trees, and then `_combine` if programs share the cache."""
    (T, num_heads, head_dim), (k, v), out, gpu = q.shape, cache, torch.empty_like(q), gpu_of(q)
    num_kv_heads, _, block_size, _ = k.shape
    split = split_kv(
        batch.num_rows, batch.max_q_len, batch.max_kv_len, (num_heads, num_kv_heads, head_dim), gpu,
        batch.ancestors is not None,
    )  # fmt: skip
    launch_options = options(q, T, dots=True)
    constants = Constants(
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window or 1 << 30,
        SOFTCAP=scale / softcap if softcap else 0.0, SPLIT=split.programs > 1, TILE=split.tile,
        COLUMNS=split.columns, BLOCK_D=split.block_d, PDL=launch_options.pop("PDL"),
    )  # fmt: skip
    partials = Partials(None, None, None)
    if constants.SPLIT:
        size = split.units, T, num_heads
        shapes = size, (*size, split.tile // 16), (*size, head_dim)
        partials = Partials(*(q.new_empty(shape, dtype=torch.float32) for shape in shapes))
    arguments = (
        Operands(q, k, v, out), batch.tensors, partials, T, split.max_tiles,
        Sizes(num_kv_heads, k.stride(0), batch.block_table.stride(0), LOG2_E * (softcap or scale)),
        wrapped(constants),
    )  # fmt: skip
    stages = 1 if q.dtype == torch.float32 else split.stages  # float32 (tests) would not fit
    attend[split.query_tiles, batch.num_rows, split.programs](
        *arguments, num_warps=split.warps, num_stages=stages, **launch_options
    )
    if split.programs > 1:
        _combine[split.query_tiles, batch.num_rows, split.columns](*arguments, num_warps=1, **launch_options)
    return out
