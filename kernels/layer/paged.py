"""Attention over the paged KV cache: the kernel for chains, which decoding, verification and prefill all are.

Shapes are those of `attention.py`, which also has `naive`; `split_kv.py` launches this kernel, or that for
trees (`paged_tree.py`). The cache is cut at fixed absolute positions into tiles of 64 (32 for the widest
heads on some GPUs) and spans of 512. A program takes a tile of queries, of all heads that share a KV head,
through some units of the cache, each a tile or a span, and stores a partial result for each; the last program
to finish adds them up. Where there is one program for each tile of queries, it adds up the spans as it goes.

A query gets the same bits as a decoding step, as one of K + 1, and in a chunk of a prompt of any size:

* A query is a column of both matrix products; cache positions and head dimensions are the rows, always in
  full. The number of columns changes only the width of the instruction.
* Tiles are added in order to the sum of a span, then spans to the total. The sums of `online_softmax.py` do
  not depend on where the first program began, nor on whether a unit is a tile or a span.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ..launch import prefetch, release_next, wait_for_previous
from .online_softmax import FLOOR, State, add_states, add_tile, empty_state, total_weight

UNROLL = tl.constexpr(8)  # partial results that a program fetches at once


# q and out [T, Hq, D]; k and v [Hkv, num_blocks, block_size, D].
Operands = namedtuple("Operands", "q k v out")

# States of units in memory, float32: m [units, T, Hq], z [units, T, Hq, TILE // 16], acc [units, T, Hq, D];
# and counters of the programs that have finished, see `launch.py`. All None without SPLIT.
Partials = namedtuple("Partials", "m z acc tickets")

# Elements between KV heads, and between rows of the block table; the sliding window, 0 for none; the factor
# that turns scores into powers of 2.
Sizes = namedtuple("Sizes", "num_kv_heads head_stride table_stride window scale")

# What a kernel is compiled for. GROUP: query heads to a KV head. SOFTCAP: factor inside the tanh, 0 for none.
# SPLIT: whether several programs share the cache. COLUMNS: of a tile of queries. PARTS, PART: a head is in so
# many parts of so many dimensions. PDL: see `launch.py`.
Constants = namedtuple(
    "Constants", "GROUP HEAD_DIM BLOCK_SIZE WINDOW SOFTCAP SPLIT TILE SPAN_TILES COLUMNS PARTS PART PDL"
)

# A program's tile of queries: flat index of the first one, KV head, columns in use.
Queries = namedtuple("Queries", "token kv_head num_kv_heads num_columns")

# What queries see: `count` units of `size` tiles from unit `first` on, in all tiles `first_tile` to
# `end_tile`. Each program takes `share` units.
Units = namedtuple("Units", "first count size share first_tile end_tile")


@triton.jit(do_not_specialize=["num_tokens", "fine"])
def _attend(operands, batch, partials, num_tokens, fine, sizes, C: tl.constexpr):
    """Grid: tiles of queries times KV heads, rows, programs that share the cache."""
    release_next(C.PDL)
    b, program = tl.program_id(1), tl.program_id(2)
    kv_head, first_query, num_queries = take_queries(batch.q_len + b, sizes.num_kv_heads, C)
    base = tl.load(batch.base_len + b)
    low, high = base + first_query, base + first_query + num_queries
    units = find_units(low, high, fine, sizes.window, C)
    busy = (num_queries > 0) & (program * units.share < units.count)
    keys, values, pages = row_of_cache(operands, batch.block_table, b, kv_head, sizes)
    if C.PDL:  # no kernel of this step writes to positions before `base`
        begin, _ = tiles_of(program * units.share, units)
        prefetch_tile(keys, values, locate(pages, begin, low, tl.where(busy, base, 0), sizes.window, C), C)
    wait_for_previous(C.PDL)
    if not busy:
        return

    token = tl.load(batch.q_start + b) + first_query
    queries = Queries(token, kv_head, sizes.num_kv_heads, num_queries * C.GROUP)
    query = load_queries(operands.q, queries, C)
    total = empty_state(C.COLUMNS, C)
    for unit in range(program * units.share, tl.minimum((program + 1) * units.share, units.count)):
        begin, end = tiles_of(unit, units)
        state = empty_state(C.COLUMNS, C)
        place = locate(pages, begin, low, high, sizes.window, C)
        for tile in range(begin, end):
            k, v = load_rows(keys, place, C), load_rows(values, place, C)
            # Looked up one tile ahead: copies are in flight during the products (4 groups on sm_90, 2 on
            # sm_80) only if their addresses are known when the turn begins.
            place = locate(pages, tile + 1, low, high, sizes.window, C)
            s = mask(scores(k, query, C), tile, low, high, sizes.window, C)
            state = add_tile(state, s, v, sizes.scale, C)
        total = end_unit(partials, unit, num_tokens, (total, state), queries, units, C)
    finish(partials, num_tokens, operands.out, total, queries, units, C)


@triton.jit
def take_queries(q_len, num_kv_heads, C: tl.constexpr):
    """Return this program's KV head, its first query and how many it has, 0 or less for none.

    Programs of late queries start first, since these see most. Programs that run together share keys."""
    QUERIES: tl.constexpr = C.COLUMNS // C.GROUP
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads * QUERIES
    return tl.program_id(0) % num_kv_heads, first, tl.minimum(QUERIES, tl.load(q_len) - first)


@triton.jit
def find_units(low, high, fine, window, C: tl.constexpr):
    """Divide what queries at positions `low` to `high` see: into tiles if these are at most `fine`, or
    spans."""
    first_tile, end_tile = 0, tl.cdiv(high, C.TILE)
    if C.WINDOW:
        first_tile = tl.maximum(low - window + 1, 0) // C.TILE
    size = C.SPAN_TILES
    if C.SPLIT:
        size = tl.where(end_tile - first_tile <= fine, 1, C.SPAN_TILES)
    first = first_tile // size
    count = tl.cdiv(end_tile, size) - first
    return Units(first, count, size, tl.cdiv(count, tl.num_programs(2)), first_tile, end_tile)


@triton.jit
def row_of_cache(operands, block_table, b, kv_head, sizes):
    """Return where the keys and values of a KV head begin, and the pages of a row."""
    head = kv_head.to(tl.int64) * sizes.head_stride
    return operands.k + head, operands.v + head, block_table + b.to(tl.int64) * sizes.table_stride


@triton.jit
def tiles_of(unit, units):
    """Return the first tile of a unit, counted from the first unit, and the one behind its last."""
    begin = (units.first + unit) * units.size
    return tl.maximum(begin, units.first_tile), tl.minimum(begin + units.size, units.end_tile)


@triton.jit
def locate(pages, tile, low, high, window, C: tl.constexpr):
    """Return where the positions [TILE] of a tile lie in a head's cache; -1 from `high` on, and for those
    that are not within the window of `low`, whose pages may be gone."""
    j = tile * C.TILE + tl.arange(0, C.TILE)
    there = j < high
    if C.WINDOW:
        there = there & (j > low - window)
    page = tl.load(pages + j // C.BLOCK_SIZE, there, other=0)
    return tl.where(there, page * C.BLOCK_SIZE + j % C.BLOCK_SIZE, -1)


@triton.jit
def prefetch_tile(keys, values, place, C: tl.constexpr):
    """Ask for the keys and values of the places [TILE] of a tile."""
    line = tl.minimum(tl.arange(0, C.PARTS * C.PART // 64) * 64, C.HEAD_DIM - 1)  # 128 bytes each
    at = tl.maximum(place, 0)[:, None] * C.HEAD_DIM + line[None, :]
    prefetch(keys + at, True)
    prefetch(values + at, True)


@triton.jit
def load_rows(base, place, C: tl.constexpr):
    """Load the keys or values at the places [TILE] of a head's cache: C.PARTS x [TILE, PART]."""
    parts = ()
    for i in tl.static_range(C.PARTS):
        d = i * C.PART + tl.arange(0, C.PART)
        there = (place >= 0)[:, None]
        if (i + 1) * C.PART > C.HEAD_DIM:
            there = there & (d < C.HEAD_DIM)[None, :]
        rows = tl.load(base + place[:, None] * C.HEAD_DIM + d[None, :], there, other=0.0)
        parts += (rows,)
    return parts


