"""Divides attention among programs (flash decoding).

The cache is divided at fixed positions into tiles of 64 (32 for the largest head dimensions on some GPUs) and
spans of 512. A program processes a tile of queries over several units of the cache, which are tiles or spans,
and stores the sum of each; a second kernel adds these. A program that has a tile of queries to itself adds up
the spans directly.

    positions   0        64       128                 512                1024     kv_len
    tiles       |--------|--------|--------|   ...    |---------|   ...  |--------|--
    spans       |-------------------------------------|------------------|-----------
    programs    each takes `share` consecutive units, which are tiles if these are few, else spans

Tiles are added, in order, to the sum of a span, and spans, in order, to the total. This does not depend on
how units are assigned to programs or on whether a unit is a tile or a span.
"""

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from ..launch import Gpu, next_power_of_2

SPAN = tl.constexpr(512)  # positions

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

# The work of a program: queries from flat index `token` on, at positions `low` to `high` (exclusive), in
# `num_columns` columns; the first is row `row` of q [T * Hq, D]. They attend to tiles `first_tile` to
# `end_tile` (exclusive): `count` units of `size` tiles from unit `first` on, `share` per program. `stride`:
# rows between the partial results of consecutive units.
Work = namedtuple(
    "Work",
    "token row low high num_kv_heads num_columns first_tile end_tile first count size share stride",
)


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

    Few rows are limited by latency, so each tile gets a program; from 256 programs on, spans are as fast.
    Programs without a unit exit at once but together cost a microsecond, so at most 32768 / columns are
    launched. Many rows or queries fill the GPU unsplit. (Estimated for D = 128 in bf16 on an H200.)

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
def tile_range(unit, work):
    """Return the first tile of a unit (numbered from the first unit) and the tile after its last."""
    begin = (work.first + unit) * work.size
    return tl.maximum(begin, work.first_tile), tl.minimum(begin + work.size, work.end_tile)
