"""The data exchanged by the engine and the worker (`worker.py`): admissions, step inputs and results."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingParams
from ..drafters.policy import Choice
from ..kernels import NO_DRAFTER
from ..kernels.speculation.report import Logprobs, RowReport, decode
from ..outputs import Logprob


class Admission(NamedTuple):
    """A request to be written to a row; see `Request` for the other fields."""

    row: int
    tokens: list[int]  # prompt and, after a preemption, output; the first `num_prompt` are the prompt
    num_prompt: int
    reference: NDArray[np.int32]  # other texts for n-gram lookup, see `kernels/speculation/ngram.py`
    max_len: int
    blocks: list[int]  # the first `num_cached` already hold the K/V of their tokens
    num_cached: int
    seed: int
    stop_ids: tuple[int, ...]
    params: SamplingParams
    max_k: int
    constrained: bool  # whether an extension constrains the output; only extensions propose drafts then


class RowBlocks(NamedTuple):
    """All KV cache blocks of a request row, which has at least `num_tokens` tokens. The first `num_kept`
    blocks are unchanged, the others are new."""

    row: int
    num_tokens: int
    blocks: list[int]
    num_kept: int


class StepInput(NamedTuple):
    """The input of a step over B request rows."""

    rows: list[int]  # [B]
    logprobs: list[int]  # [B], number of most likely tokens to report, -1 for no log-probabilities
    drafting: list[int]  # rows for which drafters propose drafts
    choice: Choice  # K, and the estimates by which the drafts to verify are chosen
    new_blocks: list[RowBlocks]  # rows that got more blocks
    extra: Sequence[Any] = ()  # the value returned by `plan` of each extension


class RowResult(NamedTuple):
    """The result of a step for a row, and the log-probabilities of each emitted token if requested."""

    report: RowReport
    logprobs: list[dict[int, Logprob]] | None


class PendingStep(NamedTuple):
    """A queued step. `report` waits for it and returns the report of its rows, see `decode`."""

    report: Callable[[], list[list[int]]]
    logprobs: Logprobs | None
    num_top: list[int]  # `StepInput.logprobs`

    def results(self) -> list[RowResult]:
        """Wait for the step and return a result for each of its rows."""
        reports = decode(self.report())
        columns = () if self.logprobs is None else (column.tolist() for column in self.logprobs)
        entries: Iterator[Any] = zip(*columns, strict=True)
        return [
            RowResult(report, None if n < 0 else [logprobs_by_id(t, next(entries), n) for t in report.tokens])
            for report, n in zip(reports, self.num_top, strict=True)
        ]


def logprobs_by_id(
    token: int, entry: tuple[float, int, list[float], list[int]], num_top: int
) -> dict[int, Logprob]:
    """Return the log-probabilities of a token and of the `num_top` most likely ones. `entry`: log-probability
    and rank of the token, then log-probabilities and ids of the most likely tokens."""
    logprob, rank, top, ids = entry
    logprobs = {token: Logprob(logprob, rank)}
    for i in range(min(num_top, len(top))):  # a tiny vocabulary may have fewer
        if top[i] == float("-inf"):  # forbidden by a mask, as are all that follow
            break
        logprobs.setdefault(ids[i], Logprob(top[i], i + 1))
    return logprobs


def drafter_name(report: RowReport, names: Sequence[str]) -> str:
    """Return the name of the drafter of a row's drafts, "" without drafts. Raises ValueError if the drafter
    or the match length is out of range, which `propose` cannot check on a GPU without waiting."""
    drafter, match_len = report.drafter, report.match_len
    if not NO_DRAFTER <= drafter < max(len(names), 1) or match_len < 0:
        name = names[drafter if 0 <= drafter < len(names) else 0]  # `propose` replaces those of others
        error = f"{name}.propose returned drafter {drafter} and match_len {match_len}"
        raise ValueError(f"{error}; drafter must be 0 or NO_DRAFTER, match_len at least 0.")
    return names[drafter] if report.num_drafted else ""
