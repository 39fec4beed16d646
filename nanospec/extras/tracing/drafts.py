"""The drafts of a step, including those that were rejected or never verified.

The step, captured or not, writes its proposal to device rows, which are copied to the host afterwards. The
line of a row is

    length of its text | number of drafts | drafts | sources | parents     [2 + 3 W] int32

The length tells which step a line belongs to: a step without a proposal leaves the line of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from ...kernels.transfer import to_host


class Guesses(NamedTuple):
    """What was proposed for a row whose text had `length` tokens; see `Proposal`. Of a chain each draft's
    parent is the one before."""

    length: int
    drafts: list[int]
    sources: list[int]
    parents: list[int]


class DraftLines:
    """What was proposed last for each request row, at most `width` drafts each."""

    def __init__(self, table: Table, width: int) -> None:
        self._num_rows, self._width = table.num_rows, width
        shape = table.num_rows + 1, 2 + 3 * width
        self._lines = torch.zeros(shape, dtype=torch.int32, device=table.device)

    def clear(self, row: int) -> None:
        """Forget what was proposed for a row."""
        self._lines[row].zero_()

    def write(self, table: Table, rows: Tensor, proposal: Proposal) -> None:
        """Keep the proposal for request rows [B], -1 for padding."""
        k = proposal.drafts.shape[1]
        row = torch.where(rows >= 0, rows, self._num_rows)
        self._lines[row, 0] = table.num_tokens[rows.clamp(min=0)]
        self._lines[row, 1] = proposal.num_drafts.int()  # as lenient as the step
        chain = torch.arange(k, dtype=torch.int32, device=rows.device).expand(len(rows), k)
        parents = chain if proposal.parents is None else proposal.parents
        for column, values in enumerate((proposal.drafts, proposal.source, parents)):
            first = 2 + column * self._width
            self._lines[row, first : first + k] = values.int()

    def fetch(self, rows: Sequence[int]) -> Callable[[], list[Guesses]]:
        """Start copying the lines of rows to the host; the result waits for them."""
        wait = to_host(self._lines[: max(rows) + 1])

        def read() -> list[Guesses]:
            lines = wait()
            return [self._decode(lines[row]) for row in rows]

        return read

    def _decode(self, line: list[int]) -> Guesses:
        (length, n), width = line[:2], self._width
        drafts, sources, parents = (line[first : first + n] for first in range(2, 2 + 3 * width, width))
        return Guesses(length, drafts, sources, parents)
