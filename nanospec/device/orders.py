"""What the host and the worker (`worker.py`) tell each other of a step. Orders are plain data, so that they
may go to several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..engine.request import Logprob
from ..kernels.sampling.logprobs import Logprobs
from ..kernels.speculation.report import RowReport


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
        rows, limits: [B] who takes part, and for how many drafts of each drafters are asked at most.
        k, last_k: the most drafts of a row; the most that the last drafter makes, if steps are not captured.
        grown: rows whose pages have become more.
        logprobs: [B] how many likeliest tokens are to be reported for each row, -1: none at all.
        extra: for each extension, what its `plan` gave.
    """

    rows: list[int]
    limits: list[int]
    k: int
    last_k: int
    grown: list[Pages]
    logprobs: list[int]
    extra: Sequence[Any] = ()


class RowResult(NamedTuple):
    """What a step gave one row; log-probabilities of its tokens, if they were asked for."""

    report: RowReport
    logprobs: list[dict[int, Logprob]] | None


class Flight(NamedTuple):
    """A step that has been queued: waits for its reports, and what else was asked. A ticket for `fetch`."""

    reports: Callable[[], list[RowReport]]
    logprobs: Logprobs | None
    wanted: list[int]
