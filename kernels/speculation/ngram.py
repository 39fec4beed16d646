"""Guess the next tokens by looking the last ones up in the request's own history (prompt lookup).

    tokens      [S, max_len] int32   prompt and output of every request row
    num_tokens  [S] int32            how many of them are committed
    rows        [B] int32            which request each batch row is, -1 for padding
    min_n, max_n  [S] int32          shortest and longest suffix to look up
    limit       [S] int32            most drafts this request wants, 0: none
    max_len     [S] int32            the request's final length; drafts that could not be used by
                                     then (all but max_len - num_tokens - 1) are not made

    drafts      [B, K] int32         the guesses, 0 beyond their number
    num_drafts  [B] int32            as many as the limits and K allow where a match was found, else 0;
                                     where they allow none, nothing is looked up
    source      [B, K] int32         index in the history that each draft was copied from, -1 beyond
    match_len   [B] int32            length of the match, 0 or min_n .. max_n
    drafter     [B] int32            NGRAM, always; there are neither parents nor logits

Which match wins: the longest suffix of length min_n <= n <= max_n that occurs earlier; among equally
long ones the latest, because recent text predicts best. The occurrence may overlap the suffix itself,
and when copying runs into the end of the text it goes on copying from the draft, as in LZ77
(Ziv & Lempel, 1977): a text of period p then drafts full length.

The method is prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

Kernel: two launches. `_search` splits each history over programs, which compare max_n_bound shifted
copies of 1024 tokens at a time and leave the best of (match length, index), packed in one integer so
that the larger is the better. `_copy` takes the best of all and writes the drafts. The work is that of
the history's own length: 64 rows of 4096 tokens are 1 MB to read, under 0.5 us at the rate of an H200,
in 256 programs of one iteration each, so the time is that of two launches, about 5 us inside a graph.
Limits: max_len <= 2^24, max_n_bound <= 127.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import use_triton
from ..launch import next_power_of_2
from .proposal import NGRAM, Proposal

INDEX_BITS = tl.constexpr(24)  # of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
MAX_N = 127
BLOCK = 1024  # tokens per program and iteration
PROGRAMS = 512  # enough to fill a GPU


def propose(
    tokens: Tensor,
    num_tokens: Tensor,
    rows: Tensor,
    min_n: Tensor,
    max_n: Tensor,
    limit: Tensor,
    max_len: Tensor,
    k: int,
    max_n_bound: int,
) -> Proposal:
    """Draft up to `k` tokens for each row. `max_n_bound` is an upper bound of `max_n`."""
    implementation = launch if use_triton(tokens) else naive
    return implementation(tokens, num_tokens, rows, min_n, max_n, limit, max_len, k, max_n_bound)


def naive(
    tokens: Tensor,
    num_tokens: Tensor,
    rows: Tensor,
    min_n: Tensor,
    max_n: Tensor,
    limit: Tensor,
    max_len: Tensor,
    k: int,
    max_n_bound: int,
) -> Proposal:
    """The specification in plain PyTorch; also the CPU path, where a search takes some 20 us."""
    limits = torch.minimum(limit, max_len - num_tokens - 1).clamp(0, k).tolist()
    lengths, shortest, longest = num_tokens.tolist(), min_n.tolist(), max_n.tolist()
    drafts, num_drafts, sources, match_len = [], [], [], []
    for s in rows.tolist():
        source, n, wanted = -1, 0, 0
        if s >= 0 and limits[s] > 0:
            text = tokens[s, : lengths[s]]
            source, n = find(text, shortest[s], min(longest[s], max_n_bound))
            wanted = limits[s] if n else 0
        # Copy from the source on; at the end of the text go back to the source.
        copied = tokens[s, source : min(source + wanted, lengths[s])].tolist() if wanted else [0]
        drafts.append([copied[i % len(copied)] if i < wanted else 0 for i in range(k)])
        num_drafts.append(wanted)
        sources.append([source + i % len(copied) if i < wanted else -1 for i in range(k)])
        match_len.append(n)
    columns = (drafts, num_drafts, sources, match_len, [NGRAM] * len(drafts))
    return Proposal(*(torch.tensor(c, dtype=torch.int32, device=tokens.device) for c in columns))


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
def wanted_drafts(num_tokens, limit, max_len, s, k):
    """The history's length and how many drafts request row s can use, 0 for padding."""
    row = tl.maximum(s, 0)
    length = tl.load(num_tokens + row)
    wanted = tl.minimum(tl.load(limit + row), tl.load(max_len + row) - length - 1)
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
def _search(
    tokens, stride, num_tokens, rows, min_n, max_n, limit, max_len, best, k,
    MAX_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    s = tl.load(rows + b)
    length, wanted = wanted_drafts(num_tokens, limit, max_len, s, k)
    if wanted <= 0:
        return
    text = tokens + s.to(tl.int64) * stride
    shortest, longest = tl.load(min_n + s), tl.load(max_n + s)
    score = tl.full([BLOCK], -1, tl.int32)
    for first in range(part * BLOCK, length, parts * BLOCK):
        p = first + tl.arange(0, BLOCK)
        score = tl.maximum(score, match_scores(text, length, p, shortest, longest, MAX_N))
    tl.store(best + b * parts + part, tl.max(score))


@triton.jit(do_not_specialize=["k", "parts"])
def _copy(
    tokens, stride, num_tokens, rows, limit, max_len, best, drafts, num_drafts, source, match_len,
    drafter, k, parts, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    s = tl.load(rows + b)
    length, wanted = wanted_drafts(num_tokens, limit, max_len, s, k)
    part = tl.arange(0, PARTS)
    score = tl.max(tl.load(best + b * parts + part, (part < parts) & (wanted > 0), other=-1))
    wanted = tl.where(score >= 0, wanted, 0)
    first = score & INDEX_MASK
    # Copy from the match on; at the end of the text go back to it.
    j = tl.arange(0, WIDTH)
    index = first + j % tl.maximum(length - first, 1)
    text = tokens + tl.maximum(s, 0).to(tl.int64) * stride
    tl.store(drafts + b * k + j, tl.load(text + index, j < wanted, other=0), j < k)
    tl.store(source + b * k + j, tl.where(j < wanted, index, -1), j < k)
    tl.store(num_drafts + b, tl.maximum(wanted, 0))
    tl.store(match_len + b, tl.where(score >= 0, score >> INDEX_BITS, 0))
    tl.store(drafter + b, 0)  # NGRAM


def check(tokens: Tensor, max_n_bound: int) -> None:
    """Refuse what the kernels would read wrongly."""
    if tokens.shape[1] > INDEX_MASK.value + 1 or not 1 <= max_n_bound <= MAX_N:
        raise ValueError(
            f"n-gram lookup reaches {INDEX_MASK.value + 1} tokens and n from 1 to {MAX_N}, "
            f"not {tokens.shape[1]} tokens and n up to {max_n_bound}."
        )
    if tokens.stride(1) != 1:
        raise ValueError("Each request's tokens must be contiguous.")


def launch(
    tokens: Tensor,
    num_tokens: Tensor,
    rows: Tensor,
    min_n: Tensor,
    max_n: Tensor,
    limit: Tensor,
    max_len: Tensor,
    k: int,
    max_n_bound: int,
) -> Proposal:
    check(tokens, max_n_bound)
    capacity, B = tokens.shape[1], rows.shape[0]
    drafts = torch.empty(B, k, dtype=torch.int32, device=tokens.device)
    source = torch.empty_like(drafts)
    num_drafts, match_len, drafter = torch.empty(3, B, dtype=torch.int32, device=tokens.device)
    if B:
        parts = min(-(-capacity // BLOCK), max(PROGRAMS // B, 1))
        best = torch.empty(B, parts, dtype=torch.int32, device=tokens.device)
        _search[(B, parts)](
            tokens, tokens.stride(0), num_tokens, rows, min_n, max_n, limit, max_len, best, k,
            MAX_N=max_n_bound, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        _copy[(B,)](
            tokens, tokens.stride(0), num_tokens, rows, limit, max_len, best, drafts, num_drafts,
            source, match_len, drafter, k, parts,
            PARTS=next_power_of_2(parts), WIDTH=next_power_of_2(k), num_warps=1,
        )  # fmt: skip
    return Proposal(drafts, num_drafts, source, match_len, drafter)
