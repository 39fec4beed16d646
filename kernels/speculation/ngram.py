"""Propose drafts by n-gram lookup: copy the tokens that followed the last n tokens earlier in the text.

The method is prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

The match is the longest suffix of min_n to max_n tokens that also occurs earlier; among equally long ones,
the latest, because recent text predicts best. The occurrence may overlap the suffix. When copying reaches the
end of the text, it restarts at the token after the match (as LZ77 copies, Ziv & Lempel, 1977), so that even a
text with a short period fills all drafts.

A row with a match gets `draft_limits` drafts, a row without one gets none. Unused entries of the result hold
token 0 and source -1. Without drafts, the match length is 0.

Trees: up to `Table.tree_width` matches with different next tokens each start a branch at the root, best match
first. Each branch gets half of the remaining drafts (rounded up), except the last, which gets the rest. So a
tree accepts at least as many tokens as a chain with half its drafts. A match longer than LONG_MATCH is
usually right and gets all drafts: a second branch would only shorten it. A chain is a tree of width 1.

Kernel: one program per row. It compares `BLOCK` tokens of the text at `max_n` shifts at a time, and keeps the
best match as one integer (length, then index), so that the maximum is the best. A tree takes one search per
branch. Limits: max_context <= 2^24, max_n <= 127, k <= 63.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import FROM_TARGET, MAX_DRAFTS
from ..launch import next_power_of_2, use_native, use_triton
from ..native import call
from ..table import Table
from .proposal import Proposal, draft_limit, draft_limits, empty_proposal

LONG_MATCH = tl.constexpr(3)  # tokens
INDEX_BITS = tl.constexpr(24)  # low bits of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
DRAFTS = tl.constexpr(MAX_DRAFTS + 1)  # a power of 2
BLOCK = 4096  # tokens per iteration


def propose(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """Propose up to `k` drafts for each request row in `rows` [B] int32 (-1: inactive): chains, or trees if
    `max_width` > 1. `max_n` and `max_width` are upper bounds of the values in the table."""
    if use_triton(rows):
        return launch(table, rows, k, max_n, max_width)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, k, max_n, max_width)


def naive(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    proposal = empty_proposal(rows, k, tree=max_width > 1)
    for part in (part for part in proposal if part is not None):
        part.zero_()
    proposal.source.fill_(FROM_TARGET)
    for b, s in enumerate(rows.tolist()):
        text = table.tokens[s, : int(table.num_tokens[s])]
        starts, n = matches(text, int(table.min_n[s]), int(table.max_n[s]))
        num_drafts = int(draft_limits(table, rows[b : b + 1], k)) if n else 0
        width = 1 if n > LONG_MATCH.value else max(int(table.tree_width[s]), 1)
        if num_drafts:
            source, parents = tree(text, starts, num_drafts, width)
            proposal.drafts[b, :num_drafts], proposal.source[b, :num_drafts] = text[source], source
            proposal.num_drafts[b], proposal.match_len[b] = num_drafts, n
            if proposal.parents is not None:
                proposal.parents[b, :num_drafts] = parents
    return proposal


def matches(text: Tensor, min_n: int, max_n: int) -> tuple[Tensor, int]:
    """Find earlier occurrences of the suffixes of `text` [L] of min_n to max_n tokens. Return the indices of
    the tokens after them ([C] int64, longest and then latest first) and the longest length (0 if none)."""
    L = len(text)
    suffix = text[max(L - max_n, 0) :].flip(0).tolist()  # latest token first
    after = torch.arange(1, max(L, 1), device=text.device)
    length, alive = torch.zeros_like(after), torch.ones_like(after, dtype=torch.bool)
    for i, token in enumerate(suffix):
        alive &= (after > i) & (text[after - 1 - i] == token)
        length += alive
    order = (length * L + after)[length >= min_n].sort(descending=True).values  # longest, then latest
    return order % max(L, 1), int(order[0]) // L if len(order) else 0


def tree(text: Tensor, starts: Tensor, num_drafts: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the index that each draft is copied from, given the matches `starts`, and its parent node,
    [num_drafts] int64 each. Draft i is node i + 1, so the parents of a chain are 0, 1, 2, ..."""
    i = torch.arange(num_drafts, device=text.device)
    source, parents, begin = i.clone(), i.clone(), 0
    while len(starts) and width and begin < num_drafts:
        source[begin:] = starts[0] + i[: num_drafts - begin] % (len(text) - starts[0])
        parents[begin] = 0
        begin += (num_drafts - begin + 1) // 2
        width, starts = width - 1, starts[text[starts] != text[starts[0]]]
    return source, parents


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """Run `nanospec_ngram` of `native/ngram.cpp`."""
    result = empty_proposal(rows, k, tree=max_width > 1)
    call("nanospec_ngram", *table, *result[:6], *result.drafts.shape, rows)
    return result


