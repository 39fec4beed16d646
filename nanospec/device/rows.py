"""What the host writes into the request rows (`kernels/table.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import GREEDY_BELOW, SpecConfig
from ..kernels import EXACT, RULES, RUNNING
from ..kernels.table import Table
from ..kernels.transfer import Write, upload, write
from .orders import Admission


class HostWrites:
    """What the host has to write before the next step, until `flush` sends all of it in one go."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], Write] = {}

    def set(self, column: Tensor, row: int, value: float) -> None:
        """Write a row of a column [S]."""
        self._pending[id(column), row] = column, row, 0, 1, (value,)

    def put(
        self, tensor: Tensor, row: int, values: Sequence[float], first: int = 0, end: int | None = None
    ) -> None:
        """Write places `first` .. `end` of a row of a tensor [S, width], the last value repeated up to the
        end (default: each once). What an earlier call has for the same row counts before `first` only."""
        end = first + len(values) if end is None else end
        old = self._pending.get((id(tensor), row))
        if old is not None and old[2] < first:  # a block table that grows before it is sent
            _, _, begin, _, before = old
            first, values = begin, [*before[: first - begin], *values]
        self._pending[id(tensor), row] = tensor, row, first, end, values

    def flush(self) -> None:
        """Queue the writes. What is lost when this is interrupted was of requests that end with it."""
        if self._pending:
            pending, self._pending = self._pending, {}
            write(list(pending.values()))


def write_row(writes: HostWrites, table: Table, request: Admission, spec: SpecConfig) -> None:
    """Write everything about a request into its row, but what `write_history` does."""
    r, asked, own = request.row, request.params, request.params.num_speculative_tokens
    writes.put(table.tokens, r, request.tokens)
    write_blocks(writes, table, r, request.blocks)
    writes.put(table.stop_ids, r, (*request.stop_ids, -1)[: table.num_stops], end=table.num_stops)
    for column, value in (
        (table.num_tokens, len(request.tokens)),
        (table.max_len, request.max_len),
        (table.finished, RUNNING),
        (table.limit, 0 if request.constrained else spec.max_k if own is None else min(own, spec.max_k)),
        (table.min_n, spec.prompt_lookup_min),
        (table.max_n, spec.prompt_lookup_max),
        (table.width, min(asked.tree_width or spec.tree_width, spec.tree_width)),
        (table.rule, EXACT if request.constrained else RULES.index(asked.acceptance or spec.acceptance)),
        (table.temperature, asked.temperature if asked.temperature >= GREEDY_BELOW else 0),
        (table.top_k, max(asked.top_k, 0)),
        (table.top_p, asked.top_p),
        (table.min_p, asked.min_p),
        (table.seed, request.seed),
        (table.min_len, min(request.num_prompt + asked.min_tokens, request.max_len)),
        (table.repetition, asked.repetition_penalty),
        (table.presence, asked.presence_penalty),
        (table.frequency, asked.frequency_penalty),
        (table.penalized, asked.changes_logits),
    ):
        writes.set(column, r, value)


def write_blocks(writes: HostWrites, table: Table, row: int, blocks: Sequence[int], first: int = 0) -> None:
    """Write a row's block table from its block `first` on. Entries beyond its blocks repeat the last one, so
    that whatever reads them and masks the result reads nothing of other requests."""
    writes.put(table.block_table, row, blocks[first:], first, table.max_blocks)


def write_history(table: Table, request: Admission) -> None:
    """The vocabulary-wide rows that only penalties and bias read, from the tokens that are there already."""
    r, n, bias = request.row, request.num_prompt, request.params.logit_bias
    for column in (table.bias, table.in_prompt, table.output_counts):
        column[r].zero_()
    if bias:
        ids = upload(list(bias), torch.int64, table.device)
        table.bias[r].index_copy_(0, ids, upload(list(bias.values()), torch.float32, table.device))
    tokens = table.tokens[r, : len(request.tokens)]
    table.in_prompt[r].index_fill_(0, tokens[:n].long(), True)
    if len(tokens) > n:  # preempted before
        table.output_counts[r].index_add_(0, tokens[n:], torch.ones_like(tokens[n:]))
