"""What was guessed in a step, rejected guesses and those that were never verified too.

A drafter that watches another one: it writes what the other proposes to device rows of its own, inside the
step, captured or not, and has them copied to the host behind it. A row's line is

    length of its text | number of drafts | drafts | sources | parents     [2 + 3 W] int32

The length says to which step a line belongs: one in which nobody was asked to guess leaves the line of an
earlier step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...drafters.base import Drafter
from ...kernels.batch import Batch
from ...kernels.speculation.proposal import Proposal
from ...kernels.speculation.verify import Verdict
from ...kernels.table import Table
from ...kernels.transfer import to_host


class Guesses(NamedTuple):
    """What was proposed for a row whose text had `length` tokens; see `Proposal`. Of a chain each draft's
    parent is the one before."""

    length: int
    drafts: list[int]
    sources: list[int]
    parents: list[int]


NO_GUESSES = Guesses(-1, [], [], [])


class WatchedDrafter(Drafter):
    """Proposes what `inner` does, and remembers it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.max_drafts, self.runs_model = inner.max_drafts, inner.runs_model
        self.reads_on_host = inner.reads_on_host
        self.kv_bytes_per_token, self.max_context = inner.kv_bytes_per_token, inner.max_context
        self._fetched: list[Guesses] = []

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return *self.inner.parts, self

    @property
    def names(self) -> tuple[str, ...]:
        return self.inner.names

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        super().attach(table, num_blocks, max_tokens, may_wait)
        self._num_rows = table.num_rows
        shape = table.num_rows + 1, 2 + 3 * self.max_drafts
        self._lines = torch.zeros(shape, dtype=torch.int32, device=table.device)

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_cached: int) -> None:
        self._lines[row].zero_()

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        proposal = self.inner.propose(table, rows, k)
        row, width = torch.where(rows >= 0, rows, self._num_rows), self.max_drafts
        self._lines[row, 0] = table.num_tokens[rows.clamp(min=0)]
        self._lines[row, 1] = proposal.num_drafts.int()  # as lenient as the step
        chain = torch.arange(k, dtype=torch.int32, device=rows.device).expand(len(rows), k)
        parents = chain if proposal.parents is None else proposal.parents
        for column, values in enumerate((proposal.drafts, proposal.source, parents)):
            first = 2 + column * width
            self._lines[row, first : first + k] = values.int()
        return proposal

    def learn(
        self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor, logits: Tensor
    ) -> None:
        self.inner.learn(table, proposal, batch, verdict, hidden, logits)

    def follow(self, rows: Sequence[int]) -> Callable[[], None]:
        wait = to_host(self._lines[: max(rows) + 1])

        def take_in() -> None:
            lines = wait()
            self._fetched = [self._decode(lines[row]) for row in rows]

        return take_in

    def take(self, count: int) -> list[Guesses]:
        """The guesses for the rows of the step that was fetched last, once; of `count` rows."""
        fetched, self._fetched = self._fetched, []
        return fetched or [NO_GUESSES] * count

    def _decode(self, line: list[int]) -> Guesses:
        (length, n), width = line[:2], self.max_drafts
        drafts, sources, parents = (line[first : first + n] for first in range(2, 2 + 3 * width, width))
        return Guesses(length, drafts, sources, parents)

    def ms(self, batch: int, passes: int) -> float:
        return self.inner.ms(batch, passes)
