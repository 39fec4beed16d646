"""Grammars as an extension: each step is told what the host guessed for rows with a grammar, and masks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...config import SamplingParams
from ...device.extension import Extension
from ...kernels.batch import Batch
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from .grammar import PLAN_SECONDS, Draft, Grammars
from .response_format import checked
from .rows import METHOD, Guided, GuidedRows

if TYPE_CHECKING:
    from ...device.admission import HostWrites
    from ...device.worker import Worker
    from ...engine.request import Request
    from ...text.tokenizer import Tokenizer


class Grammar(Extension):
    """Holds requests with a `response_format` to it.

    Attributes:
        rows: what the device knows, from the first request with a grammar on.
    """

    method = METHOD
    constrains = True

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None in a process that has no engine."""
        self._tokenizer = tokenizer
        self.rows: GuidedRows | None = None

    def attach(self, worker: Worker) -> None:
        self._worker = worker
        if self._tokenizer is not None:
            self._grammars = Grammars(self._tokenizer, worker.model.config.vocab_size)

    def admit(self, writes: HostWrites, row: int) -> None:
        if self.rows is not None:
            self.rows.admit(writes, row)

    def send(self, writes: HostWrites, value: Sequence[Guided], k: int) -> None:
        if self.rows is None:
            worker = self._worker
            largest = worker.graphs.max_tokens if worker.graphs is not None else None
            words = len(value[0].draft.masks[0]) // 4
            code = worker.methods.index(METHOD)
            self.rows = GuidedRows(worker.table, code, worker.max_k, largest, words)
        self.rows.send(writes, value, k)

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        assert self.rows is not None
        return self.rows.propose(rows, proposal)

    def change(self, logits: Tensor, batch: Batch) -> None:
        assert self.rows is not None
        self.rows.bar(logits, batch)

    def for_drafters(self, proposal: Proposal, batch: Batch) -> tuple[Proposal, Batch]:
        assert self.rows is not None
        return self.rows.of_others(proposal, batch)

    def check(self, params: SamplingParams) -> None:
        if params.response_format is None:
            return
        if self._tokenizer is None:
            raise ValueError("response_format needs a tokenizer, which has the texts of tokens; load one.")
        self._grammars.check(params)

    def new(self, request: Request) -> None:
        if (asked := checked(request.params.response_format)) is not None:
            request.constraint, request.stats.acceptance = self._grammars.guide(asked), "exact"

    def plan(self, requests: Sequence[Request], limits: Sequence[int]) -> Any:
        guided = [(r, n) for r, n in zip(requests, limits, strict=True) if r.constraint is not None]
        if not guided:
            return None
        end = time.perf_counter() + PLAN_SECONDS
        with self._worker.stages("propose"):
            return [Guided(request.row, self._guess(request, most, end)) for request, most in guided]

    def _guess(self, request: Request, most: int, end: float) -> Draft:
        """Return at most so many drafts, made until `end`, and masks."""
        spec, room = self._worker.config.spec, request.max_len - request.num_tokens - 1
        shortest, longest = spec.prompt_lookup_min, spec.prompt_lookup_max
        guide: Any = request.constraint
        draft: Draft = guide.plan(request.tokens, max(min(most, room), 0), shortest, longest, end)
        return draft
