"""Attention over the paged KV cache: the kernel for trees of drafts.

The output of a node is bitwise identical to that of the last query of a chain of its ancestors and itself.
Node i is at cache index base + i, and the set bits of its ancestor mask are the nodes that it attends to.
Parents come first, so the bits are in order of depth: set bit number r, counted from 0, is the node that the
chain has at position base + r.

Tiles without drafts are processed as in a chain, once for all nodes of a program. The one or two tiles with
drafts are processed once per node, with the keys and values of its path gathered in order of depth; for the
other nodes, the tile is fully masked. So n nodes take n - 1 or 2 (n - 1) more iterations than a chain of n,
on tiles that are in L2. A row without branches costs the same as a chain, and so does a block, in which the
masks have the bits of all nodes: then each query attends to the whole row.
"""

import triton
import triton.language as tl

from ..launch import release_next, wait_for_previous
from .online_softmax import add_tile, empty_state
from .paged import end_unit, load_queries, load_rows, load_slots, row_of_cache, scores, store_output
from .split_kv import find_work, tile_range


@triton.jit(do_not_specialize=["num_tokens", "max_tiles"])
def _attend_tree(operands, batch, partials, num_tokens, max_tiles, sizes, C: tl.constexpr):
    """`_attend` for trees. Grid: (tiles of nodes * KV heads, rows, programs that share the cache)."""
    release_next(C.PDL)
    work = find_work(batch, num_tokens, max_tiles, sizes, C)
    wait_for_previous(C.PDL)
    first_unit = tl.program_id(2) * work.share
    if first_unit >= work.count:
        return
    keys, values, blocks = row_of_cache(operands, batch.block_table, sizes)
    query = load_queries(operands.q, work, C)
    num_nodes = work.num_columns // C.GROUP
    last = tl.load(batch.ancestors + work.token + num_nodes - 1)
    is_chain = (last & (last + 1)) == 0  # the last node descends from all others
    per_node_from = tl.where(is_chain, work.end_tile, (work.low + 1) // C.TILE)  # first repeated tile
    column_node = tl.arange(0, C.COLUMNS) // C.GROUP
    position = tl.load(batch.positions + work.token + column_node, column_node < num_nodes, other=0)
    # In a block, the first query, which is at position `low` in its row, attends to later ones.
    first = tl.load(batch.ancestors + tl.load(batch.q_start + tl.program_id(1)), num_nodes > 0, other=1)
    position = tl.where(first == 1, position, work.high - 1)
    total = empty_state(C.COLUMNS, C)
    for unit in range(first_unit, tl.minimum(first_unit + work.share, work.count)):
        begin, end = tile_range(unit, work)
        first_per_node = tl.minimum(tl.maximum(begin, per_node_from), end)
        state = empty_state(C.COLUMNS, C)
        place = locate_path(batch, blocks, begin, first_per_node, num_nodes, work, C)
        for step in range(begin, first_per_node + (end - first_per_node) * num_nodes):
            k, v = load_rows(keys, place, C), load_rows(values, place, C)
            place = locate_path(batch, blocks, step + 1, first_per_node, num_nodes, work, C)  # ahead
            tile, node = tile_and_node(step, first_per_node, num_nodes)
            query_position = tl.where((step < first_per_node) | (column_node == node), position, -1)
            s = scores(k, query, tile, query_position, work, C)
            state = add_tile(state, s, v, sizes.scale, C)
        total = end_unit(partials, unit, total, state, work, C)
    if not C.SPLIT:
        store_output(operands.out, total, 0, C.COLUMNS, work, C)


@triton.jit
def tile_and_node(step, first_per_node, count):
    """Return the tile and node of an iteration. From `first_per_node` on, tiles are repeated per node."""
    over = tl.maximum(step - first_per_node, 0)
    return tl.minimum(step, first_per_node) + over // count, over % count


@triton.jit
def locate_path(batch, blocks, step, first_per_node, num_nodes, work, C: tl.constexpr):
    """Return the slots [TILE] of the iteration's tile in a head's cache, -1 where there is no entry."""
    tile, node = tile_and_node(step, first_per_node, num_nodes)
    j = tile * C.TILE + tl.arange(0, C.TILE)
    index, valid = j, j < work.high
    if step >= first_per_node:
        valid = j <= tl.load(batch.positions + work.token + node)
        ancestors = tl.load(batch.ancestors + work.token + node)
        index = tl.minimum(j, work.low) + _nth_bit(ancestors, j - work.low)
    return load_slots(blocks, index, valid & (j > work.low - C.WINDOW), C)


@triton.jit
def _nth_bit(mask, n):
    """Return the index of set bit number n [...] of an int64 mask: 63 if fewer bits are set, 0 if n < 0. A
    binary search over `groups`, the population counts of each 32, 16, 8, 4, 2 and 1 bits."""
    in_2 = mask - ((mask >> 1) & 0x5555555555555555)
    in_4 = (in_2 & 0x3333333333333333) + ((in_2 >> 2) & 0x3333333333333333)
    in_8 = (in_4 + (in_4 >> 4)) & 0x0F0F0F0F0F0F0F0F
    in_16 = (in_8 + (in_8 >> 8)) & 0x00FF00FF00FF00FF
    groups = (in_16 + (in_16 >> 16), in_16, in_8, in_4, in_2, mask)
    found = tl.zeros_like(n)
    for step in tl.static_range(6):
        half = 32 >> step
        count = ((groups[step] >> found) & (2 * half - 1)).to(tl.int32)
        found += tl.where(n < count, 0, half)
        n -= tl.where(n < count, 0, count)
    return found
