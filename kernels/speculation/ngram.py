"""Guess the next tokens by looking the last ones up in the request's own history (prompt lookup).

A row gets as many drafts as its `limit`, K and `max_len` allow where a match was found, else none: drafts
that could not be used by max_len (all but max_len - num_tokens - 1) are not made. Where nothing is allowed,
nothing is looked up, and the length of the match is 0. Beyond the drafts, tokens are 0 and sources -1.

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

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..native.call import call, proposal_words
from ..table import Table
from .proposal import Proposal

INDEX_BITS = tl.constexpr(24)  # of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
MAX_N = 127
BLOCK = 1024  # tokens per program and iteration
PROGRAMS = 512  # enough to fill a GPU


def propose(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    """Draft up to `k` tokens for each of `rows` [B] int32, request rows or -1. `max_n` is an upper bound of
    theirs."""
    if use_triton(rows):
        return launch(table, rows, k, max_n)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n)


def naive(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    """On a CPU, where a search takes some 20 us."""
    limits, lengths = allowed(table, k), table.num_tokens.tolist()
    shortest, longest = table.min_n.tolist(), table.max_n.clamp(max=max_n).tolist()
    drafts, num_drafts, sources, match_len = [], [], [], []
    for s in rows.tolist():
        source, n, wanted = -1, 0, 0
        if s >= 0 and limits[s] > 0:
            source, n = find(table.tokens[s, : lengths[s]], shortest[s], longest[s])
            wanted = limits[s] if n else 0
        # Copy from the source on; at the end of the text go back to the source.
        copied = table.tokens[s, source : min(source + wanted, lengths[s])].tolist() if wanted else [0]
        drafts.append([copied[i % len(copied)] if i < wanted else 0 for i in range(k)])
        num_drafts.append(wanted)
        sources.append([source + i % len(copied) if i < wanted else -1 for i in range(k)])
        match_len.append(n)
    columns = (drafts, num_drafts, sources, match_len, [0] * len(drafts))
    return Proposal(*(torch.tensor(c, dtype=torch.int32, device=rows.device) for c in columns))


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int | None = None) -> Proposal:
    """By `native/speculation.cpp`. With `max_width` what `ngram_tree.naive` makes."""
    B, new = rows.shape[0], rows.new_empty
    parents = None if max_width is None else new(B, k)
    result = Proposal(new(B, k), new(B), new(B, k), new(B), new(B), parents)
    call("nanospec_ngram", *table, *proposal_words(result), rows, max_n, max_width)
    return result


def allowed(table: Table, k: int) -> list[int]:
    """How many of `k` drafts each request row can use."""
    return torch.minimum(table.limit, table.max_len - table.num_tokens - 1).clamp(0, k).tolist()


def find(text: Tensor, min_n: int, max_n: int) -> tuple[int, int]:
    """Where the longest suffix of text [L] that occurs earlier occurred last.

    Returns (index of the token that followed it, its length), or (-1, 0).
    """
    suffix = text[max(len(text) - max_n, 0) :].flip(0).tolist()  # latest token first
    if not suffix:
        return -1, 0
    # Indices that follow an occurrence of the last token; then keep those that match one token more.
    after = (text[:-1] == suffix[0]).nonzero().squeeze(1) + 1
    source, n = -1, 0
    for i, token in enumerate(suffix):
        if i > 0:
            after = after[after > i]
            after = after[text[after - 1 - i] == token]
        if not len(after):
            break
        if i + 1 >= min_n:
            source, n = int(after[-1]), i + 1
    return source, n


@triton.jit
def wanted_drafts(table, s, k):
    """The history's length and how many drafts request row s can use, 0 for padding."""
    row = tl.maximum(s, 0)
    length = tl.load(table.num_tokens + row)
    wanted = tl.minimum(tl.load(table.limit + row), tl.load(table.max_len + row) - length - 1)
    return length, tl.where(s < 0, 0, tl.minimum(wanted, k))


