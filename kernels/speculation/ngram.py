"""Propose drafts by n-gram lookup: copy the tokens that followed the last n tokens earlier in the text.

The method is prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

Two texts are searched: the row's own text (prompt and output) and its reference, which holds texts that the
output may repeat, separated by -1. The match is the longest suffix of min_n to max_n tokens that occurs
earlier in the own text or anywhere in the reference. Among equally long ones, those in the reference come
first, except for those of up to LONG_MATCH tokens: these are often wrong in a reference that the output does
not repeat, and would make it slower than none. In the own text, the latest is used, because recent text
predicts best; in the reference, the nearest to the index aligned with the next token
(`Table.reference_start`), as the latest takes 1 to 4 % more steps on code edits. A reference with a negative
start precedes the own text, whose matches then come first: with the texts of earlier requests, this saves 3
to 4 % of the steps.

The occurrence may overlap the suffix. When copying reaches the end of the own text, it restarts at the token
after the match (as LZ77 copies, Ziv & Lempel, 1977), so that even a text with a short period fills all
drafts. Copying from the reference ends at -1.

A row with a match gets `draft_limits` drafts, or fewer from the reference; a row without one gets none.
Unused entries of the result hold token 0 and source -1. Without drafts, the match length is 0.

Trees: up to `Table.tree_width` matches with different next tokens each start a branch at the root, best match
first. Each branch gets half of the remaining drafts (rounded up), except the last, which gets the rest. So a
tree accepts at least as many tokens as a chain with half its drafts. A match longer than LONG_MATCH is
usually right and gets all drafts: a second branch would only shorten it. A chain is a tree of width 1.

Kernel: one program per row. It compares `BLOCK` tokens of a text at `max_n` shifts at a time, and keeps the
best match as one integer (length, then distance), so that the maximum is the best. A tree searches both texts
once per branch. Limits: max_context <= 2^23, max_n <= 63, k <= 63.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import FROM_REFERENCE, FROM_TARGET, MAX_DRAFTS
from ..launch import next_power_of_2, use_native, use_triton
from ..native import call
from ..table import Table
from .proposal import Proposal, draft_limit, draft_limits, empty_proposal

LONG_MATCH = tl.constexpr(3)  # tokens
RANK_BITS = tl.constexpr(25)  # low bits of a packed (match length, rank by distance)
RANK_MASK = tl.constexpr((1 << 25) - 1)
_FROM_REFERENCE = tl.constexpr(FROM_REFERENCE)
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
        text, reference = table.tokens[s, : table.num_tokens[s]], table.reference[s, : table.num_reference[s]]
        lengths = int(table.min_n[s]), int(table.max_n[s])
        starts, n = matches(text, *lengths, reference, int(table.reference_start[s]))
        limit = int(draft_limits(table, rows[b : b + 1], k)) if n else 0
        width = 1 if n > LONG_MATCH.value else max(int(table.tree_width[s]), 1)
        if limit:
            drafts, source, parents = tree(text, reference, starts, limit, width)
            proposal.num_drafts[b], proposal.match_len[b] = len(drafts), n
            proposal.drafts[b, : len(drafts)], proposal.source[b, : len(drafts)] = drafts, source
            if proposal.parents is not None:
                proposal.parents[b, : len(drafts)] = parents
    return proposal


def matches(
    text: Tensor, min_n: int, max_n: int, reference: Tensor | None = None, reference_start: int = 0
) -> tuple[Tensor, int]:
    """Find occurrences of the suffixes of `text` [L] of min_n to max_n tokens. Return the indices of the
    tokens after them in text + reference ([C] int64, best first) and the longest length (0 if none)."""
    reference = text[:0] if reference is None else reference
    L, device = len(text), text.device
    here, there = torch.arange(L, device=device), torch.arange(len(reference), device=device)
    length = torch.cat((_match_lengths(text, text, max_n), _match_lengths(reference, text, max_n)))
    ahead = torch.cat((here - L, there - (L - reference_start)))
    found = ((length >= max(min_n, 1)) & (torch.cat((text, reference)) >= 0)).nonzero()[:, 0]
    own_first = (length[found] <= LONG_MATCH.value) | (reference_start < 0)
    columns = -length[found], (found < L) != own_first, ahead[found].abs(), ahead[found], found
    order = sorted(zip(*(column.tolist() for column in columns), strict=True))
    return torch.tensor([p for *_, p in order], device=device), -order[0][0] if order else 0


def _match_lengths(source: Tensor, text: Tensor, max_n: int) -> Tensor:
    """Return for each index of `source` how many tokens before it, up to max_n, equal the end of `text`."""
    after = torch.arange(len(source), device=source.device)
    length, alive = torch.zeros_like(after), torch.ones_like(after, dtype=torch.bool)
    for i, token in enumerate(text[max(len(text) - max_n, 0) :].flip(0).tolist()):  # latest token first
        alive &= (after > i) & (source.roll(i + 1) == token)
        length += alive
    return length


def tree(
    text: Tensor, reference: Tensor, starts: Tensor, limit: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return up to `limit` drafts copied from the matches `starts`, the source of each, and its parent node.
    Draft i is node i + 1, so the parents of a chain are 0, 1, 2, ..."""
    L, whole = len(text), torch.cat((text, reference, torch.full_like(text[:1], -1)))
    i = torch.arange(limit, device=text.device)
    index, parents, begin, end = i.clone(), i.clone(), 0, 0
    while len(starts) and width and begin < limit:
        start, rest = int(starts[0]), i[: limit - begin]
        at = start + (rest % (L - start) if start < L else rest)
        index[begin:], parents[begin] = at.clamp(max=len(whole) - 1), 0
        end = begin + int((whole[index[begin:]] >= 0).cumprod(0).sum())
        begin = min(begin + (limit - begin + 1) // 2, end)
        width, starts = width - 1, starts[whole[starts] != whole[start]]
    source = torch.where(index < L, index, FROM_REFERENCE - (index - L))
    return whole[index[:end]], source[:end], parents[:end]


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """Run `nanospec_ngram` of `native/ngram.cpp`."""
    result = empty_proposal(rows, k, tree=max_width > 1)
    call("nanospec_ngram", *table, *result[:6], *result.drafts.shape, rows)
    return result


@triton.jit
def _best_match(
    text, length, source, size, expected, min_n, max_n, used, MAX_N: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the best match of the last min_n to max_n tokens of a text in source[:size], as its packed
    length and rank by distance from index `expected`, or -1 without a match. Matches followed by a token in
    `used`, which contains -1, are skipped."""
    p, best = tl.arange(0, BLOCK), tl.full([BLOCK], -1, tl.int32)
    for _ in range(0, size, BLOCK):
        # Number of tokens before p that equal the last tokens of the text.
        matched = tl.zeros([BLOCK], tl.int32)
        alive = p < size  # in the text itself, a match that ends at `length` would be the suffix
        for i in tl.static_range(1, MAX_N + 1):
            token = tl.load(source + p - i, (p >= i) & (p < size) & (i <= max_n), other=-1)
            alive &= token == tl.load(text + tl.maximum(length - i, 0))
            matched += alive.to(tl.int32)
        fits = (matched > 0) & (matched >= min_n)
        token = tl.load(source + p, fits, other=-1)
        if used.shape[0] > 1:
            fits &= tl.max((token[:, None] == used[None, :]).to(tl.int32), 1) == 0
        else:
            fits &= token >= 0
        rank = RANK_MASK - 2 * tl.abs(p - expected) - (p > expected).to(tl.int32)
        best = tl.maximum(best, tl.where(fits, (matched << RANK_BITS) | rank, -1))
        p += BLOCK
    return tl.max(best)


@triton.jit(do_not_specialize=["k"])
def _propose(table, rows, proposal, k, MAX_N: tl.constexpr, MAX_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    b, j, branch = tl.program_id(0), tl.arange(0, DRAFTS), tl.arange(0, MAX_WIDTH)
    s = tl.load(rows + b)
    row, limit = tl.maximum(s, 0), draft_limit(table, s, k)
    offset, length = row.to(tl.int64) * table.max_context, tl.load(table.num_tokens + row)
    text, reference = table.tokens + offset, table.reference + offset
    size, reference_start = tl.load(table.num_reference + row), tl.load(table.reference_start + row)
    aligned = length - reference_start
    min_n, max_n = tl.load(table.min_n + row), tl.minimum(tl.load(table.max_n + row), length)
    used = tl.full([MAX_WIDTH], -1, tl.int32)  # the first token of each branch
    drafts, sources, parents = tl.zeros([DRAFTS], tl.int32), tl.full([DRAFTS], -1, tl.int32), j
    match_len, begin, end, branches = 0, 0, 0, 0
    width = tl.maximum(tl.load(table.tree_width + row), 1)
    while (branches < width) & (begin < limit):
        own = _best_match(text, length, text, length, length, min_n, max_n, used, MAX_N, BLOCK)
        other = _best_match(text, length, reference, size, aligned, min_n, max_n, used, MAX_N, BLOCK)
        if tl.maximum(own, other) < 0:
            width = 0
        else:
            longest = own >> RANK_BITS
            own_first = (reference_start < 0) | (longest <= LONG_MATCH)
            copied = (other >> RANK_BITS) >= longest + own_first.to(tl.int32)  # from the reference
            best, expected = tl.where(copied, other, own), tl.where(copied, aligned, length)
            n, rank = best >> RANK_BITS, RANK_MASK - (best & RANK_MASK)
            start, new = expected + (2 * (rank & 1) - 1) * (rank >> 1), j >= begin
            index = start + tl.where(copied, j - begin, (j - begin) % tl.maximum(length - start, 1))
            token = tl.load(text + index, new & (j < limit) & ~copied, other=-1)
            token = tl.load(reference + index, new & (j < limit) & copied & (index < size), other=token)
            drafts = tl.where(new, token, drafts)
            sources = tl.where(new, tl.where(copied, _FROM_REFERENCE - index, index), sources)
            parents = tl.where(j == begin, 0, parents)
            used = tl.where(branch == branches, tl.max(tl.where(j == begin, token, -1)), used)
            match_len, width = tl.maximum(match_len, n), tl.where(n > LONG_MATCH, 1, width)
            end = tl.min(tl.where(new & (token < 0), j, limit))
            begin = tl.minimum(begin + (limit - begin + 1) // 2, end)
            branches += 1
    valid, at = j < end, b * k + j
    tl.store(proposal.drafts + at, tl.where(valid, drafts, 0), j < k)
    tl.store(proposal.source + at, tl.where(valid, sources, -1), j < k)
    if MAX_WIDTH > 1:
        tl.store(proposal.parents + at, tl.where(valid, parents, 0), j < k)
    tl.store(proposal.num_drafts + b, end)
    tl.store(proposal.match_len + b, match_len)
    tl.store(proposal.drafter + b, 0)


def launch(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    proposal = empty_proposal(rows, k, tree=max_width > 1)
    if len(rows):
        grid, width = (len(rows),), next_power_of_2(max_width)
        _propose[grid](table, rows, proposal, k, MAX_N=max_n, MAX_WIDTH=width, BLOCK=BLOCK, num_warps=16)
    return proposal
