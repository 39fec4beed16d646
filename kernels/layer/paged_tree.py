"""Attention over the paged KV cache: the kernel for trees of drafts.

A node is computed as the last query of a chain of its ancestors and itself would be, to the bit. Node i lies
at cache index base + i, and the set bits of its ancestor mask say what it sees of the step. Parents come
first, so bits are in order of depth: number r of them, counted from 0, is what the chain has at position base
+ r.

Tiles before `base` are as in a chain, and read once for all nodes of a program. The one or two that hold the
step's own tokens are taken in turns, once for each node, with the keys and values of its path in order of
depth; to the other nodes each is one more tile of which they see nothing. So n nodes take n - 1 or 2 (n - 1)
turns more than a chain of n, of tiles that are in L2. A row without branches costs what a chain does.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ..launch import release_next, wait_for_previous
from .online_softmax import add_tile, empty_state
from .paged import (
    Queries,
    end_unit,
    find_units,
    finish,
    load_queries,
    load_rows,
    locate,
    prefetch_tile,
    row_of_cache,
    scores,
    take_queries,
    tiles_of,
)

# A program's nodes: flat index of the first one, their number; cache indices of the row's first node and
# behind this program's last; the sliding window.
Nodes = namedtuple("Nodes", "token count base high window")


@triton.jit(do_not_specialize=["num_tokens", "fine"])
def _attend_tree(operands, batch, partials, num_tokens, fine, sizes, C: tl.constexpr):
    """As `_attend`, but for the turns. Grid: tiles of nodes times KV heads, rows, programs."""
    release_next(C.PDL)
    b, program = tl.program_id(1), tl.program_id(2)
    kv_head, first_node, num_nodes = take_queries(batch.q_len + b, sizes.num_kv_heads, C)
    base = tl.load(batch.base_len + b)
    units = find_units(base, base + first_node + num_nodes, fine, sizes.window, C)
    busy = (num_nodes > 0) & (program * units.share < units.count)
    keys, values, pages = row_of_cache(operands, batch.block_table, b, kv_head, sizes)
    if C.PDL:
        begin, _ = tiles_of(program * units.share, units)
        prefetch_tile(keys, values, locate(pages, begin, base, tl.where(busy, base, 0), sizes.window, C), C)
    wait_for_previous(C.PDL)
    if not busy:
        return

    token = tl.load(batch.q_start + b) + first_node
    queries = Queries(token, kv_head, sizes.num_kv_heads, num_nodes * C.GROUP)
    nodes = Nodes(token, num_nodes, base, base + first_node + num_nodes, sizes.window)
    query = load_queries(operands.q, queries, C)
    last = tl.load(batch.ancestors + token + num_nodes - 1)
    is_chain = (last & (last + 1)) == 0  # the last node descends from all before it
    in_turns = tl.where(is_chain, units.end_tile, base // C.TILE)  # from this tile on
    node = tl.arange(0, C.COLUMNS) // C.GROUP
    position = tl.load(batch.positions + token + node, node < num_nodes, other=0)
    total = empty_state(C.COLUMNS, C)
    for unit in range(program * units.share, tl.minimum((program + 1) * units.share, units.count)):
        begin, end = tiles_of(unit, units)
        own = tl.minimum(tl.maximum(begin, in_turns), end)
        state = empty_state(C.COLUMNS, C)
        place = locate_path(batch, pages, begin, own, nodes, C)
        for turn in range(begin, own + (end - own) * num_nodes):
            k, v = load_rows(keys, place, C), load_rows(values, place, C)
            place = locate_path(batch, pages, turn + 1, own, nodes, C)  # ahead, as in `_attend`
            s = mask_path(scores(k, query, C), turn, own, position, nodes, C)
            state = add_tile(state, s, v, sizes.scale, C)
        total = end_unit(partials, unit, num_tokens, (total, state), queries, units, C)
    finish(partials, num_tokens, operands.out, total, queries, units, C)


@triton.jit
def take_turn(turn, own, count):
    """Return the tile and the node of a turn. From tile `own` on, each tile comes once for each node."""
    over = tl.maximum(turn - own, 0)
    return tl.minimum(turn, own) + over // count, over % count


@triton.jit
def locate_path(batch, pages, turn, own, nodes, C: tl.constexpr):
    """Return where the positions [TILE] of a turn lie in a head's cache, -1 if nothing is there."""
    tile, node = take_turn(turn, own, nodes.count)
    j = tile * C.TILE + tl.arange(0, C.TILE)
    index, there = j, j < nodes.high
    if turn >= own:
        there = j <= tl.load(batch.positions + nodes.token + node)
        ancestors = tl.load(batch.ancestors + nodes.token + node)
        index = tl.minimum(j, nodes.base) + _nth_bit(ancestors, j - nodes.base)
    if C.WINDOW:
        there = there & (j > nodes.base - nodes.window)
    page = tl.load(pages + index // C.BLOCK_SIZE, there, other=0)
    return tl.where(there, page * C.BLOCK_SIZE + index % C.BLOCK_SIZE, -1)


@triton.jit
def mask_path(s, turn, own, position, nodes, C: tl.constexpr):
    """Set the scores of what a column at `position` does not see, or of another node's turn, to -inf."""
    tile, node = take_turn(turn, own, nodes.count)
    partly = tile >= nodes.base // C.TILE
    if C.WINDOW:
        partly = partly | (tile * C.TILE <= nodes.high - 1 - nodes.window)
    if partly:
        back = position[None, :] - (tile * C.TILE + tl.arange(0, C.TILE))[:, None]
        in_turn = (turn < own) | (tl.arange(0, C.COLUMNS) // C.GROUP == node)
        visible = (back >= 0) & in_turn[None, :]
        if C.WINDOW:
            visible = visible & (back < nodes.window)
        s = tl.where(visible, s, float("-inf"))
    return s


@triton.jit
def _nth_bit(mask, n):
    """Return the place of bit number n [...] of those set in a mask: 63 if there are not so many, 0 if n < 0.
    Scalars hold how many are set in each group of 2, 4, 8, 16 and 32 bits."""
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