@triton.jit
def match_scores(text, length, p, shortest, longest, MAX_N: tl.constexpr):
    """(match length, index) of each index p, packed; -1 where the length is not shortest .. longest."""
    # matched: how many tokens before p equal the last tokens of the text.
    matched = tl.zeros(p.shape, tl.int32)
    alive = p < length  # a match that ends at `length` would be the suffix itself
    for i in tl.static_range(1, MAX_N + 1):
        alive &= i <= longest
        alive &= tl.load(text + p - i, (p >= i) & (p < length), other=-1) == tl.load(
            text + tl.maximum(length - i, 0)
        )
        matched += alive.to(tl.int32)
    return tl.where((matched > 0) & (matched >= shortest), (matched << INDEX_BITS) | p, -1)


@triton.jit(do_not_specialize=["k"])
def _search(table, rows, best, k, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    s = tl.load(rows + b)
    length, wanted = wanted_drafts(table, s, k)
    if wanted <= 0:
        return
    text = table.tokens + s.to(tl.int64) * table.max_context
    shortest, longest = tl.load(table.min_n + s), tl.load(table.max_n + s)
    score = tl.full([BLOCK], -1, tl.int32)
    for first in range(part * BLOCK, length, parts * BLOCK):
        p = first + tl.arange(0, BLOCK)
        score = tl.maximum(score, match_scores(text, length, p, shortest, longest, MAX_N))
    tl.store(best + b * parts + part, tl.max(score))


@triton.jit(do_not_specialize=["k", "parts"])
def _copy(table, rows, best, proposal, k, parts, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    s = tl.load(rows + b)
    length, wanted = wanted_drafts(table, s, k)
    part = tl.arange(0, PARTS)
    score = tl.max(tl.load(best + b * parts + part, (part < parts) & (wanted > 0), other=-1))
    wanted = tl.where(score >= 0, wanted, 0)
    first = score & INDEX_MASK
    # Copy from the match on; at the end of the text go back to it.
    j = tl.arange(0, WIDTH)
    index = first + j % tl.maximum(length - first, 1)
    text = table.tokens + tl.maximum(s, 0).to(tl.int64) * table.max_context
    tl.store(proposal.drafts + b * k + j, tl.load(text + index, j < wanted, other=0), j < k)
    tl.store(proposal.source + b * k + j, tl.where(j < wanted, index, -1), j < k)
    tl.store(proposal.num_drafts + b, tl.maximum(wanted, 0))
    tl.store(proposal.match_len + b, tl.where(score >= 0, score >> INDEX_BITS, 0))
    tl.store(proposal.drafter + b, 0)


def splits(table: Table, B: int, max_n: int) -> int:
    """How many programs share each of B histories. Refuses what the kernels would read wrongly."""
    if table.max_context > INDEX_MASK.value + 1 or not 1 <= max_n <= MAX_N:
        raise ValueError(
            f"n-gram lookup reaches {INDEX_MASK.value + 1} tokens and n from 1 to {MAX_N}, "
            f"not {table.max_context} tokens and n up to {max_n}."
        )
    return min(-(-table.max_context // BLOCK), max(PROGRAMS // max(B, 1), 1))


def empty_proposal(rows: Tensor, k: int, tree: bool = False) -> Proposal:
    """Memory for a proposal."""
    B = len(rows)
    shapes = [(B, k), (B,), (B, k), (B,), (B,)] + [(B, k)] * tree
    return Proposal(*map(rows.new_empty, shapes))


def launch(table: Table, rows: Tensor, k: int, max_n: int) -> Proposal:
    B = len(rows)
    parts, proposal = splits(table, B, max_n), empty_proposal(rows, k)
    if B:
        best = rows.new_empty(B, parts)
        _search[(B, parts)](table, rows, best, k, MAX_N=max_n, BLOCK=BLOCK, num_warps=4)
        _copy[(B,)](
            table, rows, best, proposal, k, parts,
            PARTS=next_power_of_2(parts), WIDTH=next_power_of_2(k), num_warps=1,
        )  # fmt: skip
    return proposal
