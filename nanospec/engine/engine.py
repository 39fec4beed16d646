"""The loop on the host: schedule, step, collect, finish.

    engine.add(prompt_ids, params)      -> Request, waiting
    engine.step()                       -> requests that got tokens or ended
    engine.abort(request)

Prompts are token ids. Each request decodes its own text, to find stop strings. The engine owns no tensor.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..config import EngineConfig, SamplingParams
from ..device.orders import Flight, Pages, RowResult, StepOrder, method_of
from ..device.resources import in_a_step, ran_out
from ..device.worker import Worker
from ..drafters.policy import AutoPolicy, Policy
from ..kernels.batch import Chunk
from ..outputs import Metrics, SpecStats
from ..text.tokenizer import OutputText, Tokenizer
from .request import Limits, Request, check_request, seed_of
from .scheduler import Plan, Scheduler


class Queued(NamedTuple):
    """A step that has not been collected: its requests, their rows at that time, its K, and the value of
    `Extension.queued` of each extension."""

    requests: list[Request]
    rows: list[int]
    k: int
    flight: Flight
    extension_states: list[Any]


class Engine:
    """Runs requests on one worker."""

    def __init__(self, config: EngineConfig, worker: Worker, tokenizer: Tokenizer | None = None) -> None:
        self.config, self.worker, self.tokenizer = config, worker, tokenizer
        self.max_model_len = worker.max_model_len
        self.limits = Limits(config, worker.model.config.vocab_size, worker.max_model_len, tokenizer)
        self.metrics = Metrics(SpecStats(config.spec.acceptance))
        auto = bool(worker.drafters) and config.spec.num_speculative_tokens == "auto"
        self.policy = AutoPolicy(worker.measure(), worker.model_code) if auto else Policy()
        on_gpu, is_async = worker.device.type == "cuda", config.async_scheduling
        self.lag = int(worker.graphs is not None and (on_gpu if is_async is None else is_async))
        rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.scheduler = Scheduler(
            worker.num_blocks, config.block_size, rows, tokens, lookahead=worker.max_k, lag=self.lag
        )
        self.extensions = worker.extensions
        for extension in self.extensions:
            extension.start(self)
        for stage in worker.stages.values():
            stage.seconds = 0.0  # do not count start-up
        self._queue: deque[Queued] = deque()
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._queue)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ValueError with a sentence if the request cannot run."""
        check_request(prompt_ids, params, self.limits)
        for extension in self.extensions:
            extension.check(params)

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0, salt: bytes = b""
    ) -> Request:
        """Check and queue one output of a prompt; see `new`."""
        self.check(prompt_ids, params)
        request = self.new(prompt_ids, params, index, salt)
        self.scheduler.add(request)
        return request

    def new(
        self, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0, salt: bytes = b""
    ) -> Request:
        """Return one output of a prompt that has passed `check`, for `scheduler.add`. `index` is its number
        among `params.n`. Only requests of equal `salt` share cached blocks, none without prefix caching."""
        config, number, k = self.config, next(self._ids), params.num_speculative_tokens
        request = Request(
            id=f"request-{number}",
            prompt_ids=list(prompt_ids),
            params=params,
            seed=seed_of(params.seed, index, config.seed + 1 + number),
            max_len=min(len(prompt_ids) + (params.max_tokens or self.max_model_len), self.max_model_len),
            max_k=self.worker.max_k if k is None else min(k, self.worker.max_k),
            stop_ids=self.limits.stop_ids(params),
            salt=salt if config.enable_prefix_caching else f"{number}".encode(),
            output=OutputText(self.tokenizer, params.stop, params.min_tokens),
            stats=SpecStats(params.acceptance or config.spec.acceptance),
        )
        for extension in self.extensions:
            extension.new(request)
        return request

    def abort(self, request: Request, error: str | None = None) -> None:
        """End a request now; what it has produced stays. `error` says why, if it is the engine's doing."""
        if request.is_finished:
            return
        request.error = error
        request.finish("abort")
        self.metrics.num_aborted += 1
        self._release(request)

    def abort_all(self, error: str | None = None) -> None:
        """End everything and forget what is cached, as an interrupted step may have left blocks
        half-written and the scheduler inconsistent."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            with suppress(RuntimeError):  # of a device that can do no more
                self.abort(request, error)
        self.scheduler.reset()
        self._queue.clear()

    def _release(self, request: Request) -> None:
        """Take a finished request off the device and the schedule."""
        if request.row >= 0:
            self.worker.release(request.row)
        self.scheduler.finish(request)

    def step(self) -> list[Request]:
        """Queue one step and collect what is due; returns the requests that got tokens or ended.

        With `lag` the results of a step are read after the next one has been queued, so that the device
        need not wait for the host to look at them. That is safe: the device skips rows that have ended, the
        scheduler allocates slots for the steps in flight, and results of requests that the host has ended
        meanwhile are dropped.
        """
        with self.worker.stages["host"]:
            # A constrained request takes part in a step only after its previous step was collected.
            held = {r for queued in self._queue for r in queued.requests if r.constraint is not None}
            plan = self.scheduler.schedule(held)
            self._admit(plan)
        touched = self._prefill(plan) if plan.prefill else []
        if plan.decode:
            self._queue.append(self._launch(plan))
        lag = self.lag if plan.decode else 0  # nothing was queued: collect all
        while len(self._queue) > lag:
            queued = self._queue.popleft()
            results = self.worker.fetch(queued.flight)
            with self.worker.stages["host"]:
                touched += self._collect(queued, results)
            for extension, state in zip(self.extensions, queued.extension_states, strict=True):
                extension.collected(queued, results, state)
        return touched

    def _admit(self, plan: Plan) -> None:
        """Tell the worker which requests have lost their rows and which have got one."""
        for row in plan.preempted:
            self.worker.release(row)
        for request, num_cached in plan.admitted.items():
            self.policy.reset(request.row)
            self.worker.admit(request.admission(num_cached))
            if not request.num_preemptions:
                self.metrics.num_prompt_tokens += len(request.prompt_ids)
                self.metrics.num_cached_tokens += request.num_cached_tokens
        self.metrics.num_preemptions += len(plan.preempted)

    def _prefill(self, plan: Plan) -> list[Request]:
        """Queue chunks of prompts. Return the requests that were ended for lack of memory; others go on."""
        try:
            self.worker.prefill([Chunk(r.row, start, count) for r, start, count in plan.prefill])
        except Exception as error:
            if not ran_out(error) or self.worker.failure is not None:
                raise
            ended = self.scheduler.forget_unwritten(plan)
            for request in ended:
                self.abort(request, f"Memory ran out for the prompt; {in_a_step(self.config)}.")
            return ended
        self.metrics.num_prefill_tokens += sum(count for _, _, count in plan.prefill)
        return []

    def _launch(self, plan: Plan) -> Queued:
        """Queue a step of the requests that decode."""
        requests = plan.decode
        limits = {r.row: r.max_k for r in requests}
        of_drafters = {r.row: 0 if r.constraint is not None else r.max_k for r in requests}
        context = sum(request.num_tokens for request in requests)
        k, last_k = self.policy.choose(limits, of_drafters, context, bool(self.scheduler.waiting))
        order = StepOrder(
            rows=[*limits],
            logprobs=[-1 if (n := r.params.logprobs) is None else n for r in requests],
            drafting=[row for row, limit in of_drafters.items() if min(limit, k)],
            k=k,
            last_k=last_k,
            grown=[Pages(r.row, r.num_tokens, r.blocks, n) for r, n in plan.grown.items()],
            extra=[each.plan(requests, [min(n, k) for n in limits.values()]) for each in self.extensions],
        )
        self.metrics.num_forward_steps += 1
        flight = self.worker.step(order, self.policy.cut)
        states = [each.queued(order.rows) for each in self.extensions]
        return Queued(requests, order.rows, k, flight, states)

    def _collect(self, queued: Queued, results: list[RowResult]) -> list[Request]:
        """Hand each request its tokens, and retire those that ended."""
        touched = []
        for request, row, result in zip(queued.requests, queued.rows, results, strict=True):
            if request.is_finished:
                continue  # by the host, after this step was queued
            touched.append(request)
            report = result.report
            method = method_of(report, self.worker.methods)
            if queued.k and request.max_k:
                self.policy.observe(row, report)
            kept = request.append(report, result.logprobs)
            for stats in (request.stats, self.metrics.spec):
                stats.record(report.num_drafted, min(report.num_accepted, kept), kept, method)
            if request.row >= 0:  # not preempted since
                self.scheduler.register(request)
            if request.finish_reason is not None:
                if request.error is not None:  # what it computed may be NaN
                    self.scheduler.pool.forget(request.blocks)
                self._release(request)
                self.metrics.num_finished += 1
        return touched
