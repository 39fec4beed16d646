"""Guess the next tokens by looking the last ones up in the request's own history (prompt lookup).

Which match wins: the longest suffix of length min_n <= n <= max_n that occurs earlier; among equally
long ones the latest, because recent text predicts best. The occurrence may overlap the suffix itself,
and when copying runs into the end of the text it goes on copying from the match, as in LZ77
(Ziv & Lempel, 1977): a text of period p then drafts full length. The method is prompt lookup decoding
(Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

A row gets as many drafts as it has `room` for where a match was found, else none. Beyond the drafts, tokens
are 0 and sources -1; without drafts the length of the match is 0.

Trees: up to `Table.width` matches are used, best first, each with another next token, so that all
chains begin at the root. Each gets half of the drafts that are left (rounded up), the last one all of them:
a tree accepts at least as many tokens as a chain of half its drafts. A match longer than LONG_MATCH is
mostly right and stays alone: a branch would take drafts from its chain. A chain is a tree of width 1.

Kernel: one program per row. It compares `max_n` shifted copies of `BLOCK` tokens of the history at a time and
keeps the best match, its length and index packed in one integer so that the larger is the better; once for
each chain of a tree. Limits: max_context <= 2^24, max_n <= 127, k <= 63.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import MAX_DRAFTS, OWN
from ..launch import next_power_of_2, use_native, use_triton
from ..native import call
from ..table import Table
from .proposal import Proposal, empty_proposal, room, room_of

LONG_MATCH = tl.constexpr(3)  # tokens
INDEX_BITS = tl.constexpr(24)  # of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
DRAFTS = tl.constexpr(MAX_DRAFTS + 1)  # a power of 2
BLOCK = 4096  # tokens per iteration


def propose(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """Draft up to `k` tokens for each of `rows` [B] int32, request rows or -1: chains, or trees if
    `max_width` > 1. `max_n` and `max_width` are upper bounds of those in the table."""
    if use_triton(rows):
        return launch(table, rows, k, max_n, max_width)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n, max_width)


def naive(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    proposal = empty_proposal(rows, k, tree=max_width > 1)
    for part in (part for part in proposal if part is not None):
        part.zero_()
    proposal.source.fill_(OWN)
    for b, s in enumerate(rows.tolist()):
        text = table.tokens[s, : int(table.num_tokens[s])]
        starts, n = matches(text, int(table.min_n[s]), int(table.max_n[s]))
        wanted = int(room(table, rows[b : b + 1], k)) if n else 0
        width = 1 if n > LONG_MATCH.value else max(int(table.width[s]), 1)
        if wanted:
            source, parents = tree(text, starts, wanted, width)
            proposal.drafts[b, :wanted], proposal.source[b, :wanted] = text[source], source
            proposal.num_drafts[b], proposal.match_len[b] = wanted, n
            if proposal.parents is not None:
                proposal.parents[b, :wanted] = parents
    return proposal


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
    order = (length * L + after)[length >= min_n].sort(descending=True).values  # longest, then latest
    return order % max(L, 1), int(order[0]) // L if len(order) else 0


def tree(text: Tensor, starts: Tensor, wanted: int, width: int) -> tuple[Tensor, Tensor]:
    """Return [wanted] int64 each: the indices that drafts are copied from after matches at `starts`, and the
    place that each follows. Draft i is place i + 1, so a chain's are 0, 1, 2, ..."""
    place = torch.arange(wanted, device=text.device)
    source, parents, begin = place.clone(), place.clone(), 0
    while len(starts) and width and begin < wanted:
        source[begin:] = starts[0] + place[: wanted - begin] % (len(text) - starts[0])
        parents[begin] = 0
        begin += (wanted - begin + 1) // 2
        width, starts = width - 1, starts[text[starts] != text[starts[0]]]
    return source, parents


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """By `native/ngram.cpp`."""
    result = empty_proposal(rows, k, tree=max_width > 1)
    call("nanospec_ngram", *table, *result[:6], *result.drafts.shape, rows)
    return result


@triton.jit
def _best_match(text, length, min_n, max_n, taken, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the best match of min_n to max_n tokens whose next token is none of `taken`, as its length and
    index, packed; -1 if there is none."""
    p, best = tl.arange(0, BLOCK), tl.full([BLOCK], -1, tl.int32)
    for _ in range(0, length, BLOCK):
        # matched: how many tokens before p equal the last tokens of the text.
        matched = tl.zeros([BLOCK], tl.int32)
        alive = p < length  # a match that ends at `length` would be the suffix itself
        for i in tl.static_range(1, MAX_N + 1):
            token = tl.load(text + p - i, (p >= i) & (p < length) & (i <= max_n), other=-1)
            alive &= token == tl.load(text + tl.maximum(length - i, 0))
            matched += alive.to(tl.int32)
        fits = (matched > 0) & (matched >= min_n)
        if taken.shape[0] > 1:
            token = tl.load(text + p, fits, other=-1)
            fits &= tl.max((token[:, None] == taken[None, :]).to(tl.int32), 1) == 0
        best = tl.maximum(best, tl.where(fits, (matched << INDEX_BITS) | p, -1))
        p += BLOCK
    return tl.max(best)


@triton.jit(do_not_specialize=["k"])
def _propose(table, rows, proposal, k, MAX_N: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    b, j, slot = tl.program_id(0), tl.arange(0, DRAFTS), tl.arange(0, SLOTS)
    s = tl.load(rows + b)
    row, room = tl.maximum(s, 0), room_of(table, s, k)
    text, length = table.tokens + row.to(tl.int64) * table.max_context, tl.load(table.num_tokens + row)
    min_n, max_n = tl.load(table.min_n + row), tl.load(table.max_n + row)
    taken = tl.full([SLOTS], -1, tl.int32)  # the first token of each chain
    sources, parents, match_len, begin, chains = tl.full([DRAFTS], -1, tl.int32), j, 0, 0, 0
    width = tl.maximum(tl.load(table.width + row), 1)
    while (chains < width) & (begin < room):
        best = _best_match(text, length, min_n, max_n, taken, MAX_N, BLOCK)
        if best < 0:
            width = 0
        else:
            start, n = best & INDEX_MASK, best >> INDEX_BITS
            sources = tl.where(j >= begin, start + (j - begin) % (length - start), sources)
            parents = tl.where(j == begin, 0, parents)
            taken = tl.where(slot == chains, tl.load(text + start), taken)
            match_len, width = tl.maximum(match_len, n), tl.where(n > LONG_MATCH, 1, width)
            begin += (room - begin + 1) // 2
            chains += 1
    made = tl.where(chains > 0, room, 0)
    sources = tl.where(j < made, sources, -1)
    tl.store(proposal.drafts + b * k + j, tl.load(text + sources, sources >= 0, other=0), j < k)
    tl.store(proposal.source + b * k + j, sources, j < k)
    if SLOTS > 1:
        tl.store(proposal.parents + b * k + j, tl.where(j < made, parents, 0), j < k)
    tl.store(proposal.num_drafts + b, made)
    tl.store(proposal.match_len + b, match_len)
    tl.store(proposal.drafter + b, 0)


def launch(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    proposal = empty_proposal(rows, k, tree=max_width > 1)
    if len(rows):
        slots = next_power_of_2(max_width)
        _propose[(len(rows),)](table, rows, proposal, k, MAX_N=max_n, SLOTS=slots, BLOCK=BLOCK, num_warps=16)
    return proposal
