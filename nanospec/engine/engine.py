"""The engine loop on the host: schedule, step, collect, finish.

    engine.add(prompt_ids, params)      -> Request, waiting
    engine.step()                       -> requests that got tokens or finished
    engine.abort(request)

Prompts are token ids. Each request detokenizes its output to find stop strings. The engine holds no tensors.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import EngineConfig, SamplingParams
from ..device.memory import is_oom, oom_remedy
from ..device.messages import PendingStep, RowBlocks, RowResult, StepInput, drafter_name
from ..device.worker import Worker
from ..drafters.policy import AutoPolicy, Policy
from ..kernels import NAN, launch
from ..kernels.batch import Chunk
from ..kernels.speculation.report import RowReport
from ..outputs import Metrics, SpecStats
from ..text.tokenizer import OutputText, Tokenizer
from .history import History
from .request import Limits, Request, derive_seed
from .scheduler import Plan, Scheduler


class QueuedStep(NamedTuple):
    """A step that has been queued but not collected."""

    requests: list[Request]
    rows: list[int]  # of the requests when the step was queued
    k: int
    pending: PendingStep
    extension_states: list[Any]  # the value returned by `on_queued` of each extension


class Engine:
    """Runs requests on a worker. A step's results are read after `lag` (0 or 1) later steps are queued."""

    def __init__(self, config: EngineConfig, worker: Worker, tokenizer: Tokenizer | None = None) -> None:
        self.config, self.worker, self.tokenizer = config, worker, tokenizer
        self.max_model_len = worker.max_model_len
        self.limits = Limits(config, worker.model.config.vocab_size, worker.max_model_len, tokenizer)
        self.metrics = Metrics(SpecStats(config.spec.acceptance))
        shares = config.enable_prefix_caching and "ngram" in worker.drafter_names
        self.history = History(worker.max_model_len if shares and config.spec.prompt_lookup_history else 0)
        auto = bool(worker.drafters) and config.spec.num_speculative_tokens == "auto"
        self.policy = Policy()
        if auto:
            self.policy = AutoPolicy(worker.measure(), len(worker.drafter_names), worker.model_drafter)
        on_gpu, is_async = worker.device.type == "cuda", config.async_scheduling
        self.lag = int(worker.graphs is not None and (on_gpu if is_async is None else is_async))
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.scheduler = Scheduler(
            worker.num_blocks, config.block_size, rows, tokens, max_k=worker.max_k, lag=self.lag
        )
        self.extensions = worker.extensions
        for extension in self.extensions:
            extension.start(self)
        for stage in worker.stages.values():
            stage.seconds = 0.0  # exclude start-up
        self._queue: deque[QueuedStep] = deque()
        self._ids = itertools.count()
        self._compiled_at_start = launch.num_compiled

    @property
    def num_compiled(self) -> int:
        """The number of Triton kernels compiled or loaded in this process since this engine started."""
        return launch.num_compiled - self._compiled_at_start

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._queue)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Return the parameters for `new`. Raises ValueError if the request cannot run."""
        self.limits.check_prompt(prompt_ids)
        return self.check_params(params)

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """Like `check`, for all prompts with these parameters."""
        params = self.limits.check_params(params)
        for extension in self.extensions:
            extension.check(params)
        return params

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0, salt: bytes = b""
    ) -> Request:
        """Check and queue a request for one output of a prompt; see `new`."""
        request = self.new(prompt_ids, self.check(prompt_ids, params), index, salt)
        self.scheduler.add(request)
        return request

    def new(
        self, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0, salt: bytes = b""
    ) -> Request:
        """Return a request for output `index` of a prompt that has passed `check`, for `scheduler.add`. With
        prefix caching, requests with the same `salt` share cached blocks and `history`."""
        config, number, k = self.config, next(self._ids), params.num_speculative_tokens
        request = Request(
            id=f"request-{number}",
            prompt_ids=list(prompt_ids),
            params=params,
            seed=derive_seed(params.seed, index, config.seed + 1 + number),
            max_len=min(len(prompt_ids) + (params.max_tokens or self.max_model_len), self.max_model_len),
            max_k=self.worker.max_k if k is None else min(k, self.worker.max_k),
            stop_ids=self.limits.stop_ids(params),
            salt=salt if config.enable_prefix_caching else f"{number}".encode(),
            output=OutputText(self.tokenizer, params.stop, params.min_tokens, params.skip_special_tokens),
            stats=SpecStats(params.acceptance or config.spec.acceptance),
        )
        for extension in self.extensions:
            extension.on_request(request)
        return request

    def abort(self, request: Request, error: str | None = None) -> None:
        """Abort a request, keeping its output so far. `error` is the reason if the engine aborts it."""
        if request.is_finished:
            return
        request.error = error
        request.finish("abort")
        self.metrics.num_aborted += 1
        self._release(request)

    def abort_all(self, error: str | None = None) -> None:
        """Abort all requests and clear the prefix cache, since a failed step may have left blocks
        half-written and the scheduler in an inconsistent state."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            with suppress(RuntimeError):  # the device may have failed for good
                self.abort(request, error)
        self.scheduler.reset()
        self._queue.clear()

    def _release(self, request: Request) -> None:
        """Release the row and the blocks of a finished request."""
        if request.row >= 0:
            self.worker.release(request.row)
        self.scheduler.finish(request)

    def step(self) -> list[Request]:
        """Queue one step and collect the results that are due; return requests that got tokens or finished.

        With `lag`, the results of a step are read after the next step has been queued, so that the device
        does not wait for the host. This is safe: the device skips rows that have finished, the scheduler
        allocates slots for the steps in flight, and results of requests that the host has finished in the
        meantime are dropped.
        """
        with self.worker.stages["host"]:
            # A constrained request takes part in a step only after its previous step has been collected.
            held = {r for queued in self._queue for r in queued.requests if r.constraint is not None}
            plan = self.scheduler.schedule(held)
            self._admit(plan)
        updated = self._prefill(plan) if plan.prefill else []
        if plan.decode:
            self._queue.append(self._queue_step(plan))
        lag = self.lag if plan.decode else 0  # collect everything if no step was queued
        while len(self._queue) > lag:
            queued = self._queue.popleft()
            results = self.worker.fetch(queued.pending)
            with self.worker.stages["host"]:
                updated += self._collect(queued, results)
            for extension, state in zip(self.extensions, queued.extension_states, strict=True):
                extension.on_collected(queued, results, state)
        return updated

    def _admit(self, plan: Plan) -> None:
        """Release the rows of preempted requests and admit new requests on the worker."""
        for row in plan.preempted:
            self.worker.release(row)
        for request, num_cached in plan.admitted.items():
            self.policy.reset(request.row)
            if not request.num_preemptions:
                request.reference = self._reference(request)
                self.metrics.num_prompt_tokens += len(request.prompt_ids)
                self.metrics.num_cached_tokens += request.num_cached_tokens
            self.worker.admit(request.admission(num_cached))
        self.metrics.num_preemptions += len(plan.preempted)

    def _reference(self, request: Request) -> NDArray[np.int32]:
        """Return other texts that the output may repeat: the prediction, or else texts of earlier requests.
        The end of the prompt precedes the prediction, so that its first token is drafted first."""
        if prediction := request.params.prediction:
            head = request.prompt_ids[-self.config.spec.prompt_lookup_max :]
            return np.array([*head, *prediction][: self.max_model_len], np.int32)
        # Under other rules, the output would depend on the earlier requests.
        if request.stats.acceptance == "exact" and request.max_len > len(request.prompt_ids) + 1:
            return self.history.search(request.salt, request.prompt_ids)
        return request.reference

    def _prefill(self, plan: Plan) -> list[Request]:
        """Queue prompt chunks. If memory runs out, abort and return the requests that depend on them."""
        try:
            self.worker.prefill([Chunk(r.row, start, count) for r, start, count in plan.prefill])
        except Exception as error:
            if not is_oom(error) or self.worker.failure is not None:
                raise
            aborted = self.scheduler.forget_unwritten(plan)
            for request in aborted:
                self.abort(request, f"Ran out of memory for the prompt; {oom_remedy(self.config)}.")
            return aborted
        self.metrics.num_prefill_tokens += sum(count for _, _, count in plan.prefill)
        return []

    def _queue_step(self, plan: Plan) -> QueuedStep:
        requests = plan.decode
        max_drafts = {r.row: max(min(r.max_k, r.max_len - r.num_tokens - 1), 0) for r in requests}
        max_from_drafters = {r.row: 0 if r.constraint is not None else max_drafts[r.row] for r in requests}
        context = sum(request.num_tokens for request in requests)
        choice = self.policy.choose(max_drafts, max_from_drafters, context, bool(self.scheduler.waiting))
        k = choice.k
        inputs = StepInput(
            rows=[*max_drafts],
            logprobs=[-1 if (n := r.params.logprobs) is None else n for r in requests],
            drafting=[row for row, n in max_from_drafters.items() if min(n, k)],
            choice=choice,
            new_blocks=[RowBlocks(r.row, r.num_tokens, r.blocks, n) for r, n in plan.new_blocks.items()],
            extra=[each.plan(requests, [min(n, k) for n in max_drafts.values()]) for each in self.extensions],
        )
        self.metrics.num_forward_steps += 1
        propose, before = self.worker.stages["propose"], self.worker.stages["propose"].seconds
        pending = self.worker.step(inputs)
        self.policy.add_time((propose.seconds - before) * 1e3)
        states = [each.on_queued(inputs.rows) for each in self.extensions]
        return QueuedStep(requests, inputs.rows, k, pending, states)

    def _collect(self, queued: QueuedStep, results: list[RowResult]) -> list[Request]:
        """Append the results to their requests and release finished ones. Return the requests updated."""
        updated, reports = [], dict[int, RowReport]()
        for request, row, result in zip(queued.requests, queued.rows, results, strict=True):
            if request.is_finished:
                continue  # finished by the host after this step was queued
            updated.append(request)
            report = result.report
            drafter = drafter_name(report, self.worker.drafter_names)
            if queued.k and request.max_k:
                reports[row] = report
            kept = request.append(report, result.logprobs)
            for stats in (request.stats, self.metrics.spec):
                stats.record(report.num_drafted, min(report.num_accepted, kept), kept, drafter)
            if request.row >= 0:  # not preempted in the meantime
                self.scheduler.register(request)
            if request.finish_reason is not None:
                if report.finished == NAN:  # its K/V may be NaN; do not reuse its blocks or its text
                    self.scheduler.pool.forget(request.blocks)
                else:
                    self.history.add(request.salt, request.tokens)
                self._release(request)
                self.metrics.num_finished += 1
        self.policy.observe(reports)
        return updated
