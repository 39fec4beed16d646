"""Attention over the paged KV cache: the kernel for chains, which serves decoding, verification and prefill.

Shapes are those of `attention.py`, which also has `naive`; `paged_tree.py` is the kernel for trees. The cache
is divided at fixed absolute positions into tiles of 64 (32 for the largest head dimensions on some GPUs) and
spans of 512. A program processes a tile of queries, of all heads that share a KV head, over several units of
the cache, which are tiles or spans. It stores a partial result per unit, and a second kernel combines them
(`split_kv.py`). A program that has a tile of queries to itself accumulates the spans directly.

The output of a query is bitwise identical in decoding, as one of K + 1 queries, and in a chunk of any size:

* A query is a column of both matrix products; cache positions and head dimensions are the rows, always in
  full. The number of columns changes only the width of the instruction.
* Tiles are added, in order, to the sum of a span, and spans, in order, to the total. This does not depend on
  how units are assigned to programs or on whether a unit is a tile or a span.

    positions   0        64       128                 512                1024     kv_len
    tiles       |--------|--------|--------|   ...    |---------|   ...  |--------|--
    spans       |-------------------------------------|------------------|-----------
    programs    each takes `share` consecutive units, which are tiles if these are few, else spans

The state of online softmax is described in `split_kv.py`. With a softcap c, SOFTCAP = scale / c is applied
inside the tanh of `scores`, and `Sizes.scale` is c * log2(e).
"""

from collections import namedtuple

import triton
import triton.language as tl

from ..launch import prefetch, release_next, wait_for_previous
from .split_kv import SPAN, add_tile, combine, empty_state, end_unit, load_queries, store_output

# q and out [T, Hq, D]; k and v [Hkv, num_blocks, block_size, D].
Operands = namedtuple("Operands", "q k v out")

# head_stride: elements between KV heads. table_stride: between rows of the block table. scale: factor from
# scores to exponents of 2.
Sizes = namedtuple("Sizes", "num_kv_heads head_stride table_stride scale")

# Compile-time constants. GROUP: query heads per KV head. SOFTCAP: factor inside the tanh, 0 for none. SPLIT:
# whether several programs share the cache. TILE: cache positions. COLUMNS: columns of a tile of queries.
# BLOCK_D: the padded head dimension. PDL: see `launch.py`.
Constants = namedtuple("Constants", "GROUP HEAD_DIM BLOCK_SIZE WINDOW SOFTCAP SPLIT TILE COLUMNS BLOCK_D PDL")

# The work of a program: queries from flat index `token` on, at positions `low` to `high` (exclusive), in
# `num_columns` columns; the first is row `row` of q [T * Hq, D]. They attend to tiles `first_tile` to
# `end_tile` (exclusive): `count` units of `size` tiles from unit `first` on, `share` per program. `stride`:
# rows between the partial results of consecutive units.
Work = namedtuple(
    "Work",
    "token row low high num_kv_heads num_columns first_tile end_tile first count size share stride",
)


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
            s = mask(scores(k, query, C), tile, position, work, C)
            state = add_tile(state, s, v, sizes.scale, C)
        total = end_unit(partials, unit, total, state, work, C)
    if not C.SPLIT:
        store_output(operands.out, total, 0, C.COLUMNS, work, C)


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _combine(operands, batch, partials, num_tokens, max_tiles, sizes, C: tl.constexpr):
    """Combine the partial results of split attention. Grid: (tiles of queries * KV heads, rows, columns of
    such a tile), with one warp per column, so that the loads of all columns overlap."""
    release_next(C.PDL)
    work = find_work(batch, num_tokens, max_tiles, sizes, C)
    column = tl.program_id(2)
    wait_for_previous(C.PDL)
    if column < work.num_columns:
        combine(partials, operands.out, column, work, C)


@triton.jit
def find_work(batch, num_tokens, max_tiles, sizes, C: tl.constexpr):
    """Return the work of this program; `count` is 0 if it has no query. Units are tiles if the queries attend
    to at most `max_tiles` tiles, else spans."""
    QUERIES: tl.constexpr = C.COLUMNS // C.GROUP
    b, num_kv_heads = tl.program_id(1), sizes.num_kv_heads
    # The last tile of queries starts first, because it attends to the most keys and so takes the longest.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads * QUERIES
    num_queries = tl.minimum(QUERIES, tl.load(batch.q_len + b) - first_query)
    low = tl.load(batch.base_len + b) + first_query
    high = low + num_queries
    if batch.TREE:
        low -= first_query  # a node's position is base_len + depth, so base_len is the only lower bound
        high = low + tl.load(batch.q_len + b)  # in a block, queries attend to later ones
    first_tile, end_tile = tl.maximum(low - C.WINDOW + 1, 0) // C.TILE, tl.cdiv(high, C.TILE)
    size = SPAN // C.TILE
    if C.SPLIT:
        size = tl.where(end_tile - first_tile <= max_tiles, 1, size)
    first = first_tile // size
    count = tl.where(num_queries > 0, tl.cdiv(end_tile, size) - first, 0)
    token = tl.load(batch.q_start + b) + first_query
    row = (token.to(tl.int64) * num_kv_heads + tl.program_id(0) % num_kv_heads) * C.GROUP
    share, stride = tl.cdiv(count, tl.num_programs(2)), num_tokens.to(tl.int64) * num_kv_heads * C.GROUP
    return Work(
        token, row, low, high, num_kv_heads, num_queries * C.GROUP,
        first_tile, end_tile, first, count, size, share, stride,
    )  # fmt: skip


@triton.jit
def row_of_cache(operands, block_table, sizes):
    """Return pointers to the keys and the values of a KV head and to the blocks of a row."""
    head = (tl.program_id(0) % sizes.num_kv_heads).to(tl.int64) * sizes.head_stride
    b = tl.program_id(1).to(tl.int64)
    return operands.k + head, operands.v + head, block_table + b * sizes.table_stride


@triton.jit
def tile_range(unit, work):
    """Return the first tile of a unit (numbered from the first unit) and the tile after its last."""
    begin = (work.first + unit) * work.size
    return tl.maximum(begin, work.first_tile), tl.minimum(begin + work.size, work.end_tile)


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
def scores(k, query, C: tl.constexpr):
    """Return the products [TILE, COLUMNS] of keys and queries."""
    s = tl.dot(k, query, input_precision="ieee")
    if C.SOFTCAP != 0:  # tanh(s * SOFTCAP) with an absolute error of 2e-7; 1 for infinity
        s = tl.fma(1.0 / (tl.exp2(s * (C.SOFTCAP * 2.8853900817779268)) + 1.0), -2.0, 1.0)
    return s


@triton.jit
def mask(s, tile, position, work, C: tl.constexpr):
    """Set scores to -inf where a column at `position` does not attend to the cache entry. Most tiles need no
    mask: those that end at `low` or before and begin within the window of the last query."""
    if (tile >= (work.low + 1) // C.TILE) | (tile * C.TILE <= work.high - 1 - C.WINDOW):
        back = position[None, :] - (tile * C.TILE + tl.arange(0, C.TILE))[:, None]
        s = tl.where((back >= 0) & (back < C.WINDOW), s, float("-inf"))
    return s