@triton.jit
def scores(k, query, C: tl.constexpr):
    """Return the products [TILE, COLUMNS] of keys and queries."""
    s = tl.zeros([C.TILE, C.COLUMNS], tl.float32)
    for i in tl.static_range(C.PARTS):
        s = tl.dot(k[i], query[i], s, input_precision="ieee")
    if C.SOFTCAP != 0:  # tanh(s * SOFTCAP) to an absolute error of 2e-7, and 1 of infinity
        s = tl.fma(1.0 / (tl.exp2(s * (C.SOFTCAP * 2.8853900817779268)) + 1.0), -2.0, 1.0)
    return s


@triton.jit
def mask(s, tile, low, high, window, C: tl.constexpr):
    """Set the scores of positions that a query does not see to -inf. Most tiles are seen whole."""
    partly = tile >= (low + 1) // C.TILE
    if C.WINDOW:
        partly = partly | (tile * C.TILE <= high - 1 - window)
    if partly:
        query = low + tl.arange(0, C.COLUMNS) // C.GROUP
        back = query[None, :] - (tile * C.TILE + tl.arange(0, C.TILE))[:, None]
        visible = back >= 0
        if C.WINDOW:
            visible = visible & (back < window)
        s = tl.where(visible, s, float("-inf"))
    return s


