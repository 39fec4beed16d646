"""The drafts that a drafter proposes for the rows of a step.

Node 0 of a row is its last committed token; nodes 1 .. num_drafts are its drafts. In a chain, each draft
follows the previous one. In a tree, `parents` gives the node that each draft follows. Parents come before
their children, so the first n drafts of a tree form a tree too. Siblings are different tokens.
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
    """Up to K drafts for each of B rows. Entries beyond num_drafts are ignored. The codes of `source` are in
    `kernels/__init__.py`."""

    drafts: Tensor  # [B, K] int32, draft tokens
    num_drafts: Tensor  # [B] int32
    source: Tensor  # [B, K] int32, index in the text that a draft was copied from, or a code
    match_len: Tensor  # [B] int32, length of the n-gram match, 0 if none
    drafter: Tensor  # [B] int32, index of the drafter in a method ("ngram+draft": 0, 1); unused if no drafts
    parents: Tensor | None = None  # [B, K] int32, trees only: the node 0 .. K that each draft follows


def empty_proposal(rows: Tensor, k: int, tree: bool) -> Proposal:
    """Return an uninitialized proposal for `rows` [B]."""
    B = len(rows)
    return Proposal(*map(rows.new_empty, [(B, k), (B,), (B, k), (B,), (B,), *[(B, k)] * tree]))


def merge(in_first: Tensor, first: Proposal, second: Proposal) -> Proposal:
    """Select rows of `first` where `in_first` [B] is true, and of `second` elsewhere."""

    def choose(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(in_first if one.dim() == 1 else in_first[:, None], one, other)

    is_tree = first.parents is not None or second.parents is not None
    parents = choose(parents_of(first), parents_of(second)) if is_tree else None
    return Proposal(*map(choose, first[:5], second[:5]))._replace(parents=parents)


def parents_of(proposal: Proposal) -> Tensor:
    """Return the parents [B, K] of a proposal, for a chain those of the equivalent tree."""
    if proposal.parents is not None:
        return proposal.parents
    B, k = proposal.drafts.shape
    return torch.arange(k, dtype=torch.int32, device=proposal.drafts.device).expand(B, k)


def draft_limits(table: Table, rows: Tensor, k: int) -> Tensor:
    """Return how many of k drafts each request row can use, [B] int32; 0 for inactive rows. A row that is one
    token short of `max_len` can use none, because the target always emits one token."""
    index = rows.clamp(min=0)
    left = torch.minimum(table.max_k[index], table.max_len[index] - table.num_tokens[index] - 1)
    active = (rows >= 0) & (table.finished[index] == RUNNING)
    return torch.where(active, left.clamp(0, k), 0)


@triton.jit
def draft_limit(table, s, k):
    """Return `draft_limits` of one request row."""
    row = tl.maximum(s, 0)
    left = tl.load(table.max_len + row) - tl.load(table.num_tokens + row) - 1
    left = tl.minimum(left, tl.load(table.max_k + row))
    active = (s >= 0) & (tl.load(table.finished + row) == _RUNNING)
    return tl.where(active, tl.minimum(tl.maximum(left, 0), k), 0)
