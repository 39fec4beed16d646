"""A record for each step of each request, and the extension that writes it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...device.devices import current
from ...device.extension import Extension
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from .drafts import DraftLines, Guesses
from .trace import Origin, Record, StepRecord, Trace

if TYPE_CHECKING:
    from ...device.admission import HostWrites
    from ...device.orders import RowResult
    from ...device.worker import Worker
    from ...engine.engine import Engine, Queued
    from ...engine.request import Request

MAX_REQUESTS = 64  # the latest, of which the recorder itself can tell


class Recorder(Extension):
    """Writes the records.

    Attributes:
        requests: the latest ones, finished or not.
        num_requests: of all.
    """

    always = True

    def __init__(self) -> None:
        self._lines: DraftLines | None = None
        self._seconds: dict[str, float] = {}  # by stage, when the step before had been collected
        self.requests: deque[Request] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0

    def attach(self, worker: Worker) -> None:
        self._worker = worker
        if worker.max_k:
            self._lines = DraftLines(worker.table, worker.max_k)

    def admit(self, writes: HostWrites, row: int) -> None:
        if self._lines is not None:
            self._lines.clear(row)

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        if self._lines is not None:
            self._lines.write(table, rows, proposal)
        return proposal

    def start(self, engine: Engine) -> None:
        worker, tokenizer = self._worker, engine.tokenizer
        self._costs = engine.policy.costs or worker.measure()
        spec, runs = worker.config.spec, worker.runs()
        about = {name: str(value) for name, value in runs.items()}
        about |= {"model": tokenizer.name if tokenizer else "", "method": spec.method}
        about |= {"k": str(spec.num_speculative_tokens), "acceptance": spec.acceptance}
        self._origin = Origin(tokenizer, about)

    def trace(self) -> Trace:
        """Return the trace of the latest requests."""
        outputs = [request.completion() for request in self.requests]
        return Trace.of(outputs, num_omitted=self.num_requests - len(outputs))

    def add(self, request: Request) -> None:
        request.kept = Record(self._origin, request.id, request.prompt_ids, request.arrival_time)
        self.requests.append(request)
        self.num_requests += 1

    def queued(self, rows: Sequence[int]) -> Callable[[], list[Guesses]] | None:
        if self._lines is None:
            return None
        with current(self._worker.device):
            return self._lines.fetch(rows)

    def collected(
        self, step: Queued, results: Sequence[RowResult], kept: Callable[[], list[Guesses]] | None
    ) -> None:
        seconds = dict(self._worker.stages.seconds)
        ms = {stage: 1e3 * (now - self._seconds.get(stage, 0.0)) for stage, now in seconds.items()}
        self._seconds, now = seconds, time.perf_counter()
        found: list[Guesses | None] = [None] * len(results) if kept is None else [*kept()]
        plain_ms = (sum(ms.values()) - ms["prefill"] - ms["propose"]) * self._plain_share(step, results)
        for request, result, made in zip(step.requests, results, found, strict=True):
            record: Record | None = request.kept
            if record is None or request.num_tokens == record.num_tokens:
                continue  # it had ended before
            report, before = result.report, record.num_tokens
            if made is None or made.length != before:  # nobody was asked to guess
                made = Guesses(before, [], [], [])
            tokens = request.tokens[before:]
            record.add(
                StepRecord(
                    at=now - record.arrival,
                    ms=ms,
                    batch=len(step.rows),
                    tokens=tokens,
                    method=self._worker.methods[report.drafter] if made.drafts else "",
                    match_len=report.match_len if made.drafts else 0,
                    drafts=made.drafts,
                    sources=made.sources,
                    parents=made.parents,
                    verified=report.num_drafted,
                    accepted=walk(tokens, made, report.num_drafted),
                    reason=self._reason(request, step, made, report.num_drafted),
                    promised=step.promised,
                    plain_ms=plain_ms,
                )
            )

    def _plain_share(self, step: Queued, results: Sequence[RowResult]) -> float:
        """Return the share of a step's time that it would take without drafts, as steps were timed."""
        B, context = len(step.rows), sum(request.num_tokens for request in step.requests)
        captured = bool(self._costs.captured)
        tokens = B * (1 + step.k) if captured else B + sum(result.report.num_drafted for result in results)
        return self._costs.cost(B, B, context) / self._costs.cost(B, tokens, context)

    def _reason(self, request: Request, step: Queued, made: Guesses, verified: int) -> str:
        if self._worker.max_k == 0 or request.params.num_speculative_tokens == 0:
            return "off"
        if request.max_len - made.length <= 1:
            return "end"
        if not made.drafts:
            return "does not pay" if step.k == 0 else "no match"
        if step.promised is None:
            return "fixed"
        if not verified:
            return "does not pay"
        return "pays" if step.promised > 1 else "probe"


def recorder_of(extensions: Sequence[Extension]) -> Recorder | None:
    """Return the recorder among extensions, if there is one."""
    return next((each for each in extensions if isinstance(each, Recorder)), None)


def walk(tokens: list[int], made: Guesses, verified: int) -> list[int]:
    """The places of the guesses among `tokens`: from each to the child that carries the next token."""
    places: list[int] = []
    node = 0
    for token in tokens:
        children = (i + 1 for i in range(verified) if made.parents[i] == node and made.drafts[i] == token)
        node = next(children, -1)
        if node < 0:
            break
        places.append(node)
    return places
