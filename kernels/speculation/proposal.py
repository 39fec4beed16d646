"""What a drafter hands over: guessed tokens, chains or trees, of the rows of a step.

A row's drafts are places 1 .. num_drafts of its row in the step; place 0 is its last committed token. In
a chain each draft follows the one before. A tree says for each draft which place it follows; parents
come before their children, so the first n drafts of a tree are a tree too, and siblings differ.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import RUNNING
from ..table import Table

_RUNNING = tl.constexpr(RUNNING)


class Proposal(NamedTuple):
    """Drafts for B rows, at most K each.

    Attributes:
        drafts: [B, K] int32, the guesses, any valid token beyond their number.
        num_drafts: [B] int32.
        source: [B, K] int32, index in the row's history that each draft was copied from, else GUESSED; beyond
            their number anything.
        match_len: [B] int32, length of the n-gram match, 0 where there is none.
        drafter: [B] int32, the place of the row's drafter in the method ("ngram+draft": 0, 1); without
            drafts it says nothing, and may be NOBODY.
        parents: [B, K] int32, trees only: the place (0 .. K) that each draft follows; None for chains.
        logits: [B, K, V], what the drafts were drawn from, where a model drew them; else None.
        sampled: [B] bool, whether a row's drafts were drawn from `logits` at all, as a chain; None: all
            were, if there are logits and no trees.
    """

    drafts: Tensor
    num_drafts: Tensor
    source: Tensor
    match_len: Tensor
    drafter: Tensor
    parents: Tensor | None = None
    logits: Tensor | None = None
    sampled: Tensor | None = None


def empty_proposal(rows: Tensor, k: int, tree: bool = False) -> Proposal:
    """Return memory for a proposal of `rows` [B]."""
    B = len(rows)
    return Proposal(*map(rows.new_empty, [(B, k), (B,), (B, k), (B,), (B,), *[(B, k)] * tree]))


def room(table: Table, rows: Tensor, k: int) -> Tensor:
    """Return how many of k drafts each request row can use, [B] int32; 0 for rows that take no part. A row
    with one token left to `max_len` can use none, as the target gives that one."""
    index = rows.clamp(min=0)
    left = torch.minimum(table.limit[index], table.max_len[index] - table.num_tokens[index] - 1)
    takes_part = (rows >= 0) & (table.finished[index] == RUNNING)
    return torch.where(takes_part, left.clamp(0, k), 0)


@triton.jit
def room_of(table, s, k):
    """`room` of one request row."""
    row = tl.maximum(s, 0)
    left = tl.load(table.max_len + row) - tl.load(table.num_tokens + row) - 1
    left = tl.minimum(left, tl.load(table.limit + row))
    takes_part = (s >= 0) & (tl.load(table.finished + row) == _RUNNING)
    return tl.where(takes_part, tl.minimum(tl.maximum(left, 0), k), 0)
