"""Guess several continuations by lookup, as a tree of drafts; the search is that of `ngram.py`.

Each match begins a chain, its D tokens from there on. The first `width` of the table different chains are
used, but only the first if its match is longer than LONG_MATCH: such matches are mostly right, and a branch
would take drafts from the chain (measured: in quotations, trees everywhere lose a quarter and more). The D
nodes are shared out in that order: each chain gets half of those that are left (rounded up), the last chain
all of them. A chain follows the tree as far as it is in there, and adds its share of nodes where it leaves
it. Nodes are numbered as they are added, so the first n are a tree too, and the first half is the head of the
best chain: a tree accepts at least as many tokens as a chain of ceil(D / 2) drafts does. Two things follow.
- Siblings differ, since a chain adds a child only where no child carries its token.
- The share always fits: a tree of D nodes is at most D deep, so no chain needs more tokens than its D,
  and each chain leaves the tree within its D tokens, since it differs from all chains before.

Beyond the drafts parents are 0. Kernel: one program per row. It keeps the `width` best matches that continue
differently while it goes through the history, and makes the tree of them. Limits: max_width <= 8.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import use_native, use_triton
from ..table import Table
from . import ngram
from .proposal import Proposal, empty_proposal

LONG_MATCH = tl.constexpr(3)  # tokens; longer matches are not branched
BLOCK = 2048  # tokens per iteration


def propose(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    """Draft a tree of up to `k` tokens for each of `rows` [B] int32, request rows or -1. `max_n` and
    `max_width` >= 2 are upper bounds of theirs."""
    if use_triton(rows):
        return launch(table, rows, k, max_n, max_width)
    return (ngram.native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n, max_width)


def naive(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    proposal = ngram.no_drafts(rows, k, tree=True)
    for b, s in enumerate(rows.tolist()):
        text, starts, n, wanted = ngram.search(table, s, k)
        if wanted:
            width = 1 if n > LONG_MATCH.value else min(max(int(table.width[s]), 1), max_width)
            nodes = rows.new_tensor(build(text, different(text, starts, wanted, width)))
            ngram.put(proposal, b, text, nodes[:, 0], n, nodes[:, 1])
    return proposal


def different(text: Tensor, starts: Tensor, wanted: int, width: int) -> list[list[int]]:
    """Return the sources [wanted] of the first `width` of the starts that continue differently."""
    sources = ngram.continuation(starts, wanted, len(text))
    chosen: list[list[int]] = []
    while len(sources) and len(chosen) < width:
        chosen.append(sources[0].tolist())
        sources = sources[(text[sources] != text[sources[0]]).any(1)]
    return chosen


def build(text: Tensor, chains: list[list[int]]) -> list[tuple[int, int]]:
    """Return source and parent of the nodes of the tree of these chains, by place."""
    nodes: list[tuple[int, int]] = []
    children: dict[tuple[int, int], int] = {}  # (place, token) -> place
    for i, chain in enumerate(chains, 1):
        rest = len(chain) - len(nodes)
        end = len(nodes) + (rest if i == len(chains) else (rest + 1) // 2)
        place = 0
        for source in chain:
            key = place, int(text[source])
            if key not in children:
                if len(nodes) == end:
                    break
                nodes.append((source, place))
                children[key] = len(nodes)
            place = children[key]
    return nodes


@triton.jit
def _without(history, score, best):
    """Return `score` without `best` and all that continue as it does."""
    p, first = score & ngram.INDEX_MASK, best & ngram.INDEX_MASK
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


@triton.jit
def _build(history, chosen, SLOTS: tl.constexpr):
    """`build` of the chosen chains: sources and parents of the nodes [DRAFTS], and their number."""
    slot, place = tl.arange(0, SLOTS), tl.arange(0, ngram.DRAFTS) + 1
    tokens, parents = tl.full([ngram.DRAFTS], -1, tl.int32), tl.zeros([ngram.DRAFTS], tl.int32)
    sources, count, made = tokens, tl.sum((chosen >= 0).to(tl.int32)), 0
    for c in range(count):
        first = tl.sum(tl.where(slot == c, chosen, 0)) & ngram.INDEX_MASK
        rest = history.room - made
        end = made + tl.where(c + 1 == count, rest, (rest + 1) // 2)
        at, j = 0, 0  # the place that the chain has reached, -1 at its end; how many tokens it took
        while (j < history.room) & (at >= 0):
            source = first + j % (history.length - first)
            token = tl.load(history.text + source)
            child = tl.max(tl.where((parents == at) & (tokens == token), place, 0))
            if (child == 0) & (made < end):
                made += 1
                child = made
                new = place == made
                tokens = tl.where(new, token, tokens)
                sources, parents = tl.where(new, source, sources), tl.where(new, at, parents)
            at = tl.where(child > 0, child, -1)
            j += 1
    return sources, parents, made


@triton.jit(do_not_specialize=["k"])
def _propose(table, rows, proposal, k, WIDTH: tl.constexpr, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    b, j = tl.program_id(0), tl.arange(0, ngram.DRAFTS)
    SLOTS: tl.constexpr = triton.next_power_of_2(WIDTH)
    s, slot = tl.load(rows + b), tl.arange(0, SLOTS)
    history = ngram.history_of(table, s, k)
    length = tl.where(history.room > 0, history.length, 0)
    width = tl.minimum(tl.maximum(tl.load(table.width + tl.maximum(s, 0)), 1), WIDTH)
    p, chosen = tl.arange(0, BLOCK), tl.full([SLOTS], -1, tl.int32)
    for _ in range(0, length, BLOCK):
        chosen = _different(history, width, ngram.match_scores(history, p, MAX_N), chosen, SLOTS)
        p += BLOCK
    match_len = tl.maximum(tl.max(chosen), 0) >> ngram.INDEX_BITS
    chosen = tl.where((slot == 0) | (match_len <= LONG_MATCH), chosen, -1)
    sources, parents, made = _build(history, chosen, SLOTS)
    tl.store(proposal.parents + b * k + j, parents, j < k)
    ngram.store_drafts(proposal, history, sources, made, match_len, k)


def launch(table: Table, rows: Tensor, k: int, max_n: int, max_width: int) -> Proposal:
    proposal, constants = empty_proposal(rows, k, tree=True), {"WIDTH": max_width, "MAX_N": max_n}
    if len(rows):
        _propose[(len(rows),)](table, rows, proposal, k, **constants, BLOCK=BLOCK, num_warps=16)
    return proposal
