"""Two drafters, decided for each row on the device: the second guesses where the first found nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.verify import Verdict
from ..state import State
from .base import Drafter


class FirstMatch(Drafter):
    """`second` for the rows that `first` has no drafts for: n-gram lookup costs nothing and is right
    where it matches, a model always has something to say."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.max_drafts = max(first.max_drafts, second.max_drafts)
        self.has_model, self.has_cache, self.catch_up = second.has_model, second.has_cache, second.catch_up

    def propose(self, state: State, rows: Tensor, k: int, passes: int, max_kv_len: int) -> Proposal:
        found = self.first.propose(state, rows, k, passes, max_kv_len)
        done = found.num_drafts > 0
        rest = torch.where(done, -1, rows)
        other = self.second.propose(state, rest, k, passes, max_kv_len)
        parents = None
        if found.parents is not None or other.parents is not None:
            parents = torch.where(done[:, None], _parents(found), _parents(other))
        return Proposal(
            torch.where(done[:, None], found.drafts, other.drafts),
            torch.where(done, found.num_drafts, other.num_drafts),
            torch.where(done[:, None], found.source, other.source),
            found.match_len,
            torch.where(done, found.drafter, other.drafter),
            parents,
            other.logits,
        )

    def learn(
        self, state: State, rows: Tensor, proposal: Proposal, hidden: Tensor, batch: Batch, verdict: Verdict
    ) -> None:
        self.second.learn(state, rows, proposal, hidden, batch, verdict)

    def admit(self, row: int, num_computed: int) -> None:
        self.second.admit(row, num_computed)

    def prefill(self, rows: Tensor, input_ids: Tensor, batch: Batch) -> None:
        self.second.prefill(rows, input_ids, batch)

    def clear(self, blocks: Sequence[int]) -> None:
        self.second.clear(blocks)

    def rehearse(self, state: State, count: int) -> None:
        self.second.rehearse(state, count)

    def measure(self) -> None:
        self.second.measure()

    def ms(self, batch: int, passes: int) -> float:
        return self.second.ms(batch, passes)


def _parents(proposal: Proposal) -> Tensor:
    """A chain is a tree as well."""
    if proposal.parents is not None:
        return proposal.parents
    B, k = proposal.drafts.shape
    return torch.arange(k, dtype=torch.int32, device=proposal.drafts.device).expand(B, k)
