"""Two drafters, decided for each row on the device: the second guesses where the first found nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.codes import NOBODY
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from .base import Drafter


class FirstMatch(Drafter):
    """`second` for the rows that `first` has no drafts for: n-gram lookup costs nothing and is right
    where it matches, a model always has something to say."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        both = first, second
        self.max_drafts = max(part.max_drafts for part in both)
        self.runs_model = any(part.runs_model for part in both)
        self.reads_on_host = any(part.reads_on_host for part in both)
        self.kv_bytes_per_token = sum(part.kv_bytes_per_token for part in both)
        self.max_context = min((part.max_context for part in both if part.max_context), default=None)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return *self.first.parts, *self.second.parts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        first, second = self.first, self.second
        found = first.propose(table, rows, k)
        done = found.num_drafts > 0
        other = second.propose(table, torch.where(done, -1, rows), k)
        parents = None
        if found.parents is not None or other.parents is not None:
            parents = torch.where(done[:, None], _parents(found), _parents(other))
        behind = torch.where(other.drafter == NOBODY, NOBODY, other.drafter + len(first.names))
        logits, sampled = (found.logits, done) if other.logits is None else (other.logits, ~done)
        return Proposal(
            torch.where(done[:, None], found.drafts, other.drafts),
            torch.where(done, found.num_drafts, other.num_drafts),
            torch.where(done[:, None], found.source, other.source),
            torch.where(done, found.match_len, other.match_len),
            torch.where(done, found.drafter, behind),
            parents,
            logits,
            sampled,
        )

    def learn(
        self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor, logits: Tensor
    ) -> None:
        offset = 0
        for part in self.parts:
            code = proposal.drafter - offset
            own = torch.where((code >= 0) & (code < len(part.names)), code, NOBODY)
            part.learn(table, proposal._replace(drafter=own), batch, verdict, hidden, logits)
            offset += len(part.names)

    def ms(self, batch: int, passes: int) -> float:
        return sum(part.ms(batch, passes) for part in self.parts)


def _parents(proposal: Proposal) -> Tensor:
    """A chain is a tree as well."""
    if proposal.parents is not None:
        return proposal.parents
    B, k = proposal.drafts.shape
    return torch.arange(k, dtype=torch.int32, device=proposal.drafts.device).expand(B, k)