@triton.jit
def rows_of(queries, first, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Return the rows of q [T * Hq, D] that the columns from `first` on are, and which of these there are."""
    column = first + tl.arange(0, COLUMNS)
    token = (queries.token + column // C.GROUP).to(tl.int64)
    row = (token * queries.num_kv_heads + queries.kv_head) * C.GROUP + column % C.GROUP
    return row, column < queries.num_columns


@triton.jit
def part_of(rows, there, i, C: tl.constexpr):
    """Return where part `i` [PART, columns] of rows of D numbers lies, and which of it there are."""
    d = i * C.PART + tl.arange(0, C.PART)
    return rows[None, :] * C.HEAD_DIM + d[:, None], there[None, :] & (d < C.HEAD_DIM)[:, None]


@triton.jit
def load_queries(q, queries, C: tl.constexpr):
    """Load a tile of queries: C.PARTS x [PART, COLUMNS]."""
    rows, there = rows_of(queries, 0, C.COLUMNS, C)
    parts = ()
    for i in tl.static_range(C.PARTS):
        at, inside = part_of(rows, there, i, C)
        parts += (tl.load(q + at, inside, other=0.0),)
    return parts


@triton.jit
def write(out, state, rows, there, C: tl.constexpr):
    """Write the mean of the values to the rows of `out` [T * Hq, D]."""
    z = tl.where(there, total_weight(state.z), 1.0)[None, :]
    for i in tl.static_range(C.PARTS):
        at, inside = part_of(rows, there, i, C)
        tl.store(out + at, (state.acc[i] / z).to(out.dtype.element_ty), inside)


@triton.jit
def end_unit(partials, unit, num_tokens, total_and_state, queries, units, C: tl.constexpr):
    """Store the state of a unit if other programs have more, else add it to the total."""
    total, state = total_and_state
    if C.SPLIT:
        total = state
        if units.count > 1:
            rows, there = rows_of(queries, 0, C.COLUMNS, C)
            store_state(partials, rows + unit * unit_stride(num_tokens, queries, C), there, state, C)
    else:
        total = add_states(total, state, C)
    return total


@triton.jit
def unit_stride(num_tokens, queries, C: tl.constexpr):
    """Return the number of rows between two units of `Partials`."""
    return num_tokens.to(tl.int64) * queries.num_kv_heads * C.GROUP


@triton.jit
def store_state(partials, rows, there, state, C: tl.constexpr):
    tl.store(partials.m + rows, state.m, there)
    groups = tl.arange(0, C.TILE // 16)[:, None]
    tl.store(partials.z + rows[None, :] * (C.TILE // 16) + groups, state.z, there[None, :])
    for i in tl.static_range(C.PARTS):
        at, inside = part_of(rows, there, i, C)
        tl.store(partials.acc + at, state.acc[i], inside)


@triton.jit
def load_state(partials, rows, there, C: tl.constexpr):
    """Load what another program stored, past the L1 cache; nothing where it is not `there`."""
    m = tl.load(partials.m + rows, there, FLOOR, cache_modifier=".cg")
    groups = tl.arange(0, C.TILE // 16)[:, None]
    z = tl.load(
        partials.z + rows[None, :] * (C.TILE // 16) + groups, there[None, :], 0.0, cache_modifier=".cg"
    )
    acc = ()
    for i in tl.static_range(C.PARTS):
        at, inside = part_of(rows, there, i, C)
        acc += (tl.load(partials.acc + at, inside, 0.0, cache_modifier=".cg"),)
    return State(m, z, acc)


@triton.jit
def finish(partials, num_tokens, out, total, queries, units, C: tl.constexpr):
    """Write the result, if need be from the units of all programs, by the last of them."""
    alone = True
    if C.SPLIT:
        alone = units.count == 1
    if alone:
        rows, there = rows_of(queries, 0, C.COLUMNS, C)
        write(out, total, rows, there, C)
    elif C.SPLIT:
        tl.debug_barrier()  # all threads have stored before one of them takes a ticket
        ticket = partials.tickets + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.cdiv(units.count, units.share) - 1:
            tl.store(ticket, 0)  # ready for the next launch
            sum_units(partials, unit_stride(num_tokens, queries, C), out, queries, units, C)


@triton.jit
def sum_units(partials, stride, out, queries, units, C: tl.constexpr):
    """Add up all units in order, the tiles of each span and then the spans; a few columns at a time, so that
    their states can be on the way together."""
    COLUMNS: tl.constexpr = 512 // C.PART
    for first in range(0, queries.num_columns, COLUMNS):
        rows, there = rows_of(queries, first, COLUMNS, C)
        total, span = empty_state(COLUMNS, C), empty_state(COLUMNS, C)
        for begin in range(0, units.count, UNROLL):
            states = ()
            for i in tl.static_range(UNROLL):
                exists = there & (begin + i < units.count)
                states += (load_state(partials, rows + (begin + i) * stride, exists, C),)
            for i in tl.static_range(UNROLL):
                one = State(states[i][0], states[i][1], states[i][2])  # triton 3.6 forgot the names
                span = add_states(span, one, C)
                if (units.first + begin + i + 1) * units.size % C.SPAN_TILES == 0:
                    total = add_states(total, span, C)
                    span = empty_state(COLUMNS, C)
        write(out, add_states(total, span, C), rows, there, C)
