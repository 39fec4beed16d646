"""What the engine and the worker (`worker.py`) exchange: requests, orders of steps, results, times.

Requests and orders are plain data, so that they may go to several processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..config import SamplingParams
from ..kernels.sampling.logprobs import Logprobs
from ..kernels.speculation.report import RowReport
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
    constrained: bool = False


class Pages(NamedTuple):
    """The pages of a request row, of which those from `num_kept` on are new to it; its text has at least
    `num_tokens` tokens."""

    row: int
    num_tokens: int
    blocks: list[int]
    num_kept: int


class RowOrder(NamedTuple):
    """A request row in a step.

    Attributes:
        limit: the most drafts that the request allows.
        asked: the most drafts to ask drafters for; 0 if an extension makes the drafts.
        logprobs: how many of the likeliest tokens to report, -1 for no log-probabilities.
    """

    row: int
    limit: int
    asked: int
    logprobs: int


class StepOrder(NamedTuple):
    """A step of B request rows.

    Attributes:
        steps: [B] what each row does.
        k, last_k: the most drafts of a row, and of the last drafter, which may run a model.
        grown: rows that got further pages.
        extra: the value of `plan` of each extension.
    """

    steps: list[RowOrder]
    k: int
    last_k: int
    grown: list[Pages]
    extra: Sequence[Any] = ()

    @property
    def rows(self) -> list[int]:
        """The request rows [B]."""
        return [step.row for step in self.steps]


class RowResult(NamedTuple):
    """The result of a step for a row; log-probabilities of its tokens, if they were asked for."""

    report: RowReport
    logprobs: list[dict[int, Logprob]] | None


class Flight(NamedTuple):
    """A step that has been queued, for `fetch`. `lines` waits for its report, see `report.decode`."""

    lines: Callable[[], list[list[int]]]
    logprobs: Logprobs | None
    wanted: list[int]


def as_dict(token: int, entry: tuple[float, int, list[float], list[int]], num_top: int) -> dict[int, Logprob]:
    """The token itself first, then the `num_top` likeliest. `entry`: the token's log-probability and rank,
    and the values and ids of the likeliest."""
    own, rank, top, ids = entry
    found = {token: Logprob(own, rank)}
    for i in range(min(num_top, len(top))):  # of a tiny vocabulary there may be fewer
        if top[i] == float("-inf"):  # left out by a sampling parameter, as are all that follow
            break
        found.setdefault(ids[i], Logprob(top[i], i + 1))
    return found


class Stopwatch:
    """Adds up the `seconds` of `with` blocks; `contextmanager` would take some 10 us of a step."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start
