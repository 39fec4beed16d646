"""Guess the next tokens by looking the last ones up, several ways at once: a tree of n-gram drafts.

Arguments and results are those of `ngram.propose`, and `width` of the table says how many continuations
a request wants at most; 1: a chain, 0: no drafts. Parents are given for chains too, 0 beyond the drafts.
K counts all drafts of a row in a chain or a tree: a row with a match gets as many as fit.

Each match of `ngram.matches` begins a chain: its D tokens from there on, copied as in `ngram.py`. The first
`width` different chains are used, so the first is what `ngram.propose` drafts. It is the only one if its
match is longer than LONG_MATCH: such matches are mostly right, and a branch would take drafts from the chain
(measured: in quotations, trees everywhere lose a quarter and more).

The D nodes are shared out in that order: each chain gets half of those that are left (rounded up), the
last chain all of them. A chain follows the tree as far as it is in there, and adds its share of nodes
where it leaves it. Nodes are numbered as they are added, so the first n are a tree too, and the first
half is the head of the best chain: a tree accepts at least as many tokens as a chain of ceil(D / 2)
drafts does. Three things follow.
- Siblings differ, since a chain adds a child only where no child carries its token.
- The share always fits: a tree of D nodes is at most D deep, so no chain needs more tokens than its D,
  and each chain leaves the tree within its D tokens, since it differs from all chains before.
- A chain that leaves the tree at node x took l tokens of chains before. The earliest chain that shares
  l tokens within its depth added x itself: if it had taken x over, a chain before it would share them.

Kernel: two launches. `_search` splits each history over programs. Each reduces its 1024 candidates at a
time to the `width` best that differ, which loses none of the row's: of a row's best chains, each is
among the best of the program that holds its best candidate. `_build` reduces the programs' candidates
the same way and makes the tree, in one program per row. Limits: k <= 63, max_width <= 8, those of `ngram`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..table import Table
from . import ngram
from .ngram import INDEX_BITS, INDEX_MASK, load_history, match_scores
from .proposal import Node, Proposal, empty_proposal, of_nodes, room

LONG_MATCH = 3  # tokens; longer matches are not branched
_LONG_MATCH = tl.constexpr(LONG_MATCH)


def propose(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    """Draft up to `k` tokens for each of `rows` [B] int32, request rows or -1. `max_n` and `max_width` are
    upper bounds of theirs."""
    if use_triton(rows):
        return launch(table, rows, k, max_n, max_width)
    return (ngram.native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n, max_width)


def naive(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    trees, match_len = [], []
    for s, wanted in zip(rows.tolist(), room(table, rows, k).tolist(), strict=True):
        text = table.tokens[s, : int(table.num_tokens[s])]
        starts, n = ngram.matches(text, int(table.min_n[s]), min(int(table.max_n[s]), max_n))
        width = min(int(table.width[s]), max_width, 1 if n > LONG_MATCH else max_width)
        trees.append(build(different(text, starts, wanted, width), wanted, len(text)) if wanted else [])
        match_len.append(n if trees[-1] else 0)
    return of_nodes(trees, match_len, k, rows.device, tree=True)


def different(text: Tensor, starts: Tensor, wanted: int, width: int) -> list[tuple[int, list[int]]]:
    """Return the first `width` of the starts that continue differently, and their `wanted` tokens each."""
    n, place, chosen = len(text), torch.arange(wanted, device=text.device), list[tuple[int, list[int]]]()
    chains = text[starts[:, None] + place % (n - starts[:, None])]  # [C, wanted]
    while len(chains) and len(chosen) < width:
        chosen.append((int(starts[0]), chains[0].tolist()))
        fresh = (chains != chains[0]).any(1)
        starts, chains = starts[fresh], chains[fresh]
    return chosen


def build(chains: list[tuple[int, list[int]]], wanted: int, length: int) -> list[Node]:
    """Return the nodes of the tree of these chains by place, in a text of the given length."""
    nodes: list[Node] = []
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
                nodes.append(Node(token, p + j % (length - p), parent))
                place = children[parent, token] = len(nodes)
    return nodes


class Bounds(NamedTuple):
    """Upper bounds of a match and of the number of continuations; the next power of 2 of the latter."""

    MAX_N: tl.constexpr
    MAX_WIDTH: tl.constexpr
    SLOTS: tl.constexpr


class Sizes(NamedTuple):
    """An upper bound of the number of continuations, and the next powers of 2: of it, of the scores of all
    programs, of the drafts."""

    MAX_WIDTH: tl.constexpr
    SLOTS: tl.constexpr
    FOUND: tl.constexpr
    NODES: tl.constexpr


@triton.jit
def _without(history, score, best):
    """Return `score` without `best` and all that continue as it does."""
    p, first = score & INDEX_MASK, best & INDEX_MASK
    index = tl.where((score >= 0) & (score != best), p, -1)  # of the next token, -1: continues differently
    own, j = first, 0
    while (j < history.room) & (tl.max(index) >= 0):
        token = tl.load(history.text + own)
        like = (index >= 0) & (tl.load(history.text + index, index >= 0, other=-1) == token)
        index = tl.where(like, tl.where(index + 1 < history.length, index + 1, p), -1)
        own = tl.where(own + 1 < history.length, own + 1, first)
        j += 1
    return tl.where((index >= 0) | (score == best), -1, score)


@triton.jit
def _different(history, width, score, more, SLOTS: tl.constexpr):
    """Return the best `width` of two vectors of scores that continue differently, best first: [SLOTS]."""
    slot = tl.arange(0, SLOTS)
    chosen = tl.full([SLOTS], -1, tl.int32)
    best, i = tl.maximum(tl.max(score), tl.max(more)), 0
    while (i < width) & (best >= 0):
        chosen = tl.where(slot == i, best, chosen)
        i += 1
        if i < width:
            score, more = _without(history, score, best), _without(history, more, best)
            best = tl.maximum(tl.max(score), tl.max(more))
    return chosen


@triton.jit(do_not_specialize=["k"])
def _search(table, rows, found, k, bounds, BLOCK: tl.constexpr):
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    s = tl.load(rows + b)
    history = load_history(table, s, k)
    if history.room <= 0:
        return
    width = tl.minimum(tl.load(table.width + s), bounds.MAX_WIDTH)
    chosen = tl.full([bounds.SLOTS], -1, tl.int32)
    # The loop carries the indices: made from the loop variable, triton 3.7 spills 8 bytes on sm_100.
    p = part * BLOCK + tl.arange(0, BLOCK)
    for _ in range(part * BLOCK, history.length, parts * BLOCK):
        score = match_scores(history, p, bounds.MAX_N)
        p += parts * BLOCK
        chosen = _different(history, width, score, chosen, bounds.SLOTS)
    tl.store(found + (b * parts + part) * bounds.SLOTS + tl.arange(0, bounds.SLOTS), chosen)


@triton.jit(do_not_specialize=["k", "parts"])
def _build(table, rows, found, proposal, k, parts, sizes):
    b, i = tl.program_id(0), tl.arange(0, sizes.FOUND)
    s = tl.load(rows + b)
    history = load_history(table, s, k)
    n = parts * sizes.SLOTS
    score = tl.load(found + b * n + i, (i < n) & (history.room > 0), other=-1)
    width = tl.minimum(tl.load(table.width + tl.maximum(s, 0)), sizes.MAX_WIDTH)
    width = tl.where(tl.max(score) >> INDEX_BITS > _LONG_MATCH, tl.minimum(width, 1), width)
    none = tl.full([sizes.SLOTS], -1, tl.int32)
    chosen = _different(history, width, score, none, sizes.SLOTS)
    sources, parents, made = _grow(history, chosen, sizes.SLOTS, sizes.NODES)
    j = tl.arange(0, sizes.NODES)
    tl.store(proposal.drafts + b * k + j, tl.load(history.text + sources, sources >= 0, other=0), j < k)
    tl.store(proposal.source + b * k + j, sources, j < k)
    tl.store(proposal.parents + b * k + j, parents, j < k)
    tl.store(proposal.num_drafts + b, made)
    tl.store(proposal.match_len + b, tl.where(made > 0, tl.max(chosen) >> INDEX_BITS, 0))
    tl.store(proposal.drafter + b, 0)


@triton.jit
def _grow(history, chosen, SLOTS: tl.constexpr, NODES: tl.constexpr):
    """Return the nodes of the tree of the chosen chains: sources and parents [NODES], and their number."""
    text, length = history.text, history.length
    slot, j = tl.arange(0, SLOTS), tl.arange(0, NODES)
    place, count = j + 1, tl.sum((chosen >= 0).to(tl.int32))
    first = tl.maximum(chosen, 0) & INDEX_MASK
    index = first[:, None] + j[None, :] % tl.maximum(length - first, 1)[:, None]
    chains = tl.load(text + index, (chosen >= 0)[:, None] & (j < history.room)[None, :], other=-1)
    # Of each chain: how many tokens it took over, how deep it goes, and how many nodes came before.
    none = tl.zeros([SLOTS], tl.int32)
    taken, depth, before = none, none, none
    sources, parents, made = tl.full([NODES], -1, tl.int32), tl.zeros([NODES], tl.int32), 0
    for c in range(count):
        p = tl.sum(tl.where(slot == c, first, 0))
        chain = tl.load(text + p + j % (length - p), j < history.room, other=-1)
        common = tl.min(tl.where(chains == chain[None, :], NODES, j[None, :]), 1)
        common = tl.where(slot < c, tl.minimum(common, depth), -1)
        reach = tl.maximum(tl.max(common), 0)
        owner = tl.min(tl.where(common == reach, slot, SLOTS))
        join = tl.sum(tl.where((slot == owner) & (reach > 0), before + reach - taken, 0))
        rest = history.room - made
        share = tl.where(c + 1 == count, rest, (rest + 1) // 2)
        mine = (place > made) & (place <= made + share)
        sources = tl.where(mine, p + (reach + j - made) % (length - p), sources)
        parents = tl.where(mine, tl.where(j == made, join, j), parents)
        taken = tl.where(slot == c, reach, taken)
        depth = tl.where(slot == c, reach + share, depth)
        before = tl.where(slot == c, made, before)
        made += share
    return sources, parents, made


def launch(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    B, slots = len(rows), next_power_of_2(max_width)
    parts, proposal = ngram.splits(table, B), empty_proposal(rows, k, tree=True)
    if B:
        found = rows.new_empty(B, parts, slots)
        bounds = Bounds(*map(tl.constexpr, (max_n, max_width, slots)))
        _search[(B, parts)](table, rows, found, k, bounds, BLOCK=ngram.BLOCK, num_warps=8)
        powers = slots, next_power_of_2(parts * slots), next_power_of_2(k)
        sizes = Sizes(*map(tl.constexpr, (max_width, *powers)))
        warps = 1 if parts * slots <= 512 else 4
        _build[(B,)](table, rows, found, proposal, k, parts, sizes, num_warps=warps)
    return proposal
