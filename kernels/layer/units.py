"""The units of attention: the pieces into which the cache is divided among programs, and their sum.

A unit is a tile of 64 cache positions (32 for the widest heads on some GPUs) or a span of 512, both at
fixed absolute places. Of every column (a query of a head) a unit has a maximum m, which is an integer in
units of log 2, the sum z of the exponentials relative to it, in as many parts as a tile has 16 rows, and the
sum acc [D] of the values weighted with them; all float32. Units are added in order: the tiles of a span,
then the spans. The parts of z are added last.
"""

from typing import NamedTuple

import triton
import triton.language as tl

FLOOR = tl.constexpr(-8388608.0)  # -2^23, a maximum below all others; integers are exact down to it
SPAN = 512  # positions
UNROLL = tl.constexpr(8)  # units that are fetched at once to be summed


class Split(NamedTuple):
    """How the cache is divided among programs.

    Attributes:
        programs: per tile of queries and KV head. One alone adds up the spans as it goes.
        fine: rows of at most so many tiles get a program for each, longer ones for some spans.
        units: partial results that a query has room for, two that take turns where there is one program.
    """

    programs: int
    fine: int
    units: int


def split(pairs: int, columns: int, max_kv_len: int, tile: int) -> Split:
    """`pairs` = rows * KV heads * tiles of `columns` queries and heads.

    To be weighed, for D = 128 in bf16 on an H200 (132 multiprocessors of 2 programs each, or 1 of 64 columns;
    nothing here has been measured):

    * One row is bound by latency: the 16 tiles of 8 KV heads at 1k are 128 programs, one each. With units
      of one tile, 32 KB of K/V, the partial sums are columns / 32 of what is read, and the last program
      sums all of them; from 32 tiles of one row on (256 programs) spans should be as fast.
    * A span is 256 KB of K/V, and its partial sums, written and read through L2, are columns / 256 of that:
      4 % for 5 queries of 2 heads, 8 % for 5 of 4. 64 rows of 8 KV heads have 1024 of them at 1k, 3.9 waves
      of 264 programs; at 4k and 16k, 1024 or 2048 programs take several spans each. Programs that end
      early leave the bandwidth to the others, so the last wave should cost little.
    * Recorded graphs are made for the longest context. Programs without a unit end at once but cost perhaps
      a microsecond of a place: never more than 32768 / columns of them.
    * Many wide tiles, of a prompt, fill the machine by themselves and write no partial sums.
    """
    tiles, span = triton.cdiv(max_kv_len, tile), SPAN // tile
    spans = triton.cdiv(tiles, span)
    fine = min(256 // max(pairs, 1), tiles)
    programs = max(min(32768 // max(columns * pairs, 1), spans), fine, 1)
    return Split(programs, fine, max(spans, fine) if programs > 1 else min(spans, 2))


@triton.jit
def power_of_2(k):
    """2^k as float32, exactly, for integers k <= 0; 0 below the smallest normal number."""
    # The lowest bits of the float k + 127 + 2^23 are those of the integer k + 127.
    return ((tl.maximum(k, -127.0) + 8388735.0).to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sum_16(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] -> [ROWS // 16, COLUMNS], sums of 16 rows by pairs, in the same order for any layout:
    an order for which the results of tensor cores need no exchange between warps."""
    x = tl.sum(tl.reshape(x, [ROWS // 16, 2, 8, COLUMNS]), 1)
    for step in tl.static_range(3):
        x = tl.sum(tl.reshape(x, [ROWS // 16, 2, 4 >> step, COLUMNS]), 1)
    return tl.reshape(x, [ROWS // 16, COLUMNS])


@triton.jit
def sum_rest(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS // 16, COLUMNS] -> [COLUMNS], again by pairs."""
    if ROWS == 64:
        x = tl.sum(tl.reshape(x, [2, 2, COLUMNS]), 0)
    return tl.sum(x, 0)


@triton.jit
def _add(m, z, acc, other_m, other_z, other_acc):
    """Two partial results as one: maxima, sums, values [COLUMNS, D]."""
    new_m = tl.maximum(m, other_m)
    f, g = power_of_2(m - new_m), power_of_2(other_m - new_m)
    z = tl.fma(other_z, g[None, :], z * f[None, :])
    return new_m, z, tl.fma(other_acc, g[:, None], acc * f[:, None])


@triton.jit
def sum_units(
    unit_m, unit_z, unit_acc, to, slot, stride, num_columns, num_heads, first_unit, num_units, per_unit,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, SPAN_TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up the units of a tile of queries in order, the tiles of each span and then the spans, and write
    the result `to` [num_columns, HEAD_DIM]; a few columns at a time, so that all their units can be on the
    way together. Units lie `stride` columns apart, from column `slot` on, in unit_m [units, columns], unit_z
    [units, TILE // 16 * columns] and unit_acc [units, columns, HEAD_DIM]. A unit is `per_unit` tiles."""
    COLUMNS: tl.constexpr = 512 // BLOCK_D
    block = tl.arange(0, TILE // 16)[:, None]
    d = tl.arange(0, BLOCK_D)
    for start in range(0, num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        valid = column < num_columns
        inside = valid[:, None] & (d < HEAD_DIM)[None, :]
        at = column[:, None] * HEAD_DIM + d[None, :]
        m = tl.full([COLUMNS], FLOOR, tl.float32)
        z = tl.zeros([TILE // 16, COLUMNS], tl.float32)
        acc = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
        span_m, span_z, span_acc = m, z, acc
        for begin in range(0, num_units, UNROLL):
            ms, zs, accs = (), (), ()
            for offset in tl.static_range(UNROLL):
                one = slot + (begin + offset) * stride
                some = begin + offset < num_units
                one_m = tl.load(unit_m + one + column, valid & some, FLOOR, cache_modifier=".cg")
                at_z = unit_z + one * (TILE // 16) + block * num_columns + column[None, :]
                one_z = tl.load(at_z, valid[None, :] & some, 0.0, cache_modifier=".cg")
                one_acc = tl.load(unit_acc + one * HEAD_DIM + at, inside & some, 0.0, cache_modifier=".cg")
                ms, zs, accs = ms + (one_m,), zs + (one_z,), accs + (one_acc,)  # type: ignore[assignment]  # noqa: RUF005
            for offset in tl.static_range(UNROLL):
                unit = begin + offset
                if unit < num_units:
                    span_m, span_z, span_acc = _add(
                        span_m, span_z, span_acc, ms[offset], zs[offset], accs[offset]
                    )
                    if ((first_unit + unit + 1) * per_unit % SPAN_TILES == 0) | (unit + 1 == num_units):
                        m, z, acc = _add(m, z, acc, span_m, span_z, span_acc)
                        span_m = tl.full([COLUMNS], FLOOR, tl.float32)
                        span_z = tl.zeros([TILE // 16, COLUMNS], tl.float32)
                        span_acc = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
        at = (column // GROUP * num_heads + column % GROUP)[:, None] * HEAD_DIM + d[None, :]
        sums = tl.where(valid, sum_rest(z, TILE, COLUMNS), 1.0)[:, None]
        tl.store(to + at, (acc / sums).to(to.dtype.element_ty), inside)
