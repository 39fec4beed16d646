"""Guess the next tokens by looking the last ones up in the request's own history (prompt lookup).

    tokens      [S, max_len] int32   prompt and output of every request row
    num_tokens  [S] int32            how many of them are committed
    rows        [B] int32            which request each batch row is, -1 for padding
    min_n, max_n  [S] int32          shortest and longest suffix to look up
    limit       [S] int32            most drafts this request wants, 0: none
    max_len     [S] int32            the request's final length; drafts that could not be used by
                                     then (all but max_len - num_tokens - 1) are not made

    drafts      [B, K] int32         the guesses, 0 beyond their number
    num_drafts  [B] int32            as many as the limits and K allow where a match was found, else 0
    source      [B] int32            index of the token copied first (-1: no match)
    match_len   [B] int32            length of the match, 0 or min_n .. max_n

Which match wins: the longest suffix of length min_n <= n <= max_n that occurs earlier; among equally
long ones the latest, because recent text predicts best. The occurrence may overlap the suffix itself,
and when copying runs into the end of the text it goes on copying from the draft, as in LZ77
(Ziv & Lempel, 1977): a text of period p then drafts full length.

The method is prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Proposal(NamedTuple):
    """See the module docstring."""

    drafts: Tensor
    num_drafts: Tensor
    source: Tensor
    match_len: Tensor


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
    return naive(tokens, num_tokens, rows, min_n, max_n, limit, max_len, k, max_n_bound)


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
        if s >= 0:
            text = tokens[s, : lengths[s]]
            source, n = find(text, shortest[s], min(longest[s], max_n_bound))
            wanted = limits[s] if n else 0
        # Copy from the source on; at the end of the text go back to the source.
        copied = tokens[s, source : min(source + wanted, lengths[s])].tolist() if wanted else [0]
        drafts.append([copied[i % len(copied)] if i < wanted else 0 for i in range(k)])
        num_drafts.append(wanted)
        sources.append(source)
        match_len.append(n)
    columns = (drafts, num_drafts, sources, match_len)
    return Proposal(*(torch.tensor(c, dtype=torch.int32, device=tokens.device) for c in columns))


def find(text: Tensor, min_n: int, max_n: int) -> tuple[int, int]:
    """Where the longest suffix of text [L] that occurs earlier occurred last.

    Returns (index of the token that followed it, its length), or (-1, 0).
    """
    suffix = text[-max_n:].flip(0).tolist()  # latest token first
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
