"""Structured output as an extension: rows with a `response_format` get drafts and masks from the host.

The device holds, by request row, the drafts of `grammar.Guide` and where in `allowed` the row's masks begin.
This memory is allocated, and `grammar.py` imported, when a request first has a grammar. A step takes these
drafts in place of a drafter's, chains in a tree too, and masks the logits. Steps that do so are captured
apart from plain ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import SamplingParams
from ...device.extension import Extension
from ...engine.request import Request
from ...kernels import NOBODY
from ...kernels.batch import Batch
from ...kernels.launch import use_native
from ...kernels.native import call
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from ...kernels.transfer import upload, write
from ...text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .grammar import Draft, Grammars

PLAN_SECONDS = 0.02  # of a step, after which no more drafts are made in it: some masks take milliseconds


class Grammar(Extension):
    """Constrains requests with a `response_format`.

    Attributes:
        first, count, match_len: [S] int32: where a row's masks begin, -1 for a row without a grammar; number
            of drafts; length of their match. `first` is None until a request has a grammar.
        tokens, sources: [S, K] int32, the drafts.
        allowed: [M, W] int32, the masks of a step, at a fixed address where steps are captured.
    """

    method = "grammar"  # in statistics
    first: Tensor | None = None

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: None in a process that has no engine."""
        self._tokenizer = tokenizer

    def attach(self, worker: Any) -> None:
        self._worker = worker

    @cached_property
    def _grammars(self) -> Grammars:
        from .grammar import Grammars

        if self._tokenizer is None:
            raise ValueError("response_format needs a tokenizer, which has the texts of tokens; load one.")
        return Grammars(self._tokenizer, self._worker.model.config.vocab_size)

    @torch.inference_mode(False)  # written to between steps too
    def _allocate(self, words: int) -> Tensor:
        """Allocate the rows, for masks of so many int32 words; return `first`."""
        worker, graphs = self._worker, self._worker.graphs
        shape, device = (worker.table.num_rows, max(worker.max_k, 1)), worker.table.device
        self.first = torch.full(shape[:1], -1, dtype=torch.int32, device=device)
        self.count, self.match_len = torch.zeros_like(self.first), torch.zeros_like(self.first)
        self.tokens, self.sources = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        size = 0 if graphs is None else graphs.max_tokens, words
        self.allowed = torch.zeros(size, dtype=torch.int32, device=device)
        return self.first

    def admit(self, row: int) -> None:
        if self.first is not None:
            self.first[row].fill_(-1)  # every step of a guided request sets it again

    def send(self, value: Sequence[tuple[int, Draft]], k: int) -> None:
        lines = [line for _, draft in value for line in draft.masks[: k + 1]]
        masks = torch.frombuffer(bytearray().join(lines), dtype=torch.int32).view(len(lines), -1)
        first = self.first if self.first is not None else self._allocate(masks.shape[1])
        if self._worker.graphs is None:
            self.allowed = upload(masks, torch.int32, first.device)
        else:
            upload(masks, torch.int32, first.device, out=self.allowed[: len(masks)])
        begin = 0
        for row, draft in value:
            count = min(len(draft.tokens), k)
            for column, number in (first, begin), (self.count, count), (self.match_len, draft.match_len):
                column[row].fill_(number)
            if count:
                write(self.tokens, row, draft.tokens[:count])
                write(self.sources, row, draft.sources[:count])
            begin += count + 1

    def _first_of(self, rows: Tensor) -> Tensor:
        """Return where the masks of request rows begin; -1 for rows without a grammar and padding."""
        assert self.first is not None
        return torch.where(rows >= 0, self.first[rows.clamp(min=0)], -1)

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        k, index, mine = proposal.drafts.shape[1], rows.clamp(min=0), self._first_of(rows) >= 0
        count, code = self.count[index].clamp(max=k), self._worker.methods.index(self.method)
        chain = torch.arange(k, dtype=torch.int32, device=rows.device)
        sampled = proposal.sampled
        if proposal.logits is not None:  # none of these drafts was drawn from them
            drawn = torch.full_like(mine, proposal.parents is None) if sampled is None else sampled
            sampled = drawn & ~mine
        return Proposal(
            torch.where(mine[:, None], self.tokens[index, :k], proposal.drafts),
            torch.where(mine, count, proposal.num_drafts),
            torch.where(mine[:, None], self.sources[index, :k], proposal.source),
            torch.where(mine, self.match_len[index], proposal.match_len),
            torch.where(mine, torch.where(count > 0, code, NOBODY), proposal.drafter).int(),
            None if proposal.parents is None else torch.where(mine[:, None], chain, proposal.parents),
            proposal.logits,
            sampled,
        )

    def for_drafters(self, proposal: Proposal, batch: Batch) -> tuple[Proposal, Batch]:
        """Leave out guided rows, whose logits are not the model's."""
        mine = self._first_of(batch.rows) >= 0
        drafter = proposal.drafter.masked_fill(mine, NOBODY)
        return proposal._replace(drafter=drafter), replace(batch, rows=batch.rows.masked_fill(mine, -1))

    def change(self, logits: Tensor, batch: Batch) -> None:
        place = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        b = torch.searchsorted(batch.q_start, place, right=True) - 1  # the batch row of each token
        i, first = place - batch.q_start[b], self._first_of(batch.rows)[b]
        mask(logits, self.allowed, torch.where((first >= 0) & (i < batch.q_len[b]), first + i, -1).int())

    def check(self, params: SamplingParams) -> None:
        if params.response_format is not None:
            self._grammars.check(params)

    def new(self, request: Request) -> None:
        if (asked := request.params.response_format) is not None and asked["type"] != "text":
            request.constraint, request.stats.acceptance = self._grammars.guide(asked), "exact"

    def plan(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, Draft]] | None:
        end, spec, found = time.perf_counter() + PLAN_SECONDS, self._worker.config.spec, []
        lengths = spec.prompt_lookup_min, spec.prompt_lookup_max
        with self._worker.stages["propose"]:
            for request, limit in zip(requests, limits, strict=True):
                guide: Any = request.constraint  # a `grammar.Guide`
                if guide is not None:
                    most = max(min(limit, request.max_len - request.num_tokens - 1), 0)
                    found.append((request.row, guide.plan(request.tokens, most, *lengths, end)))
        return found or None


def mask(logits: Tensor, allowed: Tensor, at: Tensor) -> None:
    """Set logits [T, V] of tokens that are not allowed to -inf, and leave all others as they are.

    Args:
        allowed: [M, W] int32, masks: bit i % 32 of word i // 32 says whether token i is allowed; tokens
            beyond the words are not.
        at: [T] int32, the mask of each row of the logits; -1: none.
    """
    V, words = logits.shape[1], allowed.shape[1]
    if use_native(logits, torch.bfloat16, torch.float32):
        given = logits, logits.stride(0), logits.dtype == torch.bfloat16, *logits.shape
        call("nanospec_mask", *given, allowed, allowed.stride(0), words, at, torch.get_num_threads())
        return
    own = F.pad(allowed[at.clamp(min=0).long()], (0, max(-(-V // 32) - words, 0))).view(torch.uint8)
    bit = torch.arange(8, dtype=torch.uint8, device=logits.device)
    barred = (own[..., None] >> bit & 1 == 0).flatten(1)[:, :V]
    logits.masked_fill_(barred & (at >= 0)[:, None], float("-inf"))
