"""Guess the next tokens by looking the last ones up, several ways at once: a tree of n-gram drafts.

Arguments and results are those of `ngram.propose`, and `width` of the table says how many continuations
a request wants at most; 1: a chain, 0: no drafts. Parents are given for chains too, 0 beyond the drafts.

K counts all drafts of a row, whatever their shape. A row that has a match gets exactly D of them, the
least of k and what its limits allow. `match_len` is that of the first chain.

Candidates are all indices p of the text such that m >= min_n of the tokens before p (as many as match,
but at most max_n) equal the last m tokens of the text. A candidate's chain is the D tokens from p on,
going back to p at the end of the text, as in `ngram.py`. The chains that are used are the first `width`
different ones in order of (m, p), larger first. So the first is what `ngram.propose` drafts. It is also
the only one if its match is longer than LONG_MATCH: such matches are mostly right, so that what a branch
takes from the chain is lost (quoting, trees everywhere lose a quarter and more).

The D nodes are shared out in that order: each chain gets half of those that are left (rounded up), the
last chain all of them. A chain follows the tree as far as it is in there, and adds its share of nodes
where it leaves it. Nodes are numbered as they are added, so the first n are a tree too, and the first
half is the head of the best chain: a tree accepts at least as many tokens as a chain of ceil(D / 2)
drafts does. (Not always as many as a chain of D: where the text repeats itself at length, the first
match is mostly right to its end, and width 1 is better.) A chain that equals an earlier one up to the
end of that one's share goes on below it, so the two may make a single path. Three things follow.
- Siblings differ, since a chain adds a child only where no child carries its token.
- The share always fits: a tree of D nodes is at most D deep, so no chain needs more tokens than its D,
  and each chain leaves the tree within its D tokens, since it differs from all chains before.
- A chain that leaves the tree at node x took l tokens of chains before. The earliest chain that shares
  l tokens within its depth added x itself: if it had taken x over, a chain before it would share them.

Kernel: two launches. `_search` splits each history over programs. Each reduces its 1024 candidates at a
time to the `width` best that differ, which loses none of the row's: of a row's best chains, each is
among the best of the program that holds its best candidate. `_build` reduces the programs' candidates
the same way and makes the tree, in one program per row. To remove the chains that equal a chosen one,
tokens are compared one by one until none is left that could be equal, mostly after one or two; only
periodic text, where all candidates continue alike, takes all D.
Limits: k <= 63, max_width <= 8, and those of `ngram`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codes import MAX_DRAFTS, MAX_TREE_WIDTH
from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..table import Table
from . import ngram
from .ngram import INDEX_BITS, INDEX_MASK, match_scores, wanted_drafts
from .proposal import Proposal

LONG_MATCH = 3  # tokens; longer matches are not branched
_LONG_MATCH = tl.constexpr(LONG_MATCH)


def propose(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    """Draft up to `k` tokens for each of `rows` [B] int32, request rows or -1. `max_n` and `max_width` are
    upper bounds of theirs."""
    if use_triton(rows):
        return launch(table, rows, k, max_n, max_width)
    return (ngram.native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n, max_width)


def naive(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    """On a CPU, at 2 to 3 times the time of `ngram.naive`."""
    limits, lengths = ngram.allowed(table, k), table.num_tokens.tolist()
    shortest, longest = table.min_n.tolist(), table.max_n.clamp(max=max_n).tolist()
    widths = table.width.clamp(max=max_width).tolist()
    lines, num_drafts, match_len = [], [], []
    for s in rows.tolist():
        nodes: list[tuple[int, int, int]] = []
        n = 0
        if s >= 0 and limits[s] > 0:
            text = table.tokens[s, : lengths[s]]
            starts, matched = candidates(text, shortest[s], longest[s])
            wide = min(widths[s], 1) if matched > LONG_MATCH else widths[s]
            nodes = grow(different(text, starts, limits[s], wide), limits[s], lengths[s])
            n = matched if nodes else 0
        lines.append(nodes + [(0, -1, 0)] * (k - len(nodes)))
        num_drafts.append(len(nodes))
        match_len.append(n)
    drafts, sources, parents = ([[node[i] for node in line] for line in lines] for i in range(3))
    columns = (drafts, num_drafts, sources, match_len, [0] * len(lines), parents)
    return Proposal(*(torch.tensor(c, dtype=torch.int32, device=rows.device) for c in columns))


def candidates(text: Tensor, min_n: int, max_n: int) -> tuple[Tensor, int]:
    """All candidates in text [n], best first ([C] int64), and the match length of the best (0: none)."""
    n = len(text)
    suffix = text[max(n - max_n, 0) :].flip(0).tolist()  # latest token first
    if not suffix:
        return torch.empty(0, dtype=torch.int64), 0
    after = (text[:-1] == suffix[0]).nonzero().squeeze(1) + 1
    matched = torch.ones_like(after)
    alive = after > 0
    for i, token in enumerate(suffix[1:], 1):
        alive &= (after > i) & (text[after - 1 - i] == token)
        matched += alive
    order = (matched * n + after)[matched >= min_n].sort(descending=True).values
    return order % n, int(order[0]) // n if len(order) else 0


def continuations(text: Tensor, starts: Tensor, wanted: int) -> Tensor:
    """The `wanted` tokens from each start on, [C, wanted]; at the end of text [n] back to the start."""
    n = len(text)
    windows = torch.cat([text, text.new_zeros(wanted)]).unfold(0, wanted, 1)[starts]
    near = (starts > n - wanted).nonzero().squeeze(1)  # at most `wanted` of them run into the end
    p = starts[near, None]
    windows[near] = text[p + torch.arange(wanted, device=text.device) % (n - p)]
    return windows


def different(text: Tensor, starts: Tensor, wanted: int, width: int) -> list[tuple[int, list[int]]]:
    """The first `width` of the starts that continue differently, and how they do."""
    chosen: list[tuple[int, Tensor]] = []
    size = 64  # pieces: mostly the first one has all, and in periodic text there are thousands of starts
    while len(starts) and len(chosen) < width:
        piece, starts = starts[:size], starts[size:]
        size *= 8
        table = continuations(text, piece, wanted)
        fresh = torch.ones_like(piece, dtype=torch.bool)
        for _, chain in chosen:
            fresh &= (table != chain).any(1)
        while len(chosen) < width and bool(fresh.any()):
            i = int(fresh.int().argmax())  # the first
            chosen.append((int(piece[i]), table[i]))
            fresh &= (table != table[i]).any(1)
    return [(p, chain.tolist()) for p, chain in chosen]


def grow(chains: list[tuple[int, list[int]]], wanted: int, length: int) -> list[tuple[int, int, int]]:
    """(token, index in the text, parent) of each node of the tree, by place."""
    nodes: list[tuple[int, int, int]] = []
    children: dict[tuple[int, int], int] = {}  # (place, token) -> place
    for i, (p, chain) in enumerate(chains, 1):
        rest = wanted - len(nodes)
        end = len(nodes) + (rest if i == len(chains) else (rest + 1) // 2)
        place = 0
        for j, token in enumerate(chain):
            parent, place = place, children.get((place, token), 0)
            if not place:
                if len(nodes) == end:
                    break
                nodes.append((token, p + j % (length - p), parent))
                place = children[parent, token] = len(nodes)
    return nodes


@triton.jit
def _without(text, length, wanted, score, best):
    """`score` without `best` and all that continue as it does."""
    p, first = score & INDEX_MASK, best & INDEX_MASK
    index = tl.where((score >= 0) & (score != best), p, -1)  # of the next token, -1: continues differently
    own, j = first, 0
    while (j < wanted) & (tl.max(index) >= 0):
        like = (index >= 0) & (tl.load(text + index, index >= 0, other=-1) == tl.load(text + own))
        index = tl.where(like, tl.where(index + 1 < length, index + 1, p), -1)
        own = tl.where(own + 1 < length, own + 1, first)
        j += 1
    return tl.where((index >= 0) | (score == best), -1, score)


@triton.jit
def _different(text, length, wanted, width, score, more, SLOTS: tl.constexpr):
    """The best `width` of two vectors of scores that continue differently, best first: [SLOTS]."""
    slot = tl.arange(0, SLOTS)
    chosen = tl.full([SLOTS], -1, tl.int32)
    best, i = tl.maximum(tl.max(score), tl.max(more)), 0
    while (i < width) & (best >= 0):
        chosen = tl.where(slot == i, best, chosen)
        i += 1
        if i < width:
            score = _without(text, length, wanted, score, best)
            more = _without(text, length, wanted, more, best)
            best = tl.maximum(tl.max(score), tl.max(more))
    return chosen


@triton.jit(do_not_specialize=["k"])
def _search(
    table, rows, found, k,
    MAX_N: tl.constexpr, MAX_WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    s = tl.load(rows + b)
    length, wanted = wanted_drafts(table, s, k)
    if wanted <= 0:
        return
    text = table.tokens + s.to(tl.int64) * table.max_context
    shortest, longest = tl.load(table.min_n + s), tl.load(table.max_n + s)
    wide = tl.minimum(tl.load(table.width + s), MAX_WIDTH)
    chosen = tl.full([SLOTS], -1, tl.int32)
    for first in range(part * BLOCK, length, parts * BLOCK):
        score = match_scores(text, length, first + tl.arange(0, BLOCK), shortest, longest, MAX_N)
        chosen = _different(text, length, wanted, wide, score, chosen, SLOTS)
    tl.store(found + (b * parts + part) * SLOTS + tl.arange(0, SLOTS), chosen)


@triton.jit(do_not_specialize=["k", "parts"])
def _build(
    table, rows, found, proposal, k, parts,
    MAX_WIDTH: tl.constexpr, SLOTS: tl.constexpr, FOUND: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    s = tl.load(rows + b)
    length, wanted = wanted_drafts(table, s, k)
    row = tl.maximum(s, 0)
    text = table.tokens + row.to(tl.int64) * table.max_context
    wide = tl.minimum(tl.load(table.width + row), MAX_WIDTH)
    i, slot = tl.arange(0, FOUND), tl.arange(0, SLOTS)
    n = parts * SLOTS
    score = tl.load(found + b * n + i, (i < n) & (wanted > 0), other=-1)
    wide = tl.where(tl.max(score) >> INDEX_BITS > _LONG_MATCH, tl.minimum(wide, 1), wide)
    chosen = _different(text, length, wanted, wide, score, tl.full([SLOTS], -1, tl.int32), SLOTS)
    count = tl.sum((chosen >= 0).to(tl.int32))

    j = tl.arange(0, NODES)
    place = j + 1
    first = tl.maximum(chosen, 0) & INDEX_MASK
    index = first[:, None] + j[None, :] % tl.maximum(length - first, 1)[:, None]
    chains = tl.load(text + index, (chosen >= 0)[:, None] & (j < wanted)[None, :], other=-1)
    # Of each chain: how many tokens it took over, how deep it goes, and how many nodes came before.
    none = tl.zeros([SLOTS], tl.int32)
    taken, depth, before = none, none, none
    sources, above, made = tl.full([NODES], -1, tl.int32), tl.zeros([NODES], tl.int32), 0
    for c in range(count):
        p = tl.sum(tl.where(slot == c, first, 0))
        chain = tl.load(text + p + j % (length - p), j < wanted, other=-1)
        common = tl.min(tl.where(chains == chain[None, :], NODES, j[None, :]), 1)
        common = tl.where(slot < c, tl.minimum(common, depth), -1)
        reach = tl.maximum(tl.max(common), 0)
        owner = tl.min(tl.where(common == reach, slot, SLOTS))
        join = tl.sum(tl.where((slot == owner) & (reach > 0), before + reach - taken, 0))
        rest = wanted - made
        share = tl.where(c + 1 == count, rest, (rest + 1) // 2)
        mine = (place > made) & (place <= made + share)
        sources = tl.where(mine, p + (reach + j - made) % (length - p), sources)
        above = tl.where(mine, tl.where(j == made, join, j), above)
        taken = tl.where(slot == c, reach, taken)
        depth = tl.where(slot == c, reach + share, depth)
        before = tl.where(slot == c, made, before)
        made += share
    tl.store(proposal.drafts + b * k + j, tl.load(text + sources, sources >= 0, other=0), j < k)
    tl.store(proposal.source + b * k + j, sources, j < k)
    tl.store(proposal.parents + b * k + j, above, j < k)
    tl.store(proposal.num_drafts + b, made)
    tl.store(proposal.match_len + b, tl.where(made > 0, tl.max(chosen) >> INDEX_BITS, 0))
    tl.store(proposal.drafter + b, 0)


def launch(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    if k > MAX_DRAFTS or not 1 <= max_width <= MAX_TREE_WIDTH:
        raise ValueError(
            f"A tree has at most {MAX_DRAFTS} drafts and from 1 to {MAX_TREE_WIDTH} continuations, "
            f"not {k} drafts and {max_width} continuations."
        )
    B, slots = len(rows), next_power_of_2(max_width)
    parts, proposal = ngram.splits(table, B, max_n), ngram.empty_proposal(rows, k, tree=True)
    if B:
        found = rows.new_empty(B, parts, slots)
        _search[(B, parts)](
            table, rows, found, k,
            MAX_N=max_n, MAX_WIDTH=max_width, SLOTS=slots, BLOCK=ngram.BLOCK, num_warps=8,
        )  # fmt: skip
        _build[(B,)](
            table, rows, found, proposal, k, parts,
            MAX_WIDTH=max_width, SLOTS=slots, FOUND=next_power_of_2(parts * slots),
            NODES=next_power_of_2(k), num_warps=1 if parts * slots <= 512 else 4,
        )  # fmt: skip
    return proposal
