"""The device side: request rows, model, KV caches, drafter and captured steps, behind five verbs.

    admit     requests get their rows and pages
    prefill   the K/V of pieces of prompts are computed
    step      the speculative step (`step.py`) of some rows is queued, captured or packed
    fetch     what a queued step gave; waits for it
    release   requests have left their rows

Above is the host (`engine.py`): plain Python that owns no tensor. What is sent here is plain data
(`orders.py`), so that the same five messages can go to several workers; only steps
without graphs ask back, how many drafts to verify.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from ..config import EngineConfig, SamplingParams
from ..drafters.base import Drafter
from ..drafters.costs import StepCosts
from ..kernels import NOBODY, RUNNING, STOPPED
from ..kernels.batch import Batch, Chunk
from ..kernels.speculation.report import RowReport
from ..kernels.table import Table
from ..models.cpu import computed_by, empty_cache, zero_blocks
from ..models.decoder import Model
from . import admission
from .admission import Admission, HostWrites
from .devices import on_own_device
from .extension import Extension
from .graphs import StepGraphs
from .memory import MemoryPlan, most_drafts, plan_cache, row_bytes
from .orders import Flight, RowResult, StepOrder, Stopwatch, as_dict
from .step import Cut, Step
from .threads import settle_threads
from .timing import attention_ms, captured_ms, forward_ms

TIMED_CONTEXT = 1024  # tokens per row when captured steps are timed
NOTHING = RowReport([], 0, 0, NOBODY, 0, RUNNING, [])


def captures_steps(config: EngineConfig, model: Model, drafters: Sequence[Drafter]) -> bool:
    """Return whether steps are captured. Raises ValueError if they are to be and a drafter cannot."""
    on_host = any(drafter.reads_on_host for drafter in drafters)
    if on_host and config.enforce_eager is False:
        raise ValueError(
            "enforce_eager=False asks for captured steps, in which no drafter can read texts on the host; "
            "leave it out, or give a Drafter that defines propose() instead of guess()."
        )
    on_gpu = model.device.type == "cuda"
    return on_gpu and not on_host if config.enforce_eager is None else not config.enforce_eager


class Worker:
    """One device.

    Attributes:
        table, kv_cache: see `kernels/table.py` and `models/decoder.py`.
        num_blocks, max_model_len: as the memory allows.
        max_k: the largest K of any step, 0 without a drafter.
        graphs: the captured steps; None where steps are not captured, and may wait for the device.
        extensions: see `extension.py`.
        failure: why it can do no more, None while it can.
        simulated: what makes the output up, in a benchmark.
    """

    failure: str | None = None
    simulated: str | None = None

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        drafters: Sequence[Drafter] = (),
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.config, self.model, self.device = config, model, model.device
        self.drafters, self.extensions = drafters, extensions
        self._build()

    @on_own_device
    def _build(self) -> None:
        """Allocate and capture."""
        config, model = self.config, self.model
        self.max_k = min(config.spec.max_k, most_drafts(self.drafters))
        self.num_blocks, self.max_model_len = self.plan_cache()
        self.stages, self.writes = Stopwatch(), HostWrites()
        self.table = Table.empty(
            config.max_num_seqs, self.max_model_len, config.block_size, model.config.vocab_size, model.device
        )
        self.kv_cache = empty_cache(model, self.num_blocks, config.block_size)
        captured = captures_steps(config, model, self.drafters)
        for drafter in self.drafters:
            drafter.attach(self.table, self.num_blocks, config.max_num_batched_tokens, may_wait=not captured)
        self.graphs: StepGraphs | None = None
        for extension in self.extensions:
            extension.attach(self)
        self._step = self.make_step()
        self._step.extensions = [each for each in self.extensions if each.always]
        self._rows = torch.empty(0, dtype=torch.int32)  # of the last step that was not captured
        settle_threads(adapts=computed_by(model) == "PyTorch")
        if captured:
            ks = [k for k in config.spec.ks if k < self.max_k]
            self.graphs = StepGraphs(
                self._step, model.device, config.max_num_seqs, [*ks, self.max_k], config.lazy_capture
            )
            self._step.share_logits(self.graphs.max_tokens)
            if not config.lazy_capture:
                self.graphs.capture_all()

    def plan_cache(self) -> tuple[int, int]:
        """(number of KV blocks, max_model_len)."""
        return plan_cache(self.config, self.model, self.drafters)

    def make_step(self, kind: type[Step] = Step) -> Step:
        """The step, before it is captured."""
        exact = self.config.spec.acceptance == "exact"
        return kind(self.model, self.kv_cache, self.table, self.drafters, exact, self.stages)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that `RowReport.drafter` tells apart."""
        own = (drafter.name for drafter in self.drafters)
        return *own, *(each.method for each in self.extensions if each.method is not None)

    @property
    def model_code(self) -> int:
        """The place in `methods` of the drafter that runs a model, the last drafter if any."""
        return len(self.drafters) - 1 if self.drafters and self.drafters[-1].runs_model else NOBODY

    @property
    def weighs_model(self) -> bool:
        """Whether the host chooses how many drafts a model makes: in steps without graphs."""
        return self.graphs is None and self.model_code != NOBODY

    @property
    def memory(self) -> list[MemoryPlan]:
        """The bytes that this device keeps; those of each device, if the model is split."""
        tokens = self.num_blocks * self.config.block_size
        plan = MemoryPlan(
            weights=self.model.weight_bytes,
            draft_weights=sum(drafter.memory.weights for drafter in self.drafters),
            kv_cache=tokens * self.model.config.kv_bytes_per_token(self.model.dtype),
            draft_kv_cache=tokens * sum(drafter.memory.kv_per_token for drafter in self.drafters),
            rows=row_bytes(self.table),
        )
        return [plan]

    def close(self) -> None:
        """Nothing needs to be ended where all is in this process."""

    def check(self, params: SamplingParams) -> None:
        """ValueError if a request cannot run here."""

    def meet(self) -> None:
        """Nothing needs to be waited for where there is one device."""

    @on_own_device
    def admit(self, requests: Sequence[Admission]) -> None:
        """Give requests their rows."""
        for request in requests:
            admission.write_row(self.writes, self.table, request, self.config.spec)
            for extension in self.extensions:
                extension.admit(self.writes, request.row)
            zero_blocks(self.kv_cache, request.blocks[request.num_cached :])
            for drafter in self.drafters:
                drafter.admit(request.row, len(request.tokens), request.blocks, request.num_cached)
        if penalized := [request for request in requests if request.params.changes_logits]:
            self.writes.flush()
            for request in penalized:
                admission.write_history(self.table, request)

    @on_own_device
    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Compute the K/V of pieces of the rows' texts."""
        with self.stages("prefill"):
            self.writes.flush()
            batch = Batch.of_chunks(self.table, chunks)
            self.model.write_kv(batch, self.kv_cache)

    @on_own_device
    @torch.inference_mode()
    def step(self, order: StepOrder, cut: Cut) -> Flight:
        """Queue a step. `cut` is asked for how many of each row's drafts to verify if it is not captured."""
        for row, num_tokens, blocks, num_kept in order.grown:
            admission.write_blocks(self.writes, self.table, row, blocks, num_kept)
            zero_blocks(self.kv_cache, blocks[num_kept:])
            for drafter in self.drafters:
                drafter.admit(row, num_tokens, blocks, num_kept)
        rows, logprobs = order.rows, [step.logprobs for step in order.steps]
        k = order.k if self.graphs is None else self.graphs.bucket_for(len(rows), order.k).k
        for extension, value in zip(self.extensions, order.extra, strict=True):
            if value is not None:
                extension.send(self.writes, value, k)
        self.writes.flush()
        variant = self.prepare(order)
        if self.graphs is not None:
            drafting = [step.row for step in order.steps if step.asked and order.k]
            with self.stages("propose"):
                for drafter in self.drafters:
                    drafter.catch_up(drafting)
            result = self.graphs.run(rows, order.k, variant)
        else:
            codes = self.table.finished.tolist()
            if all(codes[row] != RUNNING for row in rows):  # the host will soon know
                return Flight(lambda: [NOTHING] * len(rows), None, logprobs)
            if rows != self._rows.tolist():
                self._rows = torch.tensor(rows, dtype=torch.int32, device=self.device)
            result = self._step(self._rows, order.k, cut, order.last_k)
        found = result.logprobs(logprobs) if max(logprobs) >= 0 else None
        return Flight(result.fetch(), found, logprobs)

    def prepare(self, order: StepOrder) -> Hashable:
        """Have the step do what its rows ask. What tells its captures from others; None for plain steps."""
        told = [value is not None for value in order.extra]
        both = zip(self.extensions, told, strict=True)
        self._step.extensions = [each for each, is_told in both if is_told or each.always]
        return tuple(told) if any(told) else None

    @on_own_device
    def fetch(self, flight: Flight) -> list[RowResult]:
        """Wait for a step: a result for each of its rows."""
        with self.stages("wait"):
            reports = flight.reports()
        columns = () if flight.logprobs is None else (column.tolist() for column in flight.logprobs)
        entries: Iterator[Any] = zip(*columns, strict=True)
        return [
            RowResult(report, None if n < 0 else [as_dict(t, next(entries), n) for t in report.tokens])
            for report, n in zip(reports, flight.wanted, strict=True)
        ]

    @on_own_device
    def release(self, row: int) -> None:
        """The request of a row has ended or was preempted; its pages may be another's."""
        self.writes.set(self.table.finished, row, STOPPED)
        for drafter in self.drafters:
            drafter.release(row)

    @on_own_device
    def measure(self) -> StepCosts:
        """Time steps by their size. To be called before the first request."""
        if self.graphs is None:
            most = self.table.num_rows * (self.max_k + 1)
            packed = forward_ms(self.model, self.kv_cache, self.table, most)
            attention = attention_ms(self.model, self.table, packed)
            return StepCosts(None, packed, self._step.draft_times, attention)
        if self.config.lazy_capture:  # what costs are to be known of must be captured
            self.graphs.capture_all()
        found = captured_ms(self.graphs, self.rehearsal, self.meet)
        for row, drafter in product(range(self.table.num_rows), self.drafters):
            drafter.release(row)  # what it remembers of the rehearsal
        return StepCosts(captured=found)

    def runs(self) -> dict[str, str | int]:
        """How the model is computed."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        found: dict[str, str | int] = {"device": str(self.device), "dtype": dtype}
        found["by"] = computed_by(self.model)
        return found | ({"threads": torch.get_num_threads()} if self.device.type == "cpu" else {})

    def report(self) -> dict[str, object]:
        """How the model is computed, and what capture took."""
        memory = {"memory": [plan._asdict() for plan in self.memory]}
        if self.graphs is None:
            return {"runs": self.runs(), **memory}
        found = {
            "count": len(self.graphs.captures),
            "seconds": round(self.graphs.seconds, 3),
            "bytes": self.graphs.bytes,
            "fallbacks": self.graphs.fallbacks,
        }
        return {"runs": self.runs(), **memory, "recorded_steps": found}

    @contextmanager
    def rehearsal(self, count: int, context: int = TIMED_CONTEXT) -> Iterator[None]:
        """Fill the first `count` rows with requests of up to `context` tokens that draft, for timing."""
        context = min(context, self.max_model_len // 2)
        with admission.rehearsal(self.table, count, context, self.num_blocks):
            yield
        if self.graphs is not None:
            self.graphs.forget_rows()
