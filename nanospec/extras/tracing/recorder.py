"""An extension that records each step of each request, including rejected and unverified drafts.

Each step, captured or not, writes its proposal to a device buffer with one line per row, which is copied to
the host afterwards. The format of a line is

    number of tokens | number of drafts | drafts | sources | parents     [2 + 3 W] int32

The number of tokens identifies the step: a step without a proposal leaves the line of an earlier step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from ...device.extension import Extension
from ...device.hardware import compute_info, use_device
from ...device.messages import RowResult
from ...device.worker import Worker
from ...engine.engine import Engine, QueuedStep
from ...engine.request import Request
from ...kernels.speculation.proposal import Proposal, parents_of
from ...kernels.speculation.trim import num_valid
from ...kernels.table import Table
from ...kernels.transfer import to_host
from ...outputs import NOT_TRACED
from .trace import Record, StepRecord, Trace

MAX_REQUESTS = 64  # most recent requests kept for `Recorder.trace`


class Recorder(Extension):
    """Records the steps of an engine.

    Attributes:
        requests: the latest requests, finished or not.
        num_requests: the total number of requests, including those no longer in `requests`.
    """

    always = True

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # seconds per stage until the previous step was collected
        self.requests: deque[Request] = deque(maxlen=MAX_REQUESTS)
        self.num_requests = 0

    def attach(self, worker: Worker) -> None:
        self._worker: Worker = proxy(worker)  # captured steps refer to extensions and outlive the worker
        shape = worker.table.num_rows + 1, 2 + 3 * worker.max_k  # the last line is for padding rows
        self._lines = torch.zeros(shape, dtype=torch.int32, device=worker.device)

    def admit(self, row: int) -> None:
        self._lines[row].zero_()

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        k, row = proposal.drafts.shape[1], torch.where(rows >= 0, rows, table.num_rows)
        self._lines[row, 0] = table.num_tokens[rows.clamp(min=0)]
        self._lines[row, 1] = num_valid(proposal, proposal.num_drafts, table.vocab_size)
        lines = torch.stack((proposal.drafts, proposal.source, parents_of(proposal)), 1)  # [B, 3, k]
        self._lines[:, 2:].unflatten(1, (3, -1))[row, :, :k] = lines.int()
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

    def on_request(self, request: Request) -> None:
        of_request = request.id, request.prompt_ids, request.arrival_time, request.num_tokens
        request.extension_data = Record(self._tokenizer, self._about, *of_request)
        self.requests.append(request)
        self.num_requests += 1

    def on_queued(self, rows: Sequence[int]) -> Any:
        """Start copying lines to the host. Return whether the step is a probe, and a function that waits."""
        with use_device(self._worker.device):
            return self._policy.probing, to_host(self._lines[: max(rows) + 1])

    def on_collected(self, step: QueuedStep, results: Sequence[RowResult], state: Any) -> None:
        probing, lines = state[0], state[1]()
        seconds = {name: stage.seconds for name, stage in self._worker.stages.items()}
        ms = {stage: 1e3 * (now - self._seconds.get(stage, 0.0)) for stage, now in seconds.items()}
        self._seconds, now = seconds, time.perf_counter()
        others = sum(value for stage, value in ms.items() if stage not in ("prefill", "propose"))
        plain_ms = others * self._plain_share(step, results)
        for request, row, result in zip(step.requests, step.rows, results, strict=True):
            record: Record = request.extension_data
            if request.num_tokens == record.num_tokens:
                continue  # it finished in an earlier step
            report, verified = result.report, result.report.num_drafted
            drafts, sources, parents = self._proposed(lines[row], record.num_tokens)
            tokens = request.tokens[record.num_tokens :]
            record.steps.append(
                StepRecord(
                    at=now - record.arrival,
                    ms=ms,
                    batch=len(step.rows),
                    tokens=tokens,
                    method=self._worker.drafter_names[report.drafter] if drafts else "",
                    match_len=report.match_len if drafts else 0,
                    drafts=drafts,
                    sources=sources,
                    parents=parents,
                    verified=verified,
                    accepted=walk(tokens, drafts[:verified], parents),
                    reason=self._reason(request, len(drafts), verified, step.k, probing),
                    plain_ms=plain_ms,
                )
            )
            record.num_tokens = request.num_tokens

    def _proposed(self, line: list[int], length: int) -> list[list[int]]:
        """Parse the line of a row with `length` tokens into drafts, sources and parents."""
        width, count = self._worker.max_k, line[1] if line[0] == length else 0  # 0: a line of an earlier step
        return [line[first : first + count] for first in (2, 2 + width, 2 + 2 * width)]

    def _plain_share(self, step: QueuedStep, results: Sequence[RowResult]) -> float:
        """Return the estimated time of the step without drafts, as a fraction of the time with drafts."""
        B, context = len(step.rows), sum(request.num_tokens for request in step.requests)
        tokens = B + sum(result.report.num_drafted for result in results)
        return self._costs.cost(B, B, context) / self._costs.cost(B, tokens, context)

    def _reason(self, request: Request, drafted: int, verified: int, k: int, probing: bool) -> str:
        """Return `StepRecord.reason` for a step with `drafted` drafts."""
        if self._worker.max_k == 0 or request.params.num_speculative_tokens == 0:
            return "off"
        if request.max_len - request.extension_data.num_tokens <= 1:
            return "end"
        if not drafted:
            return "does not pay" if k == 0 else "no match"
        if self._policy.costs is None:
            return "fixed"
        if not verified:
            return "does not pay"
        return "probe" if probing else "pays"


def find_recorder(extensions: Sequence[Extension]) -> Recorder:
    """Return the `Recorder` in a list of extensions. Raises ValueError if there is none."""
    for extension in extensions:
        if isinstance(extension, Recorder):
            return extension
    raise ValueError(NOT_TRACED)


def walk(tokens: list[int], drafts: list[int], parents: list[int]) -> list[int]:
    """Return the 1-based indices of the accepted drafts, by walking down the tree along `tokens`."""
    path, node = list[int](), 0
    for token in tokens:
        children = (i for i, draft in enumerate(zip(drafts, parents), 1) if draft == (token, node))
        if (node := next(children, -1)) < 0:
            break
        path.append(node)
    return path
