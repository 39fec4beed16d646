"""Trees in the kernel of attention: the path of a node taken as a chain.

Node i of a tree lies at cache index base + i, and the set bits of its mask are what it sees of the step.
Parents come first, so bits are in order of depth: number r of them, counted from 0, is what the chain of its
ancestors and itself has at position base + r. Only tiles that hold such positions differ from node to node: a
program takes them once for each, in turns, and all before only once.
"""

import triton
import triton.language as tl


@triton.jit
def take_turn(turn, own, nodes):
    """The tile and the node of a turn. From tile `own` on, each tile comes once for each node."""
    over = tl.maximum(turn - own, 0)
    return tl.minimum(turn, own) + over // nodes, over % nodes


@triton.jit
def _nth_bit(mask, n):
    """The place of bit number n [...] of those set in a mask: 63 if there are not so many, 0 if n < 0.
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


@triton.jit
def look_up(
    batch, pages, token, base, low, high, window, turn, own, nodes,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Where each position of a turn's tile lies in the cache, -1 if it is not there. `token` is the program's
    first node; cache indices from `base` on are the step's own, and its queries end before `high`."""
    tile, node = take_turn(turn, own, nodes)
    j = tile * TILE + tl.arange(0, TILE)
    index, there = j, j < high
    if turn >= own:
        there = j <= tl.load(batch.positions + token + node)
        index = tl.minimum(j, base) + _nth_bit(tl.load(batch.ancestors + token + node), j - base)
    if WINDOW:
        there = there & (j > low - window)
    page = tl.load(pages + index // BLOCK_SIZE, there, other=0)
    return tl.where(there, page * BLOCK_SIZE + index % BLOCK_SIZE, -1)
