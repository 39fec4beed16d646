"""What the engine and the worker (`worker.py`) exchange: orders of steps, results, the time of stages.

Orders are plain data, so that they may go to several processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..kernels.sampling.logprobs import Logprobs
from ..kernels.speculation.report import RowReport
from ..outputs import Logprob

STAGES = ("prefill", "propose", "forward", "verify", "wait", "host")


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
    """What a step gave one row; log-probabilities of its tokens, if they were asked for."""

    report: RowReport
    logprobs: list[dict[int, Logprob]] | None


class Flight(NamedTuple):
    """A step that has been queued: waits for its reports, and what else was asked. A ticket for `fetch`."""

    reports: Callable[[], list[RowReport]]
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
    """Splits the time of all steps by what was done; a captured step is one piece, "wait" is the time until
    its results arrive. `with stopwatch("forward"): ...` adds to `seconds`."""

    def __init__(self) -> None:
        self._stages = {name: _Stage(self, name) for name in STAGES}
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def __call__(self, stage: str) -> _Stage:
        return self._stages[stage]


class _Stage:
    """The time of a `with` block, one at a time: `contextmanager` would take some 10 us of a step."""

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._watch.seconds[self._name] += time.perf_counter() - self._start
