"""The device-side rows of the running requests: all that a step reads and writes.

One row per request, S rows in all. The host writes a row when its request is admitted and extends its
block table; everything else is updated by the step itself. Invariants: `tokens[r, :num_tokens[r]]`
are committed tokens only; the K/V of position num_tokens - 1 and beyond are garbage until a step
computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .config import SpecConfig
from .kernels.codes import MAX_DRAFTS, MAX_STOP_IDS, MAX_TREE_WIDTH, RULES
from .kernels.sampling.sample import Params
from .kernels.speculation.commit import RUNNING
from .request import Request

REHEARSAL_PERIOD = 7


class State:
    """Row tensors, all on `device`; see `kernels` for what each operation reads.

    Attributes:
        tokens: [S, max_len] int32, prompt and output.
        num_tokens, max_len: [S] int32, committed tokens; the length at which the request ends.
        block_table: [S, max_blocks] int32.
        finished: [S] int8, a code of `kernels.commit`.
        limit, min_n, max_n, width: [S] int32, the request's own K, n-gram lengths and tree width.
        rule: [S] int8, how its drafts are accepted, a code of `kernels.accept`.
        params: sampling parameters and what the penalties count.
    """

    def __init__(
        self, num_rows: int, max_len: int, max_blocks: int, vocab_size: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        S, f32 = num_rows, torch.float32
        self.device = device
        self.tokens = zeros(S, max_len)
        self.num_tokens = zeros(S)
        self.max_len = zeros(S)
        self.block_table = zeros(S, max_blocks)
        self.finished = zeros(S, dtype=torch.int8)
        self.limit, self.min_n, self.max_n, self.width = zeros(S), zeros(S), zeros(S), zeros(S)
        self.rule = zeros(S, dtype=torch.int8)
        self.params = Params(
            temperature=zeros(S, dtype=f32),
            top_k=zeros(S),
            top_p=zeros(S, dtype=f32),
            min_p=zeros(S, dtype=f32),
            seed=zeros(S, dtype=torch.int64),
            min_len=zeros(S),
            stop_ids=zeros(S, MAX_STOP_IDS),
            repetition=zeros(S, dtype=f32),
            presence=zeros(S, dtype=f32),
            frequency=zeros(S, dtype=f32),
            shaped=zeros(S, dtype=torch.bool),
            bias=zeros(S, vocab_size, dtype=f32),
            in_prompt=zeros(S, vocab_size, dtype=torch.bool),
            output_counts=zeros(S, vocab_size),
        )

    def admit(self, request: Request, spec: SpecConfig) -> None:
        """Write everything about a request into its row."""
        r, asked, rows = request.row, request.params, self.params
        self.tokens[r, : request.num_tokens] = self._ids(request.tokens)
        self.num_tokens[r] = request.num_tokens
        self.max_len[r] = request.max_len
        self.finished[r] = RUNNING
        own = asked.num_speculative_tokens
        self.limit[r] = spec.max_k if own is None else min(own, spec.max_k)
        self.min_n[r], self.max_n[r] = spec.prompt_lookup_min, spec.prompt_lookup_max
        self.width[r] = min(asked.tree_width or spec.tree_width, spec.tree_width)
        self.rule[r] = RULES.index(asked.acceptance or spec.acceptance)
        self.write_blocks(request)
        for name, value in (
            ("temperature", asked.temperature),
            ("top_k", max(asked.top_k, 0)),
            ("top_p", asked.top_p),
            ("min_p", asked.min_p),
            ("seed", request.seed),
            ("min_len", min(len(request.prompt_ids) + asked.min_tokens, request.max_len)),
            ("repetition", asked.repetition_penalty),
            ("presence", asked.presence_penalty),
            ("frequency", asked.frequency_penalty),
            ("shaped", asked.shapes_logits),
        ):
            getattr(rows, name)[r] = value
        rows.stop_ids[r] = -1
        if request.stop_ids:
            rows.stop_ids[r, : len(request.stop_ids)] = self._ids(request.stop_ids)
        if asked.shapes_logits:
            self._write_history(request)

    def _write_history(self, request: Request) -> None:
        """The vocabulary-wide rows that only penalties and bias read."""
        r, rows = request.row, self.params
        rows.bias[r], rows.in_prompt[r], rows.output_counts[r] = 0, False, 0
        if request.params.logit_bias:
            ids, values = zip(*request.params.logit_bias.items(), strict=True)
            bias = torch.tensor(values, dtype=torch.float32, device=self.device)
            rows.bias[r, self._ids(ids).long()] = bias
        rows.in_prompt[r, self._ids(request.prompt_ids).long()] = True
        output = self._ids(request.output_ids).long()
        rows.output_counts[r].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def write_blocks(self, request: Request) -> None:
        """Write the request's block table. Entries beyond its blocks repeat the last one, so that
        whatever reads them and masks the result reads nothing of other requests."""
        table = self.block_table[request.row]
        table[: len(request.blocks)] = self._ids(request.blocks)
        table[len(request.blocks) :] = request.blocks[-1]

    @contextmanager
    def rehearsal(self, count: int, context: int, num_blocks: int) -> Iterator[None]:
        """Fill the first `count` rows with greedy requests of `context` tokens of periodic text, which
        n-gram lookup drafts in full, on pages spread over the cache; empty them at the end."""
        length, max_blocks = self.tokens.shape[1], self.block_table.shape[1]
        text = torch.arange(length, dtype=torch.int32, device=self.device) % REHEARSAL_PERIOD
        pages = torch.arange(count * max_blocks, device=self.device) % num_blocks
        rows = slice(0, count)
        self.tokens[rows] = text
        self.block_table[rows] = pages.view(count, max_blocks).int()
        self.num_tokens[rows] = max(min(context, length - MAX_DRAFTS - 1), 1)
        self.max_len[rows], self.limit[rows] = length, MAX_DRAFTS
        self.min_n[rows], self.max_n[rows], self.width[rows] = 1, 1, MAX_TREE_WIDTH
        self.params.stop_ids[rows] = -1
        try:
            yield
        finally:
            for table in (self.num_tokens, self.max_len, self.limit, self.block_table, self.finished):
                table[rows] = 0

    def _ids(self, values: list[int] | tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
