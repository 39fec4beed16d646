"""What the host writes into the request rows (`kernels/table.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import SamplingParams, SpecConfig
from .kernels.codes import MAX_DRAFTS, MAX_TREE_WIDTH, RULES, RUNNING
from .kernels.table import Table

REHEARSAL_PERIOD = 7


@dataclass(frozen=True)
class Admission:
    """A request that gets a row: plain data, so that it can be sent anywhere.

    Attributes:
        tokens: prompt and, after a preemption, output; `num_prompt` of them are the prompt.
        max_len: the length at which it ends.
        blocks: its pages, of which the first `num_cached` hold the K/V of its text already.
        stop_ids: tokens that end it.
    """

    row: int
    tokens: list[int]
    num_prompt: int
    max_len: int
    blocks: list[int]
    num_cached: int
    seed: int
    stop_ids: tuple[int, ...]
    params: SamplingParams


def write_row(table: Table, request: Admission, spec: SpecConfig) -> None:
    """Write everything about a request into its row."""
    r, asked, own = request.row, request.params, request.params.num_speculative_tokens
    table.tokens[r, : len(request.tokens)] = _ids(table, request.tokens)
    write_blocks(table, r, request.blocks)
    table.stop_ids[r] = -1
    if request.stop_ids:
        table.stop_ids[r, : len(request.stop_ids)] = _ids(table, request.stop_ids)
    for column, value in (
        (table.num_tokens, len(request.tokens)),
        (table.max_len, request.max_len),
        (table.finished, RUNNING),
        (table.limit, spec.max_k if own is None else min(own, spec.max_k)),
        (table.min_n, spec.prompt_lookup_min),
        (table.max_n, spec.prompt_lookup_max),
        (table.width, min(asked.tree_width or spec.tree_width, spec.tree_width)),
        (table.rule, RULES.index(asked.acceptance or spec.acceptance)),
        (table.temperature, asked.temperature),
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
        column[r] = value
    if asked.changes_logits:
        _write_history(table, request)


def _write_history(table: Table, request: Admission) -> None:
    """The vocabulary-wide rows that only penalties and bias read."""
    r, n = request.row, request.num_prompt
    table.bias[r], table.in_prompt[r], table.output_counts[r] = 0, False, 0
    if request.params.logit_bias:
        ids, values = zip(*request.params.logit_bias.items(), strict=True)
        bias = torch.tensor(values, dtype=torch.float32, device=table.device)
        table.bias[r, _ids(table, ids)] = bias
    table.in_prompt[r, _ids(table, request.tokens[:n])] = True
    output = _ids(table, request.tokens[n:])
    table.output_counts[r].index_add_(0, output, torch.ones_like(output))


def write_blocks(table: Table, row: int, blocks: Sequence[int]) -> None:
    """Write a row's block table. Entries beyond its blocks repeat the last one, so that whatever reads them
    and masks the result reads nothing of other requests."""
    table.block_table[row, : len(blocks)] = _ids(table, blocks)
    table.block_table[row, len(blocks) :] = blocks[-1]


@contextmanager
def rehearsal(table: Table, count: int, context: int, num_blocks: int) -> Iterator[None]:
    """Fill the first `count` rows with greedy requests of `context` tokens of periodic text, which n-gram
    lookup drafts in full, on pages spread over the cache; empty them at the end."""
    length, device, rows = table.max_context, table.device, slice(0, count)
    pages = torch.arange(count * table.max_blocks, device=device) % num_blocks
    table.tokens[rows] = torch.arange(length, dtype=torch.int32, device=device) % REHEARSAL_PERIOD
    table.block_table[rows] = pages.view(count, table.max_blocks).int()
    table.num_tokens[rows] = max(min(context, length - MAX_DRAFTS - 1), 1)
    table.max_len[rows], table.limit[rows] = length, MAX_DRAFTS
    table.min_n[rows], table.max_n[rows], table.width[rows] = 1, 1, MAX_TREE_WIDTH
    table.stop_ids[rows] = -1
    try:
        yield
    finally:
        for column in (table.num_tokens, table.max_len, table.limit, table.block_table, table.finished):
            column[rows] = 0


def _ids(table: Table, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=table.device)
