"""Two drafters, decided for each row on the device: the second guesses where the first found nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        self.parts = first, second
        self.max_drafts = max(part.max_drafts for part in self.parts)
        self.runs_model = any(part.runs_model for part in self.parts)
        self.kv_bytes_per_token = sum(part.kv_bytes_per_token for part in self.parts)
        self.max_context = min((p.max_context for p in self.parts if p.max_context), default=None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        first, second = self.parts
        for part in self.parts:
            part.passes = self.passes
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
        self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor
    ) -> None:
        offset = 0
        for part in self.parts:
            code = proposal.drafter - offset
            own = torch.where((code >= 0) & (code < len(part.names)), code, NOBODY)
            part.learn(table, proposal._replace(drafter=own), batch, verdict, hidden)
            offset += len(part.names)

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        super().attach(table, num_blocks, max_tokens, may_wait)
        for part in self.parts:
            part.attach(table, num_blocks, max_tokens, may_wait)

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_cached: int) -> None:
        for part in self.parts:
            part.admit(row, num_tokens, blocks, num_cached)

    def grow(self, row: int, blocks: Sequence[int]) -> None:
        for part in self.parts:
            part.grow(row, blocks)

    def release(self, row: int) -> None:
        for part in self.parts:
            part.release(row)

    def catch_up(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.catch_up(rows)

    def follow(self, rows: Sequence[int]) -> Callable[[], None]:
        parts = [part.follow(rows) for part in self.parts]

        def take_in() -> None:
            for part in parts:
                part()

        return take_in

    def rehearse(self, count: int) -> None:
        for part in self.parts:
            part.rehearse(count)

    def measure(self) -> None:
        for part in self.parts:
            part.measure()

    def ms(self, batch: int, passes: int) -> float:
        return sum(part.ms(batch, passes) for part in self.parts)


def _parents(proposal: Proposal) -> Tensor:
    """A chain is a tree as well."""
    if proposal.parents is not None:
        return proposal.parents
    B, k = proposal.drafts.shape
    return torch.arange(k, dtype=torch.int32, device=proposal.drafts.device).expand(B, k)
