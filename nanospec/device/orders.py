"""What the engine and the worker (`worker.py`) exchange: requests, orders of steps, results, times; and how
requests are written into their rows on the device (`kernels/table.py`).

Requests and orders are plain data, so that they may go to several processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..config import GREEDY_BELOW, SamplingParams, SpecConfig
from ..kernels import EXACT, RULES, RUNNING
from ..kernels.speculation.report import Logprobs, RowReport, decode
from ..kernels.table import Table
from ..kernels.transfer import upload, write
from ..outputs import Logprob

STAGES = ("prefill", "propose", "forward", "verify", "wait", "host")
"""What the time of steps is split by. A captured step is one piece: "wait" lasts until its results arrive."""


class Admission(NamedTuple):
    """A request that gets a row.

    Attributes:
        tokens: prompt and, after a preemption, output; `num_prompt` of them are the prompt.
        max_len: the length at which it ends.
        blocks: its pages, of which the first `num_cached` hold the K/V of its text already.
        stop_ids: tokens that end it.
        constrained: whether an extension constrains its output, and makes all its drafts.
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
    max_k: int  # the most drafts that it gets in a step
    constrained: bool = False


class Pages(NamedTuple):
    """The pages of a request row, of which those from `num_kept` on are new to it; its text has at least
    `num_tokens` tokens."""

    row: int
    num_tokens: int
    blocks: list[int]
    num_kept: int


class StepOrder(NamedTuple):
    """A step of B request rows.

    Attributes:
        rows: [B].
        logprobs: [B] how many of the likeliest tokens to report, -1 for no log-probabilities.
        drafting: rows for which drafters make drafts.
        k, last_k: the most drafts of a row, and from the last drafter, which may run a model.
        grown: rows that got further pages.
        extra: the value of `plan` of each extension.
    """

    rows: list[int]
    logprobs: list[int]
    drafting: list[int]
    k: int
    last_k: int
    grown: list[Pages]
    extra: Sequence[Any] = ()


class RowResult(NamedTuple):
    """The result of a step for a row; log-probabilities of its tokens, if they were asked for."""

    report: RowReport
    logprobs: list[dict[int, Logprob]] | None


class Flight(NamedTuple):
    """A step that has been queued. `lines` waits for its report, see `report.decode`."""

    lines: Callable[[], list[list[int]]]
    logprobs: Logprobs | None
    num_top: list[int]  # `StepOrder.logprobs`

    def results(self) -> list[RowResult]:
        """Wait for the step; return a result for each of its rows."""
        reports = decode(self.lines())
        columns = () if self.logprobs is None else (column.tolist() for column in self.logprobs)
        entries: Iterator[Any] = zip(*columns, strict=True)
        return [
            RowResult(report, None if n < 0 else [as_dict(t, next(entries), n) for t in report.tokens])
            for report, n in zip(reports, self.num_top, strict=True)
        ]


def as_dict(token: int, entry: tuple[float, int, list[float], list[int]], num_top: int) -> dict[int, Logprob]:
    """Return the log-probability of a token, then the `num_top` likeliest. `entry`: the token's
    log-probability and rank, and the values and ids of the likeliest."""
    logprob, rank, top, ids = entry
    logprobs = {token: Logprob(logprob, rank)}
    for i in range(min(num_top, len(top))):  # of a tiny vocabulary there may be fewer
        if top[i] == float("-inf"):  # left out by a sampling parameter, as are all that follow
            break
        logprobs.setdefault(ids[i], Logprob(top[i], i + 1))
    return logprobs


class Stopwatch:
    """Adds up the `seconds` of `with` blocks; `contextmanager` would take some 10 us of a step."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def write_row(table: Table, request: Admission, spec: SpecConfig) -> None:
    """Write everything about a request into its row, but its pages."""
    r, params = request.row, request.params
    write(table.tokens, r, request.tokens)
    write(table.stop_ids, r, (*request.stop_ids, -1)[: table.num_stops], end=table.num_stops)
    for column, value in (
        (table.num_tokens, len(request.tokens)),
        (table.max_len, request.max_len),
        (table.finished, RUNNING),
        (table.limit, 0 if request.constrained else request.max_k),
        (table.min_n, spec.prompt_lookup_min),
        (table.max_n, spec.prompt_lookup_max),
        (table.width, min(params.tree_width or spec.tree_width, spec.tree_width)),
        (table.rule, EXACT if request.constrained else RULES.index(params.acceptance or spec.acceptance)),
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


def method_of(report: RowReport, methods: Sequence[str]) -> str:
    """Return the name of the drafter of a row's drafts, "" without any. Raises ValueError if it is out of
    range, as is a `match_len` below 0; on a GPU, `propose` cannot check them without waiting."""
    drafter, match_len = report.drafter, report.match_len
    if drafter > max(len(methods) - 1, 0) or match_len < 0:
        name = methods[drafter if drafter < len(methods) else 0]  # `methods.propose` sets all codes above 0
        given = f"{name}.propose gave drafter {drafter} and match_len {match_len}"
        raise ValueError(f"{given}; the first must be 0 or NO_DRAFTER, the second at least 0.")
    return methods[drafter] if report.num_drafted else ""


def _write_history(table: Table, request: Admission) -> None:
    """Write the vocabulary-wide rows that only penalties and bias read, from the tokens on the device."""
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
