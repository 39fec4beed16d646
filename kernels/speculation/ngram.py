"""Guess the next tokens by looking the last ones up in the request's own history (prompt lookup).

A row gets as many drafts as it has `room` for where a match was found, else none. Beyond the drafts, tokens
are 0 and sources -1; without drafts the length of the match is 0.

Which match wins: the longest suffix of length min_n <= n <= max_n that occurs earlier; among equally
long ones the latest, because recent text predicts best. The occurrence may overlap the suffix itself,
and when copying runs into the end of the text it goes on copying from the draft, as in LZ77
(Ziv & Lempel, 1977): a text of period p then drafts full length.

The method is prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

Kernel: two launches. `_search` splits each history over programs, which compare `max_n` shifted
copies of 1024 tokens at a time and leave the best of (match length, index), packed in one integer so
that the larger is the better. `_copy` takes the best of all and writes the drafts. The work is that of
the history's own length: 64 rows of 4096 tokens are 1 MB to read.
Limits: max_context <= 2^24, max_n <= 127.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..native.call import call
from ..table import Table
from .proposal import Node, Proposal, empty_proposal, of_nodes, room, room_of

INDEX_BITS = tl.constexpr(24)  # of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
BLOCK = 1024  # tokens per program and iteration
PROGRAMS = 512  # enough to fill a GPU
PARTS = tl.constexpr(512)  # of a history, at most


def propose(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    """Draft up to `k` tokens for each of `rows` [B] int32, request rows or -1. `max_n` is an upper bound of
    theirs."""
    if use_triton(rows):
        return launch(table, rows, k, max_n)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n)


def naive(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    chains, match_len = [], []
    for s, wanted in zip(rows.tolist(), room(table, rows, k).tolist(), strict=True):
        text = table.tokens[s, : int(table.num_tokens[s])]
        starts, n = matches(text, int(table.min_n[s]), min(int(table.max_n[s]), max_n))
        # Copy from the match on; at the end of the text go back to it.
        sources = [int(starts[0]) + i % (len(text) - int(starts[0])) for i in range(wanted)] if n else []
        chains.append([Node(int(text[source]), source, i) for i, source in enumerate(sources)])
        match_len.append(n if wanted else 0)
    return of_nodes(chains, match_len, k, rows.device, tree=False)


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


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int | None = None) -> Proposal:
    """By `native/ngram.cpp`. With `max_width` what `ngram_tree.naive` makes."""
    result = empty_proposal(rows, k, tree=max_width is not None)
    call("nanospec_ngram", *table, *result[:6], *result.drafts.shape, rows, max_n, max_width)
    return result


class History(NamedTuple):
    """The text of a request row, its length, its room for drafts, and the lengths of matches."""

    text: Any
    length: Any
    room: Any
    min_n: Any
    max_n: Any


@triton.jit
def load_history(table, s, k):
    row = tl.maximum(s, 0)
    text = table.tokens + row.to(tl.int64) * table.max_context
    min_n, max_n = tl.load(table.min_n + row), tl.load(table.max_n + row)
    return History(text, tl.load(table.num_tokens + row), room_of(table, s, k), min_n, max_n)


@triton.jit
def match_scores(history, p, MAX_N: tl.constexpr):
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


@triton.jit(do_not_specialize=["k"])
def _search(table, rows, best, k, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    history = load_history(table, tl.load(rows + b), k)
    if history.room <= 0:
        return
    score = tl.full([BLOCK], -1, tl.int32)
    for first in range(part * BLOCK, history.length, parts * BLOCK):
        score = tl.maximum(score, match_scores(history, first + tl.arange(0, BLOCK), MAX_N))
    tl.store(best + b * parts + part, tl.max(score))


@triton.jit(do_not_specialize=["k", "parts"])
def _copy(table, rows, best, proposal, k, parts, WIDTH: tl.constexpr):
    b, part, j = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, WIDTH)
    history = load_history(table, tl.load(rows + b), k)
    score = tl.max(tl.load(best + b * parts + part, (part < parts) & (history.room > 0), other=-1))
    wanted = tl.where(score >= 0, history.room, 0)
    first = score & INDEX_MASK
    # Copy from the match on; at the end of the text go back to it.
    index = first + j % tl.maximum(history.length - first, 1)
    tl.store(proposal.drafts + b * k + j, tl.load(history.text + index, j < wanted, other=0), j < k)
    tl.store(proposal.source + b * k + j, tl.where(j < wanted, index, -1), j < k)
    tl.store(proposal.num_drafts + b, wanted)
    tl.store(proposal.match_len + b, tl.where(score >= 0, score >> INDEX_BITS, 0))
    tl.store(proposal.drafter + b, 0)


def splits(table: Table, B: int) -> int:
    """Return how many programs share each of B histories."""
    return min(-(-table.max_context // BLOCK), max(PROGRAMS // max(B, 1), 1))


def launch(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    B = len(rows)
    parts, proposal = splits(table, B), empty_proposal(rows, k)
    if B:
        best = rows.new_empty(B, parts)
        _search[(B, parts)](table, rows, best, k, MAX_N=max_n, BLOCK=BLOCK, num_warps=4)
        _copy[(B,)](table, rows, best, proposal, k, parts, WIDTH=next_power_of_2(k), num_warps=1)
    return proposal
