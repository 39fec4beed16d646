"""Propose drafts by n-gram lookup: copy the tokens that followed the last n tokens earlier in the text.

The method is prompt lookup decoding (Saxena, 2023), https://github.com/apoorvumang/prompt-lookup-decoding.

A row may have a second text to search, its reference: texts that the output may repeat, each followed by -1.
It is searched as if it preceded the row's own text (prompt and output). The match is the longest suffix of
min_n to max_n tokens that also occurs earlier; among equally long ones, the latest, because recent text
predicts best. The occurrence may overlap the suffix. When copying reaches the end of the own text, it
restarts at the token after the match (as LZ77 copies, Ziv & Lempel, 1977), so that even a text with a short
period fills all drafts. Copying from the reference ends at -1.

A row with a match gets `draft_limits` drafts, or fewer from the reference; a row without one gets none.
Unused entries of the result hold token 0 and source FROM_TARGET. Without drafts, the match length is 0.

Trees: up to `Table.tree_width` matches with different next tokens each start a branch at the root, best match
first. Each branch gets half of the remaining drafts (rounded up), except the last, which gets the rest. So a
tree accepts at least as many tokens as a chain with half its drafts. A match longer than LONG_MATCH is
usually right and gets all drafts: a second branch would only shorten it. A chain is a tree of width 1.

Kernel: one program per row. It compares `BLOCK` tokens of a text at `max_n` shifts at a time, and keeps the
best match as one integer (length, then index), so that the maximum is the best. A tree searches both texts
once per branch. Limits: max_context <= 2^24, max_n <= 127, k <= 63.
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
INDEX_BITS = tl.constexpr(24)  # low bits of a packed (match length, index)
INDEX_MASK = tl.constexpr((1 << 24) - 1)
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
        whole = torch.cat((reference, torch.full_like(rows[:1], -1), text))
        starts, n = matches(whole, int(table.min_n[s]), min(int(table.max_n[s]), len(text)))
        limit = int(draft_limits(table, rows[b : b + 1], k)) if n else 0
        width = 1 if n > LONG_MATCH.value else max(int(table.tree_width[s]), 1)
        if limit:
            index, parents = tree(whole, starts, limit, width)
            own = index - len(reference) - 1
            count = len(index)
            proposal.drafts[b, :count] = whole[index]
            proposal.source[b, :count] = torch.where(own >= 0, own, FROM_REFERENCE - index)
            proposal.num_drafts[b], proposal.match_len[b] = count, n
            if proposal.parents is not None:
                proposal.parents[b, :count] = parents
    return proposal


def matches(text: Tensor, min_n: int, max_n: int) -> tuple[Tensor, int]:
    """Find earlier occurrences of the suffixes of `text` [L] of min_n to max_n tokens. Return the indices of
    the tokens after them, if these are not -1 ([C] int64, longest and then latest first), and the longest
    length (0 if none)."""
    L = len(text)
    suffix = text[max(L - max_n, 0) :].flip(0).tolist()  # latest token first
    after = torch.arange(1, max(L, 1), device=text.device)
    length, alive = torch.zeros_like(after), text[1:] >= 0
    for i, token in enumerate(suffix):
        alive &= (after > i) & (text[after - 1 - i] == token)
        length += alive
    order = (length * L + after)[length >= max(min_n, 1)].sort(descending=True).values
    return order % max(L, 1), int(order[0]) // L if len(order) else 0


def tree(text: Tensor, starts: Tensor, limit: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the indices in `text` that up to `limit` drafts are copied from, given the matches `starts`, and
    their parent nodes, both int64. Draft i is node i + 1, so the parents of a chain are 0, 1, 2, ..."""
    i = torch.arange(limit, device=text.device)
    index, parents, begin, end = i.clone(), i.clone(), 0, 0
    while len(starts) and width and begin < limit:
        index[begin:], parents[begin] = starts[0] + i[: limit - begin] % (len(text) - starts[0]), 0
        end = begin + int((text[index[begin:]] >= 0).cumprod(0).sum())
        begin = min(begin + (limit - begin + 1) // 2, end)
        width, starts = width - 1, starts[text[starts] != text[starts[0]]]
    return index[:end], parents[:end]


def native(table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    """Run `nanospec_ngram` of `native/ngram.cpp`."""
    result = empty_proposal(rows, k, tree=max_width > 1)
    call("nanospec_ngram", *table, *result, *result.drafts.shape, rows)
    return result


@triton.jit
def _best_match(text, length, source, size, min_n, max_n, used, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the best match of the last min_n to max_n tokens of a text in source[:size], as its packed
    length and index, or -1 without a match. Matches followed by a token in `used`, which contains -1, are
    skipped."""
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
        best = tl.maximum(best, tl.where(fits, (matched << INDEX_BITS) | p, -1))
        p += BLOCK
    return tl.max(best)


@triton.jit(do_not_specialize=["k"])
def _propose(table, rows, proposal, k, MAX_N: tl.constexpr, MAX_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    b, j, branch = tl.program_id(0), tl.arange(0, DRAFTS), tl.arange(0, MAX_WIDTH)
    s = tl.load(rows + b)
    row, limit = tl.maximum(s, 0), draft_limit(table, s, k)
    offset, length = row.to(tl.int64) * table.max_context, tl.load(table.num_tokens + row)
    text, reference = table.tokens + offset, table.reference + offset
    size, min_n = tl.load(table.num_reference + row), tl.load(table.min_n + row)
    max_n = tl.minimum(tl.load(table.max_n + row), length)
    used = tl.full([MAX_WIDTH], -1, tl.int32)  # the first token of each branch
    drafts, sources, parents = tl.zeros([DRAFTS], tl.int32), tl.full([DRAFTS], -1, tl.int32), j
    match_len, begin, end, branches = 0, 0, 0, 0
    width = tl.maximum(tl.load(table.tree_width + row), 1)
    while (branches < width) & (begin < limit):
        own = _best_match(text, length, text, length, min_n, max_n, used, MAX_N, BLOCK)
        other = _best_match(text, length, reference, size, min_n, max_n, used, MAX_N, BLOCK)
        if tl.maximum(own, other) < 0:
            width = 0
        else:
            copied = (other >> INDEX_BITS) > (own >> INDEX_BITS)  # from the reference
            best = tl.where(copied, other, own)
            start, n, new = best & INDEX_MASK, best >> INDEX_BITS, j >= begin
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
