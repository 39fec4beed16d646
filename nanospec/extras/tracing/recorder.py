"""The extension that writes a record for each step of each request, with rejected and unverified drafts.

The step, captured or not, writes its proposal to device rows, which are copied to the host afterwards. The
line of a row is

    length of its text | number of drafts | drafts | sources | parents     [2 + 3 W] int32

The length tells which step a line belongs to: a step without a proposal leaves the line of an earlier one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...device.devices import compute_info, current
from ...device.extension import Extension
from ...kernels.speculation.proposal import Proposal, num_valid
from ...kernels.table import Table
from ...kernels.transfer import to_host
from ...outputs import NOT_TRACED
from .trace import Record, StepRecord, Trace

if TYPE_CHECKING:
    from ...device.orders import RowResult
    from ...device.worker import Worker
    from ...engine.engine import Engine, Queued
    from ...engine.request import Request

MAX_REQUESTS = 64  # the latest, of which the recorder itself can tell

State = tuple[float | None, Callable[[], list[list[int]]]]
"""Of a queued step: `Policy.promised`, and a wait for the lines."""


class Guesses(NamedTuple):
    """What was proposed for a row; see `Proposal`. In a chain, the parent of a draft is the place before it:
    0, 1, ..."""

    drafts: list[int]
    sources: list[int]
    parents: list[int]


class Recorder(Extension):
    """Writes the records.

    Attributes:
        requests: the latest ones, finished or not.
        num_requests: of all.
    """

    always = True

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # by stage, when the step before had been collected
        self.requests: deque[Request] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0

    def attach(self, worker: Worker) -> None:
        self._worker = worker
        shape = worker.table.num_rows + 1, 2 + 3 * worker.max_k  # the last line is for padding
        self._lines = torch.zeros(shape, dtype=torch.int32, device=worker.device)

    def admit(self, row: int) -> None:
        self._lines[row].zero_()

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        k, row = proposal.drafts.shape[1], torch.where(rows >= 0, rows, table.num_rows)
        self._lines[row, 0] = table.num_tokens[rows.clamp(min=0)]
        self._lines[row, 1] = num_valid(proposal, proposal.num_drafts, table.vocab_size)
        chain = torch.arange(k, dtype=torch.int32, device=rows.device).expand(len(rows), k)
        parents = chain if proposal.parents is None else proposal.parents
        for column, values in enumerate((proposal.drafts, proposal.source, parents)):
            first = 2 + column * self._worker.max_k
            self._lines[row, first : first + k] = values.int()
        return proposal

    def start(self, engine: Engine) -> None:
        worker, self._tokenizer, self._policy = self._worker, engine.tokenizer, engine.policy
        self._costs = engine.policy.costs or worker.measure()
        spec, name = worker.config.spec, engine.tokenizer.name if engine.tokenizer else ""
        facts = {**compute_info(worker.model), "model": name, "method": spec.method}
        facts |= {"k": spec.num_speculative_tokens, "acceptance": spec.acceptance}
        self._about = {name: str(value) for name, value in facts.items()}

    def trace(self) -> Trace:
        """Return the trace of the latest requests."""
        outputs = [request.completion() for request in self.requests]
        return Trace.of(outputs, num_omitted=self.num_requests - len(outputs))

    def new(self, request: Request) -> None:
        prompt, arrival = request.prompt_ids, request.arrival_time
        request.extension_data = Record(self._tokenizer, self._about, request.id, prompt, arrival)
        self.requests.append(request)
        self.num_requests += 1

    def queued(self, rows: Sequence[int]) -> State:
        """Start copying the lines of rows to the host."""
        with current(self._worker.device):
            return self._policy.promised, to_host(self._lines[: max(rows) + 1])

    def collected(self, step: Queued, results: Sequence[RowResult], state: State) -> None:
        promised, lines = state[0], state[1]()
        seconds = {name: stage.seconds for name, stage in self._worker.stages.items()}
        ms = {stage: 1e3 * (now - self._seconds.get(stage, 0.0)) for stage, now in seconds.items()}
        self._seconds, now = seconds, time.perf_counter()
        plain_ms = (sum(ms.values()) - ms["prefill"] - ms["propose"]) * self._plain_share(step, results)
        for request, row, result in zip(step.requests, step.rows, results, strict=True):
            record: Record | None = request.extension_data
            if record is None or request.num_tokens == record.num_tokens:
                continue  # it had ended before
            report, made = result.report, self._guesses(lines[row], record.num_tokens)
            tokens = request.tokens[record.num_tokens :]
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
                    reason=self._reason(request, made, report.num_drafted, step.k, promised),
                    promised=promised,
                    plain_ms=plain_ms,
                )
            )

    def _guesses(self, line: list[int], length: int) -> Guesses:
        """Return what a step proposed for a text of so many tokens, from the line of its row."""
        width, count = self._worker.max_k, line[1] if line[0] == length else 0  # else it had no proposal
        return Guesses(*(line[2 + i * width : 2 + i * width + count] for i in range(3)))

    def _plain_share(self, step: Queued, results: Sequence[RowResult]) -> float:
        """Return the share of a step's time that it would take without drafts, as steps were timed."""
        B, context = len(step.rows), sum(request.num_tokens for request in step.requests)
        captured = bool(self._costs.captured)
        tokens = B * (1 + step.k) if captured else B + sum(result.report.num_drafted for result in results)
        return self._costs.cost(B, B, context) / self._costs.cost(B, tokens, context)

    def _reason(self, request: Request, made: Guesses, verified: int, k: int, promised: float | None) -> str:
        if self._worker.max_k == 0 or request.params.num_speculative_tokens == 0:
            return "off"
        if request.max_len - request.extension_data.num_tokens <= 1:
            return "end"
        if not made.drafts:
            return "does not pay" if k == 0 else "no match"
        if promised is None:
            return "fixed"
        if not verified:
            return "does not pay"
        return "pays" if promised > 1 else "probe"


def recorder_of(extensions: Sequence[Extension]) -> Recorder:
    """Return the recorder among extensions. Raises ValueError if there is none."""
    for extension in extensions:
        if isinstance(extension, Recorder):
            return extension
    raise ValueError(NOT_TRACED)


def walk(tokens: list[int], made: Guesses, verified: int) -> list[int]:
    """Return the places of the drafts among `tokens`: from each to the child that has the next token."""
    places: list[int] = []
    node = 0
    for token in tokens:
        children = (i + 1 for i in range(verified) if made.parents[i] == node and made.drafts[i] == token)
        node = next(children, -1)
        if node < 0:
            break
        places.append(node)
    return places
