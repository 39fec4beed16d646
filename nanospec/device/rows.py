"""Write requests to their rows on the device (`kernels/table.py`)."""

import torch

from ..config import GREEDY_BELOW, SpecConfig
from ..kernels import RUNNING
from ..kernels.table import Table
from ..kernels.transfer import upload, write
from .messages import Admission


def write_row(table: Table, request: Admission, spec: SpecConfig) -> None:
    """Write a request to its row, except for its blocks."""
    r, params = request.row, request.params
    write(table.reference, r, request.reference)
    write(table.tokens, r, request.tokens)
    write(table.stop_ids, r, (*request.stop_ids, -1)[: table.num_stops], end=table.num_stops)
    for column, value in (
        (table.num_tokens, len(request.tokens)),
        (table.num_reference, len(request.reference)),
        (table.max_len, request.max_len),
        (table.finished, RUNNING),
        (table.max_k, 0 if request.constrained else request.max_k),
        (table.min_n, spec.prompt_lookup_min),
        (table.max_n, spec.prompt_lookup_max),
        (table.tree_width, min(params.tree_width or spec.tree_width, spec.tree_width)),
        (table.typical, not request.constrained and (params.acceptance or spec.acceptance) == "typical"),
        (table.temperature, params.temperature if params.temperature >= GREEDY_BELOW else 0),
        (table.top_k, max(params.top_k, 0)),
        (table.top_p, params.top_p),
        (table.min_p, params.min_p),
        (table.seed, request.seed),
        (table.min_len, min(request.num_prompt + params.min_tokens, request.max_len)),
        (table.repetition, params.repetition_penalty),
        (table.presence, params.presence_penalty),
        (table.frequency, params.frequency_penalty),
        (table.penalized, params.changes_logits),
    ):
        column[r].fill_(value)
    if params.changes_logits:
        _write_history(table, request)


def _write_history(table: Table, request: Admission) -> None:
    """Write the columns of vocabulary size, which only penalties and bias read, from tokens on the device."""
    r, n, bias = request.row, request.num_prompt, request.params.logit_bias
    for column in (table.bias, table.in_prompt, table.output_counts):
        column[r].zero_()
    if bias:
        ids = upload(list(bias), torch.int64, table.device)
        table.bias[r].index_copy_(0, ids, upload(list(bias.values()), torch.float32, table.device))
    tokens = table.tokens[r, : len(request.tokens)]
    table.in_prompt[r].index_fill_(0, tokens[:n].long(), True)
    if len(tokens) > n:  # was preempted
        table.output_counts[r].index_add_(0, tokens[n:], torch.ones_like(tokens[n:]))
