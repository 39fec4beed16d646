"""Attention of few queries per row over the paged KV cache: decoding and verification.

Shapes as in `attention.py`, which also has `naive`. The cache is cut into tiles of 64 positions and
spans of several tiles, both at fixed absolute places. A program computes whole units, tiles or spans,
each from scratch, and a second small kernel combines the units of a query in order. So that a query
gets the same bits alone, in any batch and beside any number of drafts:

* The shapes of all tiles depend on the model only (`BLOCK_Q` holds the queries of up to 7 drafts, more
  take further tiles), so the same machine code runs whatever the batch and K are.
* Every tile has a maximum of its own, rounded up to an integer in units of log 2. Rescaling then is
  exact (a power of two), and sums over tiles are plain float32 sums in order: first the tiles of a
  span, then the spans. Whether a program works on tiles (a short row needs many programs) or on spans
  (a long row should write few partial results) changes nothing in them.

In a tree a node's ancestors may lie at other cache positions than they would in a chain, so there the
equality is up to rounding.

Workspace: max(512 / (B * Hkv), max_kv_len / 512) units of [T, Hq, D] float32, or of half as many where
more than two heads share a KV head; 268 MB for 64 rows of 8 queries, 32 heads of 128 and 32k context.
A graph needs it once for all layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import MAX_QUERIES
from ..launch import LOG2_E, arch, check_attention, next_power_of_2
from .plan import Plan

PROGRAMS = 512  # aimed at: a few per multiprocessor, so that uneven rows even out
_MAX_QUERIES = tl.constexpr(MAX_QUERIES)
FLOOR = tl.constexpr(-8388608.0)  # -2^23, a maximum below all others; integers are exact down to it

# (cache positions per tile, warps, stages) by architecture, then by padded head dimension: enough
# loads in flight to hide the memory's latency, no spilled registers.
CONFIGS = {
    "sm_80": {64: (64, 4, 5), 128: (64, 4, 2), 256: (64, 8, 3)},
    "sm_90": {64: (64, 4, 5), 128: (64, 4, 3), 256: (64, 8, 3)},
    "sm_100": {64: (64, 4, 5), 128: (64, 8, 5), 256: (32, 4, 2)},
    "gfx942": {64: (64, 4, 2), 128: (64, 4, 2), 256: (32, 4, 1)},
}


@triton.jit
def _power_of_2(k):
    """2^k as float32, exactly, for integers k <= 0; 0 below the smallest normal number."""
    return ((tl.maximum(k, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _units_of(base, n, window, programs, TILE: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr):
    """(first, end, tiles per unit, first unit, number of units) of the tiles that n queries of a row see."""
    first = 0
    if WINDOW:
        first = tl.maximum(base - window + 1, 0) // TILE
    end = (base + n + TILE - 1) // TILE
    per_unit = tl.where(end - first <= programs, 1, SPAN)  # tiles; spans start at multiples of SPAN
    first_unit = first // per_unit
    return first, end, per_unit, first_unit, (end + per_unit - 1) // per_unit - first_unit


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "window"])
def _units(
    q, k_cache, v_cache, batch, unit_acc, unit_m, unit_z,
    table_stride, head_stride, num_tokens, num_kv_heads, window, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, SPAN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of each unit, for the queries of one KV head of one row."""
    QUERIES: tl.constexpr = BLOCK_Q // GROUP
    kv_head = tl.program_id(0) % num_kv_heads
    first_query = tl.program_id(0) // num_kv_heads * QUERIES
    program, programs = tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2)
    n = tl.load(batch.q_len + b)
    if first_query >= n:
        return
    base = tl.load(batch.base_len + b)
    first, end, per_unit, first_unit, num_units = _units_of(base, n, window, programs, TILE, SPAN, WINDOW)
    if program >= num_units:
        return

    row = tl.arange(0, BLOCK_Q)  # of the tile: GROUP heads of query 0, then of query 1, ...
    i = first_query + row // GROUP
    valid = (row < QUERIES * GROUP) & (i < n)
    token = (tl.load(batch.q_start + b) + i).to(tl.int64)
    token_head = token * (num_kv_heads * GROUP) + kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    # Queries are columns: the rows of a matrix instruction then are cache positions or head
    # dimensions, always in full, and few queries waste nothing.
    query = tl.trans(tl.load(q + token_head[:, None] * HEAD_DIM + d[None, :], inside, other=0.0))
    last = base + i  # the cache index of the query itself
    position = last
    if batch.TREE:
        mask = tl.load(batch.ancestors + token, valid, other=0)
        if WINDOW:
            position = tl.load(batch.positions + token, valid, other=0)
    keys = k_cache + kv_head.to(tl.int64) * head_stride
    values = v_cache + kv_head.to(tl.int64) * head_stride
    pages = batch.block_table + b.to(tl.int64) * table_stride
    unit_stride = num_tokens.to(tl.int64) * num_kv_heads * GROUP

    for unit in range(program, num_units, programs):
        begin = tl.maximum((first_unit + unit) * per_unit, first)
        stop = tl.minimum((first_unit + unit + 1) * per_unit, end)
        m = tl.full([BLOCK_Q], FLOOR, tl.float32)
        z = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
        for tile in range(begin, stop):
            j = tile * TILE + tl.arange(0, TILE)
            cached = j < base + n
            if WINDOW:  # the pages before the window may be gone
                cached = cached & (j > base - window)
            page = tl.load(pages + j // BLOCK_SIZE, cached, other=0).to(tl.int64)
            entry = (page * BLOCK_SIZE + j % BLOCK_SIZE)[:, None] * HEAD_DIM + d[None, :]
            full = cached[:, None]
            if HEAD_DIM < BLOCK_D:
                full = full & (d < HEAD_DIM)[None, :]
            k = tl.load(keys + entry, full, other=0.0)  # [TILE, D]
            v = tl.load(values + entry, full, other=0.0)
            s = tl.dot(k, query, input_precision=PRECISION) * scale  # [TILE, BLOCK_Q]
            if batch.TREE:
                own = j[:, None] - base
                bit = (mask[None, :] >> tl.minimum(tl.maximum(own, 0), _MAX_QUERIES - 1).to(tl.int64)) & 1
                visible = (own < 0) | ((bit == 1) & (own < _MAX_QUERIES))
                if WINDOW:
                    visible = visible & ((own >= 0) | (j[:, None] > position[None, :] - window))
            else:
                visible = j[:, None] <= last[None, :]
                if WINDOW:
                    visible = visible & (j[:, None] > last[None, :] - window)
            s = tl.where(visible & cached[:, None], s, float("-inf"))
            tile_m = tl.maximum(tl.ceil(tl.max(s, 0)), FLOOR)
            p = tl.exp2(s - tile_m[None, :])
            value = tl.dot(tl.trans(v), p.to(v.dtype), input_precision=PRECISION)  # [D, BLOCK_Q]
            new_m = tl.maximum(m, tile_m)
            old, new = _power_of_2(m - new_m), _power_of_2(tile_m - new_m)
            acc = acc * old[None, :] + value * new[None, :]
            z = z * old + tl.sum(p, 0) * new
            m = new_m
        at = unit * unit_stride + token_head
        tl.store(unit_m + at, m, valid)
        tl.store(unit_z + at, z, valid)
        tl.store(unit_acc + at[None, :] * HEAD_DIM + d[:, None], acc, tl.trans(inside))


@triton.jit
def _merge(m, z, acc, other_m, other_z, other_acc):
    new_m = tl.maximum(m, other_m)
    f, g = _power_of_2(m - new_m), _power_of_2(other_m - new_m)
    return new_m, z * f + other_z * g, acc * f[:, None] + other_acc * g[:, None]


@triton.jit(do_not_specialize=["num_tokens", "programs", "window"])
def _combine(
    unit_acc, unit_m, unit_z, out, batch, num_tokens, num_kv_heads, programs, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum a query's units in order: the tiles of each span, then the spans."""
    i, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(batch.q_len + b)
    if i >= n:
        return
    base = tl.load(batch.base_len + b)
    _, _, per_unit, first_unit, num_units = _units_of(base, n, window, programs, TILE, SPAN, WINDOW)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    valid = g < GROUP
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    token = (tl.load(batch.q_start + b) + i).to(tl.int64)
    token_head = (token * num_kv_heads + kv_head) * GROUP + g
    unit_stride = num_tokens.to(tl.int64) * num_kv_heads * GROUP

    m = tl.full([BLOCK_G], FLOOR, tl.float32)
    z = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    span_m, span_z, span_acc = m, z, acc
    for start in range(0, num_units, UNROLL):
        for offset in tl.static_range(UNROLL):  # independent loads, so that they overlap
            unit = start + offset
            at = unit * unit_stride + token_head
            there = valid & (unit < num_units)
            one_m = tl.load(unit_m + at, there, other=FLOOR)
            one_z = tl.load(unit_z + at, there, other=0.0)
            one_acc = tl.load(
                unit_acc + at[:, None] * HEAD_DIM + d[None, :], inside & (unit < num_units), other=0.0
            )
            # A new span begins: the previous one joins the total. Merging nothing is exact, so there
            # is no branch.
            fresh = ((first_unit + unit) * per_unit) % SPAN == 0
            done_m = tl.where(fresh, span_m, FLOOR)
            done_z, done_acc = tl.where(fresh, span_z, 0.0), tl.where(fresh, span_acc, 0.0)
            m, z, acc = _merge(m, z, acc, done_m, done_z, done_acc)
            span_m = tl.where(fresh, FLOOR, span_m)
            span_z, span_acc = tl.where(fresh, 0.0, span_z), tl.where(fresh, 0.0, span_acc)
            span_m, span_z, span_acc = _merge(span_m, span_z, span_acc, one_m, one_z, one_acc)
    m, z, acc = _merge(m, z, acc, span_m, span_z, span_acc)
    tl.store(
        out + token_head[:, None] * HEAD_DIM + d[None, :],
        (acc / tl.where(valid, z, 1.0)[:, None]).to(out.dtype.element_ty),
        inside,
    )


def launch(q: Tensor, cache: Tensor, plan: Plan, scale: float) -> Tensor:
    check_attention(q, cache)
    batch, window = plan.batch, plan.window
    if batch.ancestors is not None and batch.max_q_len > MAX_QUERIES:
        raise ValueError(f"A tree of {batch.max_q_len} nodes exceeds the limit of {MAX_QUERIES}.")
    T, num_heads, head_dim = q.shape
    k_cache, v_cache = cache
    num_kv_heads, _, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    block_d = max(next_power_of_2(head_dim), 64)
    # Up to 7 drafts in one tile, as far as the registers allow.
    block_q = max(16, next_power_of_2(group), min(8192 // block_d, 64, next_power_of_2(8 * group)))
    pairs = num_kv_heads * triton.cdiv(batch.max_q_len, block_q // group)
    tile, warps, stages = CONFIGS[arch(q)][block_d]
    span = (512 if group <= 2 else 1024) // tile  # many heads write much per unit: make fewer units
    tiles = triton.cdiv(batch.max_kv_len, tile)
    programs = min(max(PROGRAMS // max(pairs * batch.num_rows, 1), 1), tiles)
    units = max(programs, triton.cdiv(tiles, span))
    precision = "ieee" if q.dtype == torch.float32 else "tf32"  # the latter says nothing for bf16
    if q.dtype == torch.float32:
        stages = 1

    out = torch.empty_like(q)
    unit_acc = q.new_empty(units, T, num_heads, head_dim, dtype=torch.float32)
    unit_m = q.new_empty(units, T, num_heads, dtype=torch.float32)
    unit_z = torch.empty_like(unit_m)
    _units[(pairs, programs, batch.num_rows)](
        q, k_cache, v_cache, batch.tensors, unit_acc, unit_m, unit_z,
        batch.block_table.stride(0), k_cache.stride(0), T, num_kv_heads, window or 0, scale * LOG2_E,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window is not None, TILE=tile,
        SPAN=span, BLOCK_Q=block_q, BLOCK_D=block_d, PRECISION=precision, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    _combine[(batch.max_q_len, num_kv_heads, batch.num_rows)](
        unit_acc, unit_m, unit_z, out, batch.tensors, T, num_kv_heads, programs, window or 0,
        GROUP=group, HEAD_DIM=head_dim, WINDOW=window is not None, TILE=tile, SPAN=span,
        BLOCK_G=next_power_of_2(group), BLOCK_D=block_d, UNROLL=4, num_warps=4,
    )  # fmt: skip
    return out
