"""Guess the next tokens by looking the last ones up in the request's own history (prompt lookup): one
continuation, a chain, or several, a tree.

Which match wins: the longest suffix of length min_n <= n <= max_n that occurs earlier; among equally
long ones the latest, because recent text predicts best. The occurrence may overlap the suffix itself,
and when copying runs into the end of the text it goes on copying from the match, as in LZ77
(Ziv & Lempel, 1977): a text of period p then drafts full length. The method is prompt lookup decoding
(Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

A row gets as many drafts as it has `room` for where a match was found, else none. Beyond the drafts, tokens
are 0, sources -1 and parents 0; without drafts the length of the match is 0.

Trees: each match begins a chain, its D tokens from there on. The first `width` of the table different
chains are used, but only the first if its match is longer than LONG_MATCH: such matches are mostly right,
and a branch would take drafts from the chain (measured: in quotations, trees everywhere lose a quarter and
more). The D nodes are shared out in that order: each chain gets half of those that are left (rounded up), the
last chain all of them. A chain follows the tree as far as it is in there, and adds its share of nodes
where it leaves it. Nodes are numbered as they are added, so the first n are a tree too, and the first
half is the head of the best chain: a tree accepts at least as many tokens as a chain of ceil(D / 2)
drafts does. Three things follow.
- Siblings differ, since a chain adds a child only where no child carries its token.
- The share always fits: a tree of D nodes is at most D deep, so no chain needs more tokens than its D,
  and each chain leaves the tree within its D tokens, since it differs from all chains before.
- A chain that leaves the tree at node x took l tokens of chains before. The earliest chain that shares
  l tokens within its depth added x itself: if it had taken x over, a chain before it would share them.

Kernel: two launches. `_search` splits each history over programs. Each compares `max_n` shifted copies of
1024 tokens at a time and keeps the `width` best candidates that continue differently, a match's length and
index packed in one integer so that the larger is the better. That loses none of the row's: of a row's best
chains, each is among the best of the program that holds its best candidate. `_draft` reduces the programs'
candidates the same way and makes the tree, in one program per row.
Limits: max_context <= 2^24, max_n <= 127, k <= 63, max_width <= 8.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2, use_native, use_triton
from ..native.call import call
from ..table import Table
from .proposal import Node, Proposal, empty_proposal, of_nodes, room, room_of

LONG_MATCH = tl.constexpr(3)  # tokens; longer matches are not branched
INDEX_BITS = tl.constexpr(24)  # of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
BLOCK = 1024  # tokens per program and iteration
PROGRAMS = 512  # enough to fill a GPU


def propose(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """Draft up to `k` tokens for each of `rows` [B] int32, request rows or -1: chains if `max_width` is 1,
    else trees. `max_n` and `max_width` are upper bounds of theirs."""
    if use_triton(rows):
        return launch(table, rows, k, max_n, max_width)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n, max_width)


def naive(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    trees, match_len = [], []
    for s, wanted in zip(rows.tolist(), room(table, rows, k).tolist(), strict=True):
        text = table.tokens[s, : int(table.num_tokens[s])]
        starts, n = matches(text, int(table.min_n[s]), int(table.max_n[s]))
        width = 1 if n > LONG_MATCH.value else min(max(int(table.width[s]), 1), max_width)
        trees.append(build(different(text, starts, wanted, width), wanted, len(text)) if wanted else [])
        match_len.append(n if trees[-1] else 0)
    return of_nodes(trees, match_len, k, rows.device, tree=max_width > 1)


def matches(text: Tensor, min_n: int, max_n: int) -> tuple[Tensor, int]:
    """Find where suffixes of text [L] of min_n to max_n tokens occurred earlier. Return the indices of the
    tokens that followed them, longest and then latest first ([C] int64), and the length of the first match,
    0 if there is none."""
    L = len(text)
    suffix = text[max(L - max_n, 0) :].flip(0).tolist()  # latest token first
    after = torch.arange(1, max(L, 1), device=text.device)
    length, alive = torch.zeros_like(after), torch.ones_like(after, dtype=torch.bool)
    for i, token in enumerate(suffix):
        alive &= (after > i) & (text[after - 1 - i] == token)
        length += alive
    order = (length * L + after)[length >= min_n].sort(descending=True).values
    return order % max(L, 1), int(order[0]) // L if len(order) else 0


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


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """By `native/ngram.cpp`."""
    result = empty_proposal(rows, k, tree=max_width > 1)
    call("nanospec_ngram", *table, *result[:6], *result.drafts.shape, rows, max_width)
    return result


class Sizes(NamedTuple):
    """An upper bound of the number of continuations, and the next powers of 2: of it, of the scores of all
    programs, of the drafts."""

    MAX_WIDTH: tl.constexpr
    SLOTS: tl.constexpr
    FOUND: tl.constexpr
    NODES: tl.constexpr


class History(NamedTuple):
    """The text of a request row, its length, its room for drafts, its number of continuations and lengths of
    matches."""

    text: Any
    length: Any
    room: Any
    width: Any
    min_n: Any
    max_n: Any


@triton.jit
def _history(table, s, k, MAX_WIDTH: tl.constexpr):
    row = tl.maximum(s, 0)
    text = table.tokens + row.to(tl.int64) * table.max_context
    length = tl.load(table.num_tokens + row)
    width = tl.minimum(tl.maximum(tl.load(table.width + row), 1), MAX_WIDTH)
    min_n, max_n = tl.load(table.min_n + row), tl.load(table.max_n + row)
    return History(text, length, room_of(table, s, k), width, min_n, max_n)


@triton.jit
def _match_scores(history, p, MAX_N: tl.constexpr):
    """Return (match length, index) of each index p, packed; -1 where the length is not min_n .. max_n."""
    # matched: how many tokens before p equal the last tokens of the text.
    matched = tl.zeros(p.shape, tl.int32)
    alive = p < history.length  # a match that ends at `length` would be the suffix itself
    for i in tl.static_range(1, MAX_N + 1):
        alive &= i <= history.max_n
        token = tl.load(history.text + p - i, (p >= i) & (p < history.length), other=-1)
        alive &= token == tl.load(history.text + tl.maximum(history.length - i, 0))
        matched += alive.to(tl.int32)
    return tl.where((matched > 0) & (matched >= history.min_n), (matched << INDEX_BITS) | p, -1)


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
def _search(table, rows, found, k, MAX_N: tl.constexpr, MAX_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    history = _history(table, tl.load(rows + b), k, MAX_WIDTH)
    if history.room <= 0:
        return
    SLOTS: tl.constexpr = triton.next_power_of_2(MAX_WIDTH)
    slot, chosen = tl.arange(0, SLOTS), tl.full([SLOTS], -1, tl.int32)
    # The loop carries the indices: made from the loop variable, triton 3.7 spills 8 bytes on sm_100.
    p = part * BLOCK + tl.arange(0, BLOCK)
    for _ in range(part * BLOCK, history.length, parts * BLOCK):
        score = _match_scores(history, p, MAX_N)
        p += parts * BLOCK
        chosen = _different(history, history.width, score, chosen, SLOTS)
    tl.store(found + (b * parts + part) * SLOTS + slot, chosen)


@triton.jit(do_not_specialize=["k", "parts"])
def _draft(table, rows, found, proposal, k, parts, sizes):
    b, i, n = tl.program_id(0), tl.arange(0, sizes.FOUND), parts * sizes.SLOTS
    history = _history(table, tl.load(rows + b), k, sizes.MAX_WIDTH)
    score = tl.load(found + b * n + i, (i < n) & (history.room > 0), other=-1)
    match_len = tl.maximum(tl.max(score), 0) >> INDEX_BITS
    width = tl.where(match_len > LONG_MATCH, 1, history.width)
    none = tl.full([sizes.SLOTS], -1, tl.int32)
    chosen = _different(history, width, score, none, sizes.SLOTS)
    sources, parents, made = _build(history, chosen, sizes.SLOTS, sizes.NODES)
    j = tl.arange(0, sizes.NODES)
    tl.store(proposal.drafts + b * k + j, tl.load(history.text + sources, sources >= 0, other=0), j < k)
    tl.store(proposal.source + b * k + j, sources, j < k)
    if sizes.MAX_WIDTH > 1:
        tl.store(proposal.parents + b * k + j, parents, j < k)
    tl.store(proposal.num_drafts + b, made)
    tl.store(proposal.match_len + b, match_len)
    tl.store(proposal.drafter + b, 0)


@triton.jit
def _build(history, chosen, SLOTS: tl.constexpr, NODES: tl.constexpr):
    """`build` of the chosen chains: sources and parents of the nodes [NODES], and their number."""
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


def launch(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    B, slots = len(rows), next_power_of_2(max_width)
    proposal = empty_proposal(rows, k, tree=max_width > 1)
    if B:
        parts = min(-(-table.max_context // BLOCK), max(PROGRAMS // B, 1))  # programs that share a history
        found = rows.new_empty(B, parts, slots)
        powers = slots, next_power_of_2(parts * slots), next_power_of_2(k)
        sizes = Sizes(*map(tl.constexpr, (max_width, *powers)))
        _search[(B, parts)](table, rows, found, k, MAX_N=max_n, MAX_WIDTH=max_width, BLOCK=BLOCK, num_warps=8)
        warps = 1 if parts * slots <= 512 else 4
        _draft[(B,)](table, rows, found, proposal, k, parts, sizes, num_warps=warps)
    return proposal
