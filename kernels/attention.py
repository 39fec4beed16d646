"""Attention over the paged KV cache.

    q                 [T, Hq, D]
    k_cache, v_cache  [Hkv, num_blocks, block_size, D]     one layer; Hq is a multiple of Hkv
    out               [T, Hq, D]

One operation serves decoding (one query per row), verification (K+1 queries per row, chain or tree)
and chunked prefill: what a query sees is stated by `Rows` alone. The queries of all heads that share
a KV head are treated together, so K/V are read once for all of them. A sliding window of w lets a
query see itself and the w - 1 positions before it; in a tree, the step's own tokens are taken to lie
inside the window. Head dimensions up to 256; bf16, fp16 or fp32; more than `LONG_QUERY` queries per
row go to `prefill`.

The kernel below serves decoding and verification. The cache is cut into tiles of `TILE` positions and
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
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from . import prefill
from .dispatch import use_triton
from .launch import arch, next_power_of_2
from .rows import MAX_TREE_NODES, Rows

LONG_QUERY = MAX_TREE_NODES  # rows with more queries than this are prefill
TILE = 64  # cache positions
PROGRAMS = 512  # aimed at: a few per multiprocessor, so that uneven rows even out
FLOOR = tl.constexpr(-8388608.0)  # -2^23, a maximum below all others; integers are exact down to it

# (warps, stages) by architecture, then by padded head dimension: enough loads in flight to hide the
# memory's latency, within the shared memory.
CONFIGS = {
    "sm_80": {64: (4, 3), 128: (4, 2), 256: (8, 2)},
    "sm_90": {64: (4, 4), 128: (4, 3), 256: (8, 3)},
    "sm_100": {64: (4, 4), 128: (4, 3), 256: (8, 3)},
    "gfx942": {64: (4, 2), 128: (4, 2), 256: (8, 1)},
}


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    """Softmax(q k^T * scale) v for every query over the cache positions it may see.

    The keys and values of the step's own tokens must already be in the cache. Padding tokens get
    unspecified output.
    """
    run = launch if use_triton(q) else naive
    return run(q, k_cache, v_cache, rows, scale, window)


def naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    """The specification in plain PyTorch; also the CPU path."""
    if rows.max_q_len > LONG_QUERY:
        return prefill.naive(q, k_cache, v_cache, rows, scale, window)
    num_kv_heads, _, block_size, head_dim = k_cache.shape
    B, Q, G = rows.num_rows, rows.max_q_len, q.shape[1] // num_kv_heads
    num_blocks = -(-rows.max_kv_len // block_size)
    blocks = rows.block_table[:, :num_blocks].flatten()
    k = k_cache.index_select(1, blocks).view(num_kv_heads, B, -1, head_dim)[:, :, : rows.max_kv_len]
    v = v_cache.index_select(1, blocks).view(num_kv_heads, B, -1, head_dim)[:, :, : rows.max_kv_len]
    grid = q if rows.uniform else q[rows.grid]
    # The G query heads of a KV head become rows of one matrix: [B, Hkv, G*Q, D]
    grouped = grid.view(B, Q, num_kv_heads, G, head_dim).permute(0, 2, 3, 1, 4)
    out = F.scaled_dot_product_attention(
        grouped.reshape(B, num_kv_heads, G * Q, head_dim),
        k.transpose(0, 1),
        v.transpose(0, 1),
        attn_mask=_mask(rows, G, q.dtype, window),
        scale=scale,
    )
    out = out.view(B, num_kv_heads, G, Q, head_dim).permute(0, 3, 1, 2, 4).reshape(B * Q, -1, head_dim)
    return out if rows.uniform else out[rows.in_row]


def _mask(rows: Rows, group: int, dtype: torch.dtype, window: int | None) -> Tensor | None:
    """[B, 1, group*Q, kv] additive mask, or None where every query sees all; kept for all layers."""
    key = f"_mask_{window}"
    cached: Tensor | None | str = rows.__dict__.get(key, "missing")
    if not isinstance(cached, str):
        return cached
    visible = rows.visible
    if window is not None:
        visible = visible & _in_window(rows, window)
    mask = None
    if not bool(visible.all()):
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask.masked_fill_(~visible, float("-inf"))
        mask = mask[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    rows.__dict__[key] = mask
    return mask


def _in_window(rows: Rows, window: int) -> Tensor:
    """[B, Q, kv] bool: cache index j is less than `window` positions before the query."""
    position = rows.positions[rows.grid][..., None]  # [B, Q, 1]
    j = torch.arange(rows.max_kv_len, device=position.device)
    if rows.ancestors is None:
        return j > position - window
    return (j > position - window) | (j >= rows.base_len[:, None, None])


@triton.jit
def _power_of_2(k):
    """2^k as float32, exactly, for integers k <= 0; 0 below the smallest normal number."""
    return ((tl.maximum(k, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tiles(base, n, window, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The tiles [first, end) that the n queries of a row see."""
    first = 0
    if WINDOW:
        first = tl.maximum(base - window + 1, 0) // TILE
    return first, (base + n + TILE - 1) // TILE


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "window"])
def _units(
    q, k_cache, v_cache, block_table, q_start, q_len, base_len, positions, ancestors,
    unit_acc, unit_m, unit_l, table_stride, head_stride, num_tokens, num_kv_heads, window, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of each unit, for the queries of one KV head of one row."""
    QUERIES: tl.constexpr = BLOCK_Q // GROUP
    kv_head = tl.program_id(0) % num_kv_heads
    first_query = tl.program_id(0) // num_kv_heads * QUERIES
    program, programs = tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2)
    n = tl.load(q_len + b)
    if first_query >= n:
        return
    base = tl.load(base_len + b)
    first, end = _tiles(base, n, window, TILE, WINDOW)
    per_unit = tl.where(end - first <= programs, 1, SPAN)  # tiles; spans start at multiples of SPAN
    first_unit = first // per_unit
    num_units = (end + per_unit - 1) // per_unit - first_unit
    if program >= num_units:
        return

    row = tl.arange(0, BLOCK_Q)  # of the tile: GROUP heads of query 0, then of query 1, ...
    i = first_query + row // GROUP
    valid = (row < QUERIES * GROUP) & (i < n)
    token = (tl.load(q_start + b) + i).to(tl.int64)
    token_head = token * (num_kv_heads * GROUP) + kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    # Queries are columns: the rows of a matrix instruction then are cache positions or head
    # dimensions, always in full, and few queries waste nothing.
    query = tl.trans(tl.load(q + token_head[:, None] * HEAD_DIM + d[None, :], inside, other=0.0))
    last = base + i  # the cache index of the query itself
    position = last
    if TREE:
        mask = tl.load(ancestors + token, valid, other=0)
        if WINDOW:
            position = tl.load(positions + token, valid, other=0)
    keys = k_cache + kv_head.to(tl.int64) * head_stride
    values = v_cache + kv_head.to(tl.int64) * head_stride
    table = block_table + b.to(tl.int64) * table_stride
    unit_stride = num_tokens.to(tl.int64) * num_kv_heads * GROUP

    for unit in range(program, num_units, programs):
        begin = tl.maximum((first_unit + unit) * per_unit, first)
        stop = tl.minimum((first_unit + unit + 1) * per_unit, end)
        m = tl.full([BLOCK_Q], FLOOR, tl.float32)
        l = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_D, BLOCK_Q], tl.float32)
        for tile in range(begin, stop):
            j = tile * TILE + tl.arange(0, TILE)
            cached = j < base + n
            if WINDOW:  # the pages before the window may be gone
                cached = cached & (j > base - window)
            page = tl.load(table + j // BLOCK_SIZE, cached, other=0).to(tl.int64)
            at = (page * BLOCK_SIZE + j % BLOCK_SIZE)[:, None] * HEAD_DIM + d[None, :]
            full = cached[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(keys + at, full, other=0.0)  # [TILE, D]
            v = tl.load(values + at, full, other=0.0)
            s = tl.dot(k, query, input_precision=PRECISION) * scale  # [TILE, BLOCK_Q]
            if TREE:
                own = j[:, None] - base
                bit = (mask[None, :] >> tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)) & 1
                visible = (own < 0) | ((bit == 1) & (own < 64))
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
            l = l * old + tl.sum(p, 0) * new
            m = new_m
        at = unit * unit_stride + token_head
        tl.store(unit_m + at, m, valid)
        tl.store(unit_l + at, l, valid)
        tl.store(unit_acc + at[None, :] * HEAD_DIM + d[:, None], acc, tl.trans(inside))


@triton.jit
def _merge(m, l, acc, other_m, other_l, other_acc):
    new_m = tl.maximum(m, other_m)
    f, g = _power_of_2(m - new_m), _power_of_2(other_m - new_m)
    return new_m, l * f + other_l * g, acc * f[:, None] + other_acc * g[:, None]


@triton.jit(do_not_specialize=["num_tokens", "programs", "window"])
def _combine(
    unit_acc, unit_m, unit_l, out, q_start, q_len, base_len, num_tokens, num_kv_heads, programs, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum a query's units in order: the tiles of each span, then the spans."""
    i, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(q_len + b)
    if i >= n:
        return
    first, end = _tiles(tl.load(base_len + b), n, window, TILE, WINDOW)
    per_unit = tl.where(end - first <= programs, 1, SPAN)
    first_unit = first // per_unit
    num_units = (end + per_unit - 1) // per_unit - first_unit

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    valid = g < GROUP
    inside = valid[:, None] & (d < HEAD_DIM)[None, :]
    token = (tl.load(q_start + b) + i).to(tl.int64)
    token_head = (token * num_kv_heads + kv_head) * GROUP + g
    unit_stride = num_tokens.to(tl.int64) * num_kv_heads * GROUP

    m = tl.full([BLOCK_G], FLOOR, tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    span_m, span_l, span_acc = m, l, acc
    for start in range(0, num_units, UNROLL):
        for offset in tl.static_range(UNROLL):  # independent loads, so that they overlap
            unit = start + offset
            at = unit * unit_stride + token_head
            there = valid & (unit < num_units)
            one_m = tl.load(unit_m + at, there, other=FLOOR)
            one_l = tl.load(unit_l + at, there, other=0.0)
            one_acc = tl.load(
                unit_acc + at[:, None] * HEAD_DIM + d[None, :], inside & (unit < num_units), other=0.0
            )
            # A new span begins: the previous one joins the total. Merging nothing is exact, so there
            # is no branch.
            fresh = ((first_unit + unit) * per_unit) % SPAN == 0
            done_m = tl.where(fresh, span_m, FLOOR)
            done_l, done_acc = tl.where(fresh, span_l, 0.0), tl.where(fresh, span_acc, 0.0)
            m, l, acc = _merge(m, l, acc, done_m, done_l, done_acc)
            span_m = tl.where(fresh, FLOOR, span_m)
            span_l, span_acc = tl.where(fresh, 0.0, span_l), tl.where(fresh, 0.0, span_acc)
            span_m, span_l, span_acc = _merge(span_m, span_l, span_acc, one_m, one_l, one_acc)
    m, l, acc = _merge(m, l, acc, span_m, span_l, span_acc)
    tl.store(
        out + token_head[:, None] * HEAD_DIM + d[None, :],
        (acc / tl.where(valid, l, 1.0)[:, None]).to(out.dtype.element_ty),
        inside,
    )


def launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    _check(q, k_cache, v_cache, rows)
    if rows.max_q_len > LONG_QUERY:
        return prefill.launch(q, k_cache, v_cache, rows, scale, window)
    T, num_heads, head_dim = q.shape
    num_kv_heads, _, block_size, _ = k_cache.shape
    group = num_heads // num_kv_heads
    block_d = max(next_power_of_2(head_dim), 64)
    block_q = max(16, next_power_of_2(group), min(64, next_power_of_2(8 * group)))
    span = 8 if group <= 2 else 16  # many heads write much per unit, so let their units be longer
    pairs = num_kv_heads * triton.cdiv(rows.max_q_len, block_q // group)
    tiles = triton.cdiv(rows.max_kv_len, TILE)
    programs = min(max(PROGRAMS // max(pairs * rows.num_rows, 1), 1), tiles)
    units = max(programs, triton.cdiv(tiles, span))
    warps, stages = CONFIGS[arch(q)][block_d]
    precision = "ieee" if q.dtype == torch.float32 else "tf32"  # the latter says nothing for bf16
    if q.dtype == torch.float32:
        stages = 1

    out = torch.empty_like(q)
    unit_acc = q.new_empty(units, T, num_heads, head_dim, dtype=torch.float32)
    unit_m = q.new_empty(units, T, num_heads, dtype=torch.float32)
    unit_l = torch.empty_like(unit_m)
    _units[(pairs, programs, rows.num_rows)](
        q, k_cache, v_cache, rows.block_table, rows.q_start, rows.q_len, rows.base_len,
        rows.positions, rows.ancestors, unit_acc, unit_m, unit_l, rows.block_table.stride(0),
        k_cache.stride(0), T, num_kv_heads, window or 0, scale * prefill.LOG2_E,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TREE=rows.ancestors is not None,
        WINDOW=window is not None, TILE=TILE, SPAN=span, BLOCK_Q=block_q, BLOCK_D=block_d,
        PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _combine[(rows.max_q_len, num_kv_heads, rows.num_rows)](
        unit_acc, unit_m, unit_l, out, rows.q_start, rows.q_len, rows.base_len, T, num_kv_heads,
        programs, window or 0, GROUP=group, HEAD_DIM=head_dim, WINDOW=window is not None, TILE=TILE,
        SPAN=span, BLOCK_G=next_power_of_2(group), BLOCK_D=block_d, UNROLL=4, num_warps=4,
    )  # fmt: skip
    return out


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows) -> None:
    """Refuse what the kernels would read wrongly."""
    num_kv_heads, _, block_size, head_dim = k_cache.shape
    if q.dtype != k_cache.dtype or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"q is {q.dtype} but the cache is {k_cache.dtype} and {v_cache.dtype}.")
    if q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(f"q {list(q.shape)} does not fit a cache of {list(k_cache.shape)}.")
    if head_dim > 256:
        raise ValueError(f"A head dimension of {head_dim} exceeds the limit of 256.")
    if not q.is_contiguous() or k_cache.stride() != v_cache.stride():
        raise ValueError("q must be contiguous, and both caches must have the same strides.")
    if k_cache.stride()[1:] != (block_size * head_dim, head_dim, 1):
        raise ValueError("The pages of a head must lie in the cache one after another.")
    if rows.ancestors is not None and rows.max_q_len > MAX_TREE_NODES:
        raise ValueError(f"A tree of {rows.max_q_len} nodes exceeds the limit of {MAX_TREE_NODES}.")