@triton.jit
def _best_match(text, length, min_n, max_n, used, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the best match of min_n to max_n tokens, as its packed length and index, or -1 without a match.
    Matches that are followed by a token in `used` are skipped."""
    p, best = tl.arange(0, BLOCK), tl.full([BLOCK], -1, tl.int32)
    for _ in range(0, length, BLOCK):
        # Number of tokens before p that equal the last tokens of the text.
        matched = tl.zeros([BLOCK], tl.int32)
        alive = p < length  # a match that ends at `length` would be the suffix itself
        for i in tl.static_range(1, MAX_N + 1):
            token = tl.load(text + p - i, (p >= i) & (p < length) & (i <= max_n), other=-1)
            alive &= token == tl.load(text + tl.maximum(length - i, 0))
            matched += alive.to(tl.int32)
        fits = (matched > 0) & (matched >= min_n)
        if used.shape[0] > 1:
            token = tl.load(text + p, fits, other=-1)
            fits &= tl.max((token[:, None] == used[None, :]).to(tl.int32), 1) == 0
        best = tl.maximum(best, tl.where(fits, (matched << INDEX_BITS) | p, -1))
        p += BLOCK
    return tl.max(best)


@triton.jit(do_not_specialize=["k"])
def _propose(table, rows, proposal, k, MAX_N: tl.constexpr, MAX_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    b, j, branch = tl.program_id(0), tl.arange(0, DRAFTS), tl.arange(0, MAX_WIDTH)
    s = tl.load(rows + b)
    row, limit = tl.maximum(s, 0), draft_limit(table, s, k)
    text, length = table.tokens + row.to(tl.int64) * table.max_context, tl.load(table.num_tokens + row)
    min_n, max_n = tl.load(table.min_n + row), tl.load(table.max_n + row)
    used = tl.full([MAX_WIDTH], -1, tl.int32)  # the first token of each branch
    sources, parents, match_len, begin, branches = tl.full([DRAFTS], -1, tl.int32), j, 0, 0, 0
    width = tl.maximum(tl.load(table.tree_width + row), 1)
    while (branches < width) & (begin < limit):
        best = _best_match(text, length, min_n, max_n, used, MAX_N, BLOCK)
        if best < 0:
            width = 0
        else:
            start, n = best & INDEX_MASK, best >> INDEX_BITS
            sources = tl.where(j >= begin, start + (j - begin) % (length - start), sources)
            parents = tl.where(j == begin, 0, parents)
            used = tl.where(branch == branches, tl.load(text + start), used)
            match_len, width = tl.maximum(match_len, n), tl.where(n > LONG_MATCH, 1, width)
            begin += (limit - begin + 1) // 2
            branches += 1
    num_drafts = tl.where(branches > 0, limit, 0)
    sources = tl.where(j < num_drafts, sources, -1)
    tl.store(proposal.drafts + b * k + j, tl.load(text + sources, sources >= 0, other=0), j < k)
    tl.store(proposal.source + b * k + j, sources, j < k)
    if MAX_WIDTH > 1:
        tl.store(proposal.parents + b * k + j, tl.where(j < num_drafts, parents, 0), j < k)
    tl.store(proposal.num_drafts + b, num_drafts)
    tl.store(proposal.match_len + b, match_len)
    tl.store(proposal.drafter + b, 0)


def launch(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    proposal = empty_proposal(rows, k, tree=max_width > 1)
    if len(rows):
        grid, width = (len(rows),), next_power_of_2(max_width)
        _propose[grid](table, rows, proposal, k, MAX_N=max_n, MAX_WIDTH=width, BLOCK=BLOCK, num_warps=16)
    return proposal
