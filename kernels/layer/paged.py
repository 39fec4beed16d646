"""Attention over the paged KV cache as one kernel: decoding, verification and prefill.

Shapes as in `attention.py`, which also has `naive`. The cache is cut into tiles of 64 positions (32 for the
widest heads of some GPUs) and spans of 512, both at fixed absolute places. A program takes a tile of queries,
of all heads that share a KV head, through the cache, or through some units of it, which are tiles or spans;
then whichever program is the last to finish adds up the units. One row at 1,024 positions, for instance, has
16 units of a tile each and so 16 programs; a program with queries of a prompt goes through all spans alone.
A query gets the same bits as a decoding step, as one of K + 1 and in a chunk of a prompt of any size:

* A query is a column of both products; cache positions and head dimensions are the rows. How many columns
  there are beside it changes the width of the instruction only.
* Every tile has a maximum of its own, rounded up to an integer in units of log 2. Rescaling then is exact
  (a power of two), and what is summed over tiles are plain float32 sums in order: first the tiles of a
  span, then the spans. A tile of which a query sees nothing adds zeros. So neither the number of programs
  nor the first and last tile matter, nor whether a unit is a tile or a span.
* Sums within a tile have an order stated in `units.py`, and whatever the compiler might fuse or not is a
  fused multiply-add by name.

A node of a tree is computed as the last query of a chain of its ancestors and itself would be. The tiles
before the step's own tokens are as in a chain, and read once for all nodes of a program. The one or two that
hold those tokens are taken once for each node, with the keys and values of its path as rows in order of
depth; to the other nodes each is one more tile of which they see nothing. So n nodes take n - 1 or 2 (n - 1)
turns more than a chain of n, one after the other, of tiles that are in L2. A row without branches costs what
a chain does.

Workspace: `Split.units` of [T, Hq, D] float32; 349 MB for 64 rows of 5 queries, 32 heads of 128 and 32k
context. A graph needs it once for all layers. Calls on one device must not overlap on several streams: they
share the tickets by which the last program knows itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch as overlap
from ..batch import MAX_QUERIES
from ..dependent_launch import prefetch, release_next, wait_for_previous
from ..launch import LOG2_E, ONE_SHAPE, arch, check_attention, next_power_of_2
from .paths import look_up, take_turn
from .plan import Plan
from .tickets import tickets
from .units import FLOOR, SPAN, Split, power_of_2, split, sum_16, sum_rest, sum_units

# (most columns, cache positions per tile, warps, stages) by architecture, then by padded head dimension:
# enough loads in flight to hide the memory's latency, no spilled registers. The most columns, which are
# prompts and long drafts, take 8 warps. The tile fixes the order of sums.
CONFIGS = {
    "sm_80": {64: (32, 64, 4, 3), 128: (32, 64, 4, 3), 256: (32, 64, 8, 3)},
    "sm_90": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 64, 8, 3)},
    "sm_100": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 32, 4, 2)},
    "gfx942": {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 4, 1)},
}


@triton.jit
def _columns(start, first_query, num_heads, kv_head, column, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where the columns lie in q and out: GROUP heads of query 0, then of query 1, ... `start` is loaded each
    time, since otherwise the compiler keeps all these addresses in registers through the loop."""
    token = (tl.load(start) + first_query + column // GROUP).to(tl.int64)
    return (token * num_heads + kv_head * GROUP + column % GROUP) * HEAD_DIM


@triton.jit
def _tanh(x, FACTOR: tl.constexpr):
    """tanh(x * FACTOR), to an absolute error of 2e-7. Infinity gives 1."""
    return tl.fma(1.0 / (tl.exp2(x * (FACTOR * 2.8853900817779268)) + 1.0), -2.0, 1.0)


@triton.jit
def _prefetch_tile(
    keys, values, pages, start, low, base, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Ask for the keys and values of committed positions of a tile, which no kernel of this step writes."""
    j = start + tl.arange(0, TILE)
    known = j < base
    if WINDOW:
        known = known & (j > low - window)
    row = tl.load(pages + j // BLOCK_SIZE, known, other=0) * BLOCK_SIZE + j % BLOCK_SIZE
    line = tl.minimum(tl.arange(0, BLOCK_D // 64) * 64, HEAD_DIM - 1)  # 128 bytes each
    prefetch(keys + row[:, None] * HEAD_DIM + line[None, :], True)
    prefetch(values + row[:, None] * HEAD_DIM + line[None, :], True)


@triton.jit(do_not_specialize=["table_stride", "window", "fine", "num_tokens"])
def _attend(
    q, k_cache, v_cache, out, batch, unit_acc, unit_m, unit_z, counters,
    table_stride, head_stride, num_kv_heads, window, scale, fine, num_tokens,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, SPAN_TILES: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, SOFTCAP: tl.constexpr = None,
):  # fmt: skip
    release_next(PDL)
    QUERIES: tl.constexpr = BLOCK_Q // GROUP
    kv_head = tl.program_id(0) % num_kv_heads
    # Late queries first: they see most. Programs that run together share keys.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads * QUERIES
    b, program = tl.program_id(1), tl.program_id(2)
    n = tl.load(batch.q_len + b)
    if first_query >= n:
        wait_for_previous(PDL)
        return
    base = tl.load(batch.base_len + b)
    low, high = base + first_query, base + tl.minimum(first_query + QUERIES, n)
    clear = (low + 1) // TILE  # tiles before are seen by every query
    if batch.TREE:
        low = base  # no node lies before
        clear = base // TILE
    first = 0
    if WINDOW:
        first = tl.maximum(low - window + 1, 0) // TILE
    begin, end = first, tl.cdiv(high, TILE)
    per_unit, share = SPAN_TILES, end
    if SPLIT:
        per_unit = tl.where(end - first <= fine, 1, SPAN_TILES)  # tiles; spans start at multiples
    first_unit = first // per_unit
    num_units = tl.cdiv(end, per_unit) - first_unit
    if SPLIT:
        share = tl.cdiv(num_units, tl.num_programs(2))
        if program * share >= num_units:
            wait_for_previous(PDL)
            return
    keys = k_cache + kv_head.to(tl.int64) * head_stride
    values = v_cache + kv_head.to(tl.int64) * head_stride
    pages = batch.block_table + b.to(tl.int64) * table_stride
    if PDL:
        start = tl.maximum((first_unit + program * share) * per_unit, first) * TILE
        _prefetch_tile(
            keys, values, pages, start, low, base, window, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE, BLOCK_D
        )  # fmt: skip
    wait_for_previous(PDL)

    # Queries are columns. The rows of a matrix instruction then are cache positions or head dimensions,
    # always in full, and few queries waste nothing.
    column = tl.arange(0, BLOCK_Q)
    num_columns = tl.minimum(QUERIES, n - first_query) * GROUP
    num_heads = num_kv_heads * GROUP
    # Of 128 or more head dimensions the second half is apart: sum and addend would take all registers.
    PART: tl.constexpr = BLOCK_D if BLOCK_D < 128 else BLOCK_D // 2
    d = tl.arange(0, PART)
    low_in = (column < num_columns)[None, :] & (d < HEAD_DIM)[:, None]
    high_in = (column < num_columns)[None, :] & (d + PART < HEAD_DIM)[:, None]
    at = _columns(batch.q_start + b, first_query, num_heads, kv_head, column, GROUP, HEAD_DIM)
    query = tl.load(q + at[None, :] + d[:, None], low_in, other=0.0)  # [PART, BLOCK_Q]
    if PART < BLOCK_D:
        high_query = tl.load(q + PART + at[None, :] + d[:, None], high_in, other=0.0)
    if batch.TREE:
        token = tl.load(batch.q_start + b) + first_query
        nodes = tl.minimum(QUERIES, n - first_query)
        last = tl.load(batch.ancestors + token + nodes - 1)
        folded = tl.where((last & (last + 1)) == 0, end, clear)  # all before it are its ancestors: a chain
        position = tl.load(batch.positions + token + column // GROUP, column < num_columns, other=0)
    # Partial results of a unit lie as q does, but by KV head, then query, then head of the group.
    stride = num_tokens.to(tl.int64) * num_heads
    slot = (tl.load(batch.q_start + b) + first_query).to(tl.int64) * num_heads + kv_head * num_columns
    z = tl.zeros([TILE // 16, BLOCK_Q], tl.float32)
    acc = tl.zeros([PART, BLOCK_Q], tl.float32)
    high_acc = acc

    for unit in range(program * share, tl.minimum((program + 1) * share, num_units)):
        begin = tl.maximum((first_unit + unit) * per_unit, first)
        stop = tl.minimum((first_unit + unit + 1) * per_unit, end)
        m = tl.full([BLOCK_Q], FLOOR, tl.float32)
        z = tl.zeros([TILE // 16, BLOCK_Q], tl.float32)
        acc = tl.zeros([PART, BLOCK_Q], tl.float32)
        high_acc = acc
        # The pages of the next tile are looked up one turn ahead: the compiler keeps copies on their way
        # during the products only where their addresses are known at the turn's start.
        if batch.TREE:
            own = tl.minimum(tl.maximum(begin, folded), stop)
            stop = own + (stop - own) * nodes
            place = look_up(
                batch, pages, token, base, low, high, window, begin, own, nodes, BLOCK_SIZE, WINDOW, TILE
            )
        else:
            j = begin * TILE + tl.arange(0, TILE)
            there = j < high
            if WINDOW:  # the pages before the window may be gone
                there = there & (j > low - window)
            page = tl.load(pages + j // BLOCK_SIZE, there, other=0)
        for turn in range(begin, stop):
            tile = turn
            if batch.TREE:
                tile, node = take_turn(turn, own, nodes)
            j = tile * TILE + tl.arange(0, TILE)
            if batch.TREE:
                there = place >= 0
                entry = place[:, None] * HEAD_DIM + d[None, :]
                place = look_up(
                    batch, pages, token, base, low, high, window, turn + 1, own, nodes,
                    BLOCK_SIZE, WINDOW, TILE,
                )  # fmt: skip
            else:
                there = j < high
                if WINDOW:
                    there = there & (j > low - window)
                entry = (page * BLOCK_SIZE + j % BLOCK_SIZE)[:, None] * HEAD_DIM + d[None, :]
                page = tl.load(pages + (j + TILE) // BLOCK_SIZE, j + TILE < high, other=0)
            full = there[:, None]
            if HEAD_DIM < PART:
                full = full & (d < HEAD_DIM)[None, :]
            k = tl.load(keys + entry, full, other=0.0)  # [TILE, PART]
            v = tl.load(values + entry, full, other=0.0)
            s = tl.dot(k, query, input_precision=PRECISION)  # [TILE, BLOCK_Q]
            if PART < BLOCK_D:
                full = there[:, None]
                if HEAD_DIM < BLOCK_D:
                    full = full & (d + PART < HEAD_DIM)[None, :]
                high_k = tl.load(keys + PART + entry, full, other=0.0)
                high_v = tl.load(values + PART + entry, full, other=0.0)
                s = tl.dot(high_k, high_query, s, input_precision=PRECISION)
            if SOFTCAP is not None:
                s = _tanh(s, SOFTCAP)
            partly = tile >= clear
            if WINDOW:
                partly = partly | (tile * TILE <= high - 1 - window)
            if partly:
                if batch.TREE:
                    back = position[None, :] - j[:, None]
                    visible = (back >= 0) & ((turn < own) | (column // GROUP == node))[None, :]
                else:
                    back = column[None, :] // GROUP - (j - base - first_query)[:, None]  # 0: the query itself
                    visible = back >= 0
                if WINDOW:
                    visible = visible & (back < window)
                s = tl.where(visible, s, float("-inf"))
            tile_m = tl.maximum(tl.ceil(tl.max(s, 0) * scale), FLOOR)
            p = tl.exp2(tl.fma(s, scale, -tile_m[None, :]))
            new_m = tl.maximum(m, tile_m)
            f, g = power_of_2(m - new_m), power_of_2(tile_m - new_m)
            m, z = new_m, tl.fma(sum_16(p, TILE, BLOCK_Q), g[None, :], z * f[None, :])
            acc, high_acc, p = acc * f[None, :], high_acc * f[None, :], p.to(v.dtype)
            value = tl.dot(tl.trans(v), p, input_precision=PRECISION)  # [PART, BLOCK_Q]
            acc = tl.fma(value, g[None, :], acc)
            if PART < BLOCK_D:
                value = tl.dot(tl.trans(high_v), p, input_precision=PRECISION)
                high_acc = tl.fma(value, g[None, :], high_acc)

        # The total of the spans waits in memory while a span is summed. A zero that the compiler cannot know
        # keeps it from working out the addresses before the loop and holding them in registers.
        zero = tl.load(batch.q_start + b) >> 31
        to = tl.arange(0, BLOCK_Q) + zero
        to_d = tl.arange(0, PART) + zero
        m_in = to < num_columns
        low_in = m_in[None, :] & (to_d < HEAD_DIM)[:, None]
        high_in = m_in[None, :] & (to_d + PART < HEAD_DIM)[:, None]
        inner = to[None, :] * HEAD_DIM + to_d[:, None]
        rows = tl.arange(0, TILE // 16)[:, None] * num_columns + to[None, :]
        z_in = (rows >= 0) & m_in[None, :]
        if not SPLIT:  # noqa: SIM102 (the compiler knows it, but not the unit)
            if unit > 0:
                tl.debug_barrier()
                one = slot + (unit - 1) % 2 * stride
                old_m = tl.load(unit_m + one + to, m_in, other=FLOOR)
                new_m = tl.maximum(m, old_m)
                f, g = power_of_2(old_m - new_m), power_of_2(m - new_m)
                old_z = tl.load(unit_z + one * (TILE // 16) + rows, z_in, other=0.0)
                m, z = new_m, tl.fma(z, g[None, :], old_z * f[None, :])
                one_acc = unit_acc + one * HEAD_DIM
                acc = tl.fma(acc, g[None, :], tl.load(one_acc + inner, low_in, other=0.0) * f[None, :])
                if PART < BLOCK_D:
                    old = tl.load(one_acc + PART + inner, high_in, other=0.0)
                    high_acc = tl.fma(high_acc, g[None, :], old * f[None, :])
        if (unit + 1 < num_units) | (share < num_units):
            one = slot + (unit if SPLIT else unit % 2) * stride
            tl.store(unit_m + one + to, m, m_in)
            tl.store(unit_z + one * (TILE // 16) + rows, z, z_in)
            tl.store(unit_acc + one * HEAD_DIM + inner, acc, low_in)
            if PART < BLOCK_D:
                tl.store(unit_acc + one * HEAD_DIM + PART + inner, high_acc, high_in)

    alone = True
    if SPLIT:
        alone = num_units == 1
    if alone:
        at = _columns(batch.q_start + b, first_query, num_heads, kv_head, column, GROUP, HEAD_DIM)
        sums = tl.where(column < num_columns, sum_rest(z, TILE, BLOCK_Q), 1.0)[None, :]
        tl.store(out + at[None, :] + d[:, None], (acc / sums).to(out.dtype.element_ty), low_in)
        if PART < BLOCK_D:
            high_out = out + PART + at[None, :] + d[:, None]
            tl.store(high_out, (high_acc / sums).to(out.dtype.element_ty), high_in)
    elif SPLIT:
        tl.debug_barrier()  # all threads have stored before one of them says so
        pair = b * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counters + pair, 1, sem="acq_rel") == tl.cdiv(num_units, share) - 1:
            tl.store(counters + pair, 0)  # ready for the next launch
            token_head = (tl.load(batch.q_start + b) + first_query).to(tl.int64) * num_heads + kv_head * GROUP
            sum_units(
                unit_m, unit_z, unit_acc, out + token_head * HEAD_DIM, slot, stride, num_columns, num_heads,
                first_unit, num_units, per_unit, GROUP, HEAD_DIM, TILE, SPAN_TILES, BLOCK_D,
            )  # fmt: skip


def cut(
    rows: int, q_len: int, kv_len: int, heads: tuple[int, int, int], target: str, tree: bool = False
) -> tuple[int, int, Split]:
    """(columns of a program's tile, tiles of queries times KV heads, how the cache is divided) for rows of up
    to `q_len` queries on up to `kv_len` positions; `heads` are (Hq, Hkv, D). Nodes of trees take turns with
    their own tiles, so fewer share a program; the cache is divided as for chains, and so is the workspace."""
    num_heads, num_kv_heads, head_dim = heads
    group = num_heads // num_kv_heads
    widest, tile, _, _ = CONFIGS[target][max(next_power_of_2(head_dim), 64)]
    least = max(next_power_of_2(group), 16)
    columns = max(min(next_power_of_2(group * q_len), widest), least)
    division = split(num_kv_heads * triton.cdiv(q_len, columns // group) * rows, columns, kv_len, tile)
    if tree:
        columns = max(min(columns, widest // 2), least)
    return columns, num_kv_heads * triton.cdiv(q_len, columns // group), division


def launch(q: Tensor, cache: Tensor, plan: Plan, scale: float, softcap: float | None = None) -> Tensor:
    """See `attention.py`."""
    check_attention(q, cache)
    batch, window = plan.batch, plan.window
    if batch.ancestors is not None and batch.max_q_len > MAX_QUERIES:
        raise ValueError(f"A tree of {batch.max_q_len} nodes exceeds the limit of {MAX_QUERIES}.")
    T, num_heads, head_dim = q.shape
    k_cache, v_cache = cache
    num_kv_heads, _, block_size, _ = k_cache.shape
    if k_cache.stride(0) >= 1 << 31:
        raise ValueError(f"A KV head has {k_cache.stride(0)} numbers of keys; attention counts below 2^31.")
    group = num_heads // num_kv_heads
    block_d = max(next_power_of_2(head_dim), 64)
    widest, tile, warps, stages = CONFIGS[arch(q)][block_d]
    columns, pairs, (programs, fine, units) = cut(
        batch.num_rows, batch.max_q_len, batch.max_kv_len, (num_heads, num_kv_heads, head_dim), arch(q),
        batch.ancestors is not None,
    )  # fmt: skip
    out = torch.empty_like(q)
    size = (units, T, num_heads)
    unit_acc = q.new_empty(*size, head_dim, dtype=torch.float32)
    unit_m = q.new_empty(size, dtype=torch.float32)
    unit_z = q.new_empty(*size, tile // 16, dtype=torch.float32)
    counters = tickets(q.device, "attention") if programs > 1 else None
    fp32 = q.dtype == torch.float32  # for tests; "tf32" says nothing for the other types
    _attend[(pairs, batch.num_rows, programs)](
        q, k_cache, v_cache, out, batch.tensors, unit_acc, unit_m, unit_z, counters,
        batch.block_table.stride(0), k_cache.stride(0), num_kv_heads, window or 0,
        (scale if softcap is None else softcap) * LOG2_E, fine, T,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window is not None,
        SPLIT=programs > 1, TILE=tile, SPAN_TILES=SPAN // tile, BLOCK_Q=columns, BLOCK_D=block_d,
        SOFTCAP=None if softcap is None else scale / softcap,
        PRECISION="ieee" if fp32 else "tf32", num_warps=8 if columns >= widest else warps,
        num_stages=1 if fp32 else stages, **ONE_SHAPE.get(arch(q), {}), **overlap.options(q),
    )  # fmt: skip
    return out
