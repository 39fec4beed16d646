"""Rows whose output a grammar guides: their guesses and masks, made by the host (`grammar/grammar.py`).

The device holds, by request row, what is guessed and where in `allowed` the masks of a row begin, made when
a request first asks. A step lets these rows have their own guesses in place of a drafter's, chains in a tree
too, and bars what the masks do not allow before anything reads the logits. Recorded steps that do so are
recordings apart, as those with further sampling parameters are (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...device.admission import HostWrites
from ...kernels.batch import Batch
from ...kernels.codes import NOBODY
from ...kernels.sampling.mask import mask
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from ...kernels.transfer import upload
from .grammar import Draft

METHOD = "grammar"  # what statistics call these guesses


class Guided(NamedTuple):
    """A request row of a step and what the host has guessed for it."""

    row: int
    draft: Draft


class GuidedRows:
    """See the module docstring.

    Attributes:
        code: who guesses, in a proposal: nobody of the drafters.
        first, count, match_len: [S] int32, where a row's masks begin, -1: it has none; how many guesses.
        tokens, sources: [S, K] int32.
        allowed: [M, W] int32, the masks of a step, at an address that stays where steps are recorded.
    """

    @torch.inference_mode(False)  # written to between steps too
    def __init__(self, table: Table, code: int, most: int, max_masks: int | None, words: int) -> None:
        """`most` guesses for a row; `max_masks` of all rows of a recorded step, None where none is; int32
        `words` of a mask."""
        self.table, self.code, self.max_masks = table, code, max_masks
        device, rows, width = table.device, table.num_rows, max(most, 1)
        self.first = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.count, self.match_len = torch.zeros_like(self.first), torch.zeros_like(self.first)
        self.tokens = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.sources = torch.zeros_like(self.tokens)
        self.allowed = torch.zeros(max_masks or 0, words, dtype=torch.int32, device=device)

    def admit(self, writes: HostWrites, row: int) -> None:
        """A request took the row. If it is guided, every step of it says so."""
        writes.set(self.first, row, -1)

    def send(self, writes: HostWrites, guided: Sequence[Guided], k: int) -> None:
        """What the host made for a step of at most `k` guesses."""
        lines = [line for _, draft in guided for line in draft.masks[: k + 1]]
        masks = torch.frombuffer(bytearray().join(lines), dtype=torch.int32).view(len(lines), -1)
        if self.max_masks is None:
            self.allowed = upload(masks, torch.int32, self.table.device)
        else:
            upload(masks, torch.int32, self.table.device, out=self.allowed[: len(masks)])
        begin = 0
        for row, draft in guided:
            count = min(len(draft.tokens), k)
            for column, value in (self.first, begin), (self.count, count), (self.match_len, draft.match_len):
                writes.set(column, row, value)
            if count:
                writes.put(self.tokens, row, draft.tokens[:count])
                writes.put(self.sources, row, draft.sources[:count])
            begin += count + 1

    def propose(self, rows: Tensor, proposal: Proposal) -> Proposal:
        """The proposal for the request rows [B], with their own guesses for those that are guided."""
        k, index = proposal.drafts.shape[1], rows.clamp(min=0)
        mine = (rows >= 0) & (self.first[index] >= 0)
        count = self.count[index].clamp(max=k)
        chain = torch.arange(k, dtype=torch.int32, device=rows.device)
        sampled = proposal.sampled
        if proposal.logits is not None:  # of which nothing here was drawn
            drawn = torch.full_like(mine, proposal.parents is None) if sampled is None else sampled
            sampled = drawn & ~mine
        return Proposal(
            torch.where(mine[:, None], self.tokens[index, :k], proposal.drafts),
            torch.where(mine, count, proposal.num_drafts),
            torch.where(mine[:, None], self.sources[index, :k], proposal.source),
            torch.where(mine, self.match_len[index], proposal.match_len),
            torch.where(mine, torch.where(count > 0, self.code, NOBODY), proposal.drafter).int(),
            None if proposal.parents is None else torch.where(mine[:, None], chain, proposal.parents),
            proposal.logits,
            sampled,
        )

    def of_others(self, proposal: Proposal, batch: Batch) -> tuple[Proposal, Batch]:
        """As drafters are to see them: without guided rows, whose logits are not what the model says."""
        mine = self.first[batch.rows.clamp(min=0)] >= 0
        drafter = proposal.drafter.masked_fill(mine, NOBODY)
        return proposal._replace(drafter=drafter), replace(batch, rows=batch.rows.masked_fill(mine, -1))

    def bar(self, logits: Tensor, batch: Batch) -> None:
        """Bar what grammars do not allow, in logits [T, V]."""
        place = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        b = torch.searchsorted(batch.q_start, place, right=True) - 1  # whose token it is
        i, s = place - batch.q_start[b], batch.rows[b]
        first = self.first[s.clamp(min=0)]
        guided = (s >= 0) & (first >= 0) & (i < batch.q_len[b])
        mask(logits, self.allowed, torch.where(guided, first + i, -1).int())
