"""Guess the next tokens by looking the last ones up in the request's own history (prompt lookup).

Which match wins: the longest suffix of length min_n <= n <= max_n that occurs earlier; among equally
long ones the latest, because recent text predicts best. The occurrence may overlap the suffix itself,
and when copying runs into the end of the text it goes on copying from the match, as in LZ77
(Ziv & Lempel, 1977): a text of period p then drafts full length. The method is prompt lookup decoding
(Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

A row gets as many drafts as it has `room` for where a match was found, else none. Beyond the drafts, tokens
are 0 and sources -1; without drafts the length of the match is 0. Trees of drafts: `ngram_tree.py`.

Kernel: one program per row. It compares `max_n` shifted copies of `BLOCK` tokens of the history at a time and
keeps the best match, its length and index packed in one integer so that the larger is the better.
Limits: max_context <= 2^24, max_n <= 127, k <= 63.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import MAX_DRAFTS
from ..launch import use_native, use_triton
from ..native.build import call
from ..table import Table
from .proposal import Proposal, empty_proposal, room, room_of

INDEX_BITS = tl.constexpr(24)  # of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
DRAFTS = tl.constexpr(MAX_DRAFTS + 1)  # a power of 2
BLOCK = 4096  # tokens per iteration


def propose(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    """Draft a chain of up to `k` tokens for each of `rows` [B] int32, request rows or -1. `max_n` is an upper
    bound of theirs."""
    if use_triton(rows):
        return launch(table, rows, k, max_n)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n)


def naive(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    proposal = no_drafts(rows, k)
    for b, s in enumerate(rows.tolist()):
        text, starts, n, wanted = search(table, s, k)
        if wanted:
            put(proposal, b, text, continuation(starts[0], wanted, len(text)), n)
    return proposal


def search(table: Table, s: int, k: int) -> tuple[Tensor, Tensor, int, int]:
    """Return the text of request row s, its `matches`, and how many drafts it gets."""
    text = table.tokens[s, : int(table.num_tokens[s])]
    starts, n = matches(text, int(table.min_n[s]), int(table.max_n[s]))
    return text, starts, n, int(room(table, torch.tensor([s], device=text.device), k)) if n else 0


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


def continuation(start: Tensor, wanted: int, length: int) -> Tensor:
    """Return the indices [..., wanted] that drafts are copied from after matches at `start` [...], in a text
    of the given length."""
    return start[..., None] + torch.arange(wanted, device=start.device) % (length - start[..., None])


def no_drafts(rows: Tensor, k: int, tree: bool = False) -> Proposal:
    drafts, counts = rows.new_zeros(len(rows), k), torch.zeros_like(rows)
    parents = drafts.clone() if tree else None
    return Proposal(drafts, counts, drafts - 1, counts.clone(), counts.clone(), parents)


def put(
    proposal: Proposal, b: int, text: Tensor, source: Tensor, match_len: int, parents: Tensor | None = None
) -> None:
    """Set the drafts of batch row b, copied from the indices `source` of its text."""
    n = len(source)
    proposal.source[b, :n], proposal.drafts[b, :n] = source, text[source]
    proposal.num_drafts[b], proposal.match_len[b] = n, match_len
    if proposal.parents is not None:
        proposal.parents[b, :n] = parents


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """By `native/ngram.cpp`, which makes trees too."""
    result = empty_proposal(rows, k, tree=max_width > 1)
    call("nanospec_ngram", *table, *result[:6], *result.drafts.shape, rows, max_width)
    return result


class History(NamedTuple):
    """The text of a request row, its length, its room for drafts and its lengths of matches."""

    text: Any
    length: Any
    room: Any
    min_n: Any
    max_n: Any


@triton.jit
def history_of(table, s, k):
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


@triton.jit
def store_drafts(proposal, history, sources, made, match_len, k):
    """Store this program's row but for parents: `made` drafts, copied from `sources` [DRAFTS]."""
    b, j = tl.program_id(0), tl.arange(0, DRAFTS)
    tl.store(proposal.drafts + b * k + j, tl.load(history.text + sources, sources >= 0, other=0), j < k)
    tl.store(proposal.source + b * k + j, sources, j < k)
    tl.store(proposal.num_drafts + b, made)
    tl.store(proposal.match_len + b, match_len)
    tl.store(proposal.drafter + b, 0)


@triton.jit(do_not_specialize=["k"])
def _propose(table, rows, proposal, k, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    history = history_of(table, tl.load(rows + tl.program_id(0)), k)
    length = tl.where(history.room > 0, history.length, 0)
    p, score = tl.arange(0, BLOCK), tl.full([BLOCK], -1, tl.int32)
    for _ in range(0, length, BLOCK):
        score = tl.maximum(score, match_scores(history, p, MAX_N))
        p += BLOCK
    best, j = tl.max(score), tl.arange(0, DRAFTS)
    made = tl.where(best >= 0, history.room, 0)
    start = tl.maximum(best, 0) & INDEX_MASK
    sources = tl.where(j < made, start + j % tl.maximum(length - start, 1), -1)
    store_drafts(proposal, history, sources, made, tl.maximum(best, 0) >> INDEX_BITS, k)


def launch(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    proposal = empty_proposal(rows, k)
    if len(rows):
        _propose[(len(rows),)](table, rows, proposal, k, MAX_N=max_n, BLOCK=BLOCK, num_warps=16)
    return proposal
