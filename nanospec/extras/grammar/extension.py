"""Structured output as an extension: the host supplies drafts and masks for rows with a `response_format`.

For each request row, the device holds the drafts of `grammar.Guide` and the offset of the row's masks in
`allowed`. A step uses these drafts instead of the drafter's, as a chain even in steps with trees, and masks
the logits. Steps with constrained rows have CUDA graphs of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config import SamplingParams
from ...device.extension import Extension
from ...engine.request import Request
from ...kernels import NO_DRAFTER
from ...kernels.batch import Batch
from ...kernels.launch import use_native
from ...kernels.native import call
from ...kernels.speculation.proposal import Proposal, merge
from ...kernels.table import Table
from ...kernels.transfer import upload, write
from ...text.tokenizer import Tokenizer

if TYPE_CHECKING:  # imported at runtime by the first request with a `response_format`
    from .grammar import Draft, Grammars

PLAN_SECONDS = 0.02  # time limit for the drafts of a step, as some masks take milliseconds to compute


class Grammar(Extension):
    """Constrains the outputs of requests with a `response_format`.

    Attributes:
        lines: [S, 3 + 2 K] int32, for each request row: the offset of its masks in `allowed` (-1 without a
            grammar), the number of drafts, their match length, the drafts and their sources.
        allowed: [M, W] int32, the masks of a step. With CUDA graphs, allocated once, by the first request
            with a grammar, since captured steps read a fixed address.
    """

    drafter_name = "grammar"

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Create the extension. `tokenizer` is None in a process without an engine."""
        self._tokenizer = tokenizer

    def attach(self, worker: Any) -> None:
        self._worker = proxy(worker)  # captured steps refer to their extensions and outlive the worker
        shape = worker.table.num_rows, 3 + 2 * worker.max_k
        self.lines = torch.full(shape, -1, dtype=torch.int32, device=worker.table.device)
        self.allowed = self.lines.new_empty(0, 0)

    @cached_property
    def _grammars(self) -> Grammars:
        if self._tokenizer is None:
            raise ValueError("response_format needs a tokenizer, but this engine was created without one.")
        from .grammar import Grammars

        return Grammars(self._tokenizer, self._worker.model.config.vocab_size)

    def admit(self, row: int) -> None:
        self.lines[row, :1].fill_(-1)  # set by every step of a constrained request

    def send(self, value: Sequence[tuple[int, Draft]], k: int) -> None:
        bits = [mask for _, draft in value for mask in draft.masks[: k + 1]]
        masks = torch.frombuffer(bytearray().join(bits), dtype=torch.int32).view(len(bits), -1)
        if (graphs := self._worker.graphs) is None:
            self.allowed = upload(masks, torch.int32, self.lines.device)
        else:
            if not len(self.allowed):
                self.allowed = self.lines.new_zeros(graphs.max_tokens, masks.shape[1])
            upload(masks, torch.int32, self.lines.device, out=self.allowed[: len(masks)])
        begin = 0
        for row, draft in value:
            tokens, sources = draft.tokens[:k], draft.sources[:k]
            unused = [0] * (self._worker.max_k - len(tokens))
            line = begin, len(tokens), draft.match_len, *tokens, *unused, *sources, *unused
            write(self.lines, row, line)
            begin += len(tokens) + 1

    def _first_of(self, rows: Tensor) -> Tensor:
        """Return the offsets of the rows' masks in `allowed`, or -1 for padding and unconstrained rows."""
        return torch.where(rows >= 0, self.lines[rows.clamp(min=0), 0], -1)

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        k, lines = proposal.drafts.shape[1], self.lines[rows.clamp(min=0)]
        first, count, match_len = lines[:, :3].unbind(1)
        tokens, sources = (part[:, :k] for part in lines[:, 3:].chunk(2, 1))
        code = self._worker.drafter_names.index(self.drafter_name)
        drafter = torch.full_like(count, code).masked_fill(count <= 0, NO_DRAFTER)
        drafts = Proposal(tokens, count, sources, match_len, drafter)
        return merge((rows >= 0) & (first >= 0), drafts, proposal)

    def process_logits(self, logits: Tensor, batch: Batch) -> None:
        token = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        b = torch.searchsorted(batch.q_start, token, right=True) - 1  # the batch row of each token
        i, first = token - batch.q_start[b], self._first_of(batch.rows)[b]
        mask(logits, self.allowed, torch.where((first >= 0) & (i < batch.q_len[b]), first + i, -1).int())

    def check(self, params: SamplingParams) -> None:
        if params.response_format is not None:
            self._grammars.check(params)

    def on_request(self, request: Request) -> None:
        if (fmt := request.params.response_format) is not None and fmt["type"] != "text":
            request.constraint, request.stats.acceptance = self._grammars.guide(fmt), "exact"

    def plan(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[tuple[int, Draft]] | None:
        end, spec, drafts = time.perf_counter() + PLAN_SECONDS, self._worker.config.spec, []
        lengths = spec.prompt_lookup_min, spec.prompt_lookup_max
        with self._worker.stages["propose"]:
            for request, k in zip(requests, max_drafts, strict=True):
                if request.constraint is not None:
                    guide: Any = request.constraint  # a `Guide`, set by `on_request`
                    draft = guide.plan(request.tokens, k, *lengths, end, request.reference)
                    drafts.append((request.row, draft))
        return drafts or None


def mask(logits: Tensor, allowed: Tensor, at: Tensor) -> None:
    """Set the logits [T, V] of forbidden tokens to -inf, in place.

    Args:
        allowed: [M, W] int32 bit masks. Bit i % 32 of word i // 32 is set if token i is allowed; tokens
            beyond the last word are forbidden.
        at: [T] int32, the index in `allowed` of the mask for each row of the logits, or -1 for no mask.
    """
    V, words = logits.shape[1], allowed.shape[1]
    if use_native(logits, torch.bfloat16, torch.float32):
        matrix = logits, logits.stride(0), logits.dtype == torch.bfloat16, *logits.shape
        call("nanospec_mask", *matrix, allowed, allowed.stride(0), words, at, torch.get_num_threads())
        return
    masks = F.pad(allowed[at.clamp(min=0).long()], (0, max(-(-V // 32) - words, 0))).view(torch.uint8)
    bit = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = (masks[..., None] >> bit & 1 == 0).flatten(1)[:, :V]
    logits.masked_fill_(forbidden & (at >= 0)[:, None], float("-inf"))
