"""The loop: schedule, step, collect, finish.

    engine.add(prompt_ids, params)      -> Request, waiting
    engine.step()                       -> requests that got tokens or ended
    engine.abort(request)

The engine has token ids in and out; text, chat and batches of prompts are `llm.py`'s.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from bench.simulation import Simulation

from .blocks import BlockPool
from .config import EngineConfig
from .costs import StepCosts
from .drafters import make_drafter
from .graphs import StepGraphs, progress_bar
from .kernels.dispatch import use_triton
from .kernels.sampling.logprobs import Logprobs
from .kernels.speculation import commit
from .kernels.speculation.proposal import DRAFTERS, MODEL
from .memory import plan_cache
from .metrics import STAGES, Metrics
from .models.decoder import Model
from .models.heads import Heads
from .policy import AutoPolicy, Policy
from .request import Request, StepOutput, as_dict, check_request, reported
from .runner import Runner
from .sampling import SamplingParams
from .scheduler import Plan, Scheduler
from .state import State
from .text.tokenizer import Detokenizer, Tokenizer

FINISH = {commit.RUNNING: None, commit.STOPPED: "stop", commit.LENGTH: "length", commit.NAN: "error"}
TIMED_CONTEXT = 1024  # tokens per row when recorded steps are timed
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that consecutive requests get unrelated seeds


class Flight(NamedTuple):
    """A step that has been queued and not collected.

    Attributes:
        requests, rows: who takes part, and their rows at that time.
        k: the most drafts of a row.
        fetch: waits for the step; gives a line of `runner.StepResult.table` per request.
        logprobs: see `Runner.logprobs`.
    """

    requests: list[Request]
    rows: list[int]
    k: int
    fetch: Callable[[], list[list[int]]]
    logprobs: Logprobs | None


class Engine:
    """Runs requests on one model."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        tokenizer: Tokenizer | None = None,
        simulation: Simulation | None = None,
        draft_model: Model | None = None,
        heads: Heads | None = None,
        token_map: Tensor | None = None,
    ) -> None:
        """`draft_model` (with the only tokens that it may guess, `token_map` [Vd]) and `heads` are for the
        methods that need them. `simulation` is for benchmarks: it makes up the output."""
        self.config, self.model, self.tokenizer = config, model, tokenizer
        spec, size = config.spec, config.block_size
        num_blocks, self.max_model_len = plan_cache(config, model, draft_model)
        self.metrics = Metrics()
        self.metrics.spec.acceptance = spec.acceptance
        on_gpu = model.device.type == "cuda"
        self.lag = int(on_gpu if config.async_scheduling is None else config.async_scheduling)
        self.state = State(
            config.max_num_seqs,
            self.max_model_len,
            -(-self.max_model_len // size),
            model.config.vocab_size,
            model.device,
        )
        drafter = make_drafter(
            spec, self.state, model, num_blocks, size, draft_model, heads, token_map
        )
        self.simulation = simulation
        if simulation is not None:
            drafter = simulation.drafter or drafter
            self.metrics.simulated = simulation.label
            simulation.attach(self.state)
        self.drafter = drafter
        self.max_k = 0 if drafter is None else min(spec.max_k, drafter.max_drafts)
        self.scheduler = Scheduler(
            BlockPool(num_blocks),
            size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            lookahead=self.max_k,
            lag=self.lag,
            draft_cache=drafter is not None and drafter.has_cache,
        )
        self.runner = Runner(
            model, self.state, num_blocks, size, drafter, self.metrics, simulation,
            exact=spec.acceptance == "exact",
        )  # fmt: skip
        self.graphs: StepGraphs | None = None
        if not (not on_gpu if config.enforce_eager is None else config.enforce_eager):
            ks = [k for k in spec.ks if k < self.max_k]
            self.graphs = StepGraphs(
                self.runner, config.max_num_seqs, [*ks, self.max_k], config.lazy_capture
            )
            if not config.lazy_capture:
                self.graphs.record_all(progress_bar("Recording steps"))
        self.policy = self._make_policy()
        self.metrics.stage_seconds.update(dict.fromkeys(STAGES, 0.0))  # recording and timing are no steps
        self._in_flight: deque[Flight] = deque()
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def _make_policy(self) -> Policy:
        """How K is chosen; times what has to be timed."""
        spec = self.config.spec
        if self.drafter is None or spec.num_speculative_tokens != "auto":
            return Policy()
        if self.graphs is None:
            self.drafter.measure()
            costs = self.runner.measure_cost()
            costs.propose = self.drafter.ms
            return AutoPolicy(costs, DRAFTERS.index(spec.method.split("+")[-1]))
        if self.config.lazy_capture:  # what costs are to be known of must be recorded
            self.graphs.record_all(progress_bar("Recording steps"))
        context = min(TIMED_CONTEXT, self.max_model_len // 2)
        return AutoPolicy(StepCosts(self.graphs.cost_table(context, progress_bar("Timing steps"))))

    def report(self) -> dict[str, object]:
        """The counters of `metrics`, what recording took, and the measured times of steps."""
        found = self.metrics.to_dict()
        if self.graphs is not None:
            found["recorded_steps"] = {
                "count": len(self.graphs.recordings),
                "seconds": round(self.graphs.seconds, 3),
                "bytes": self.graphs.bytes,
                "fallbacks": self.graphs.fallbacks,
            }
        return found | (self.policy.costs.report() if self.policy.costs else {})

    def step_costs(self) -> dict[int, float]:
        """Measured ms of a step of one request, by the number of tokens it scores."""
        return (self.policy.costs or self.runner.measure_cost()).of_one_row()

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ValueError with a sentence if the request cannot run."""
        check_request(
            prompt_ids,
            params,
            stop_ids=self._stop_ids(params),
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            has_text=self.tokenizer is not None,
            acceptance=self.config.spec.acceptance,
        )

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        index: int = 0,
        salt: bytes = b"",
        request_id: str | None = None,
    ) -> Request:
        """Queue one output of a prompt. `index` is its number among `params.n`; `salt` names who may
        share its cached blocks when prefix caching is off (see `llm.py`)."""
        self.check(prompt_ids, params)
        number = next(self._ids)
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt_ids) + params.max_tokens)
        if params.seed is None:
            seed = (self.config.seed + 1 + number) * _SEED_STEP
        else:
            seed = params.seed + index * _SEED_STEP
        request = Request(
            id=request_id or f"request-{number}",
            prompt_ids=list(prompt_ids),
            params=params,
            seed=(seed + 2**63) % 2**64 - 2**63,  # wrapped into int64
            max_len=limit,
            stop_ids=self._stop_ids(params),
            salt=salt if salt or self.config.enable_prefix_caching else f"{number}".encode(),
            detokenizer=Detokenizer(self.tokenizer) if self.tokenizer is not None else None,
        )
        request.simulated = self.metrics.simulated
        request.stats.acceptance = params.acceptance or self.config.spec.acceptance
        self.scheduler.add(request)
        return request

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """All tokens that end a request."""
        own = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *own)))

    def abort(self, request: Request) -> None:
        """End a request now; what it has produced stays."""
        if request.is_finished:
            return
        request.finish("abort")
        self.scheduler.finish(request)
        self.metrics.num_aborted += 1

    def abort_all(self) -> None:
        """End everything and forget what is cached: an interrupted step may have left blocks
        half-written, and the scheduler between two thoughts."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request)
        self.scheduler.reset()
        self._in_flight.clear()

    def step(self) -> list[Request]:
        """Queue one step and collect what is due; returns the requests that got tokens or ended.

        With `lag` the results of a step are read after the next one has been queued, so that the device
        never waits for the host. What the host does not know yet does no harm: a row that has ended
        takes no part in the step queued after it, slots reach far enough ahead, and what was computed
        for a request that the host has ended meanwhile is dropped.
        """
        with self.metrics.stage("host"):
            plan = self.scheduler.schedule()
            self._write_state(plan)
            self.metrics.num_preemptions += len(plan.preempted)
            self.metrics.num_cached_tokens += plan.num_cached_tokens
        if plan.prefill:
            with self.metrics.stage("prefill"):
                self.runner.prefill([(r.row, start, count) for r, start, count in plan.prefill])
                if plan.draft_prefill:
                    chunks = [(r.row, start, count) for r, start, count in plan.draft_prefill]
                    self.runner.draft_prefill(chunks)
            self.metrics.num_prefill_tokens += sum(count for _, _, count in plan.prefill)
        if plan.decode:
            self._in_flight.append(self._launch(plan.decode))
        touched: list[Request] = []
        while len(self._in_flight) > (self.lag if plan.decode else 0):
            flight = self._in_flight.popleft()
            with self.metrics.stage("wait"):
                table = flight.fetch()
            with self.metrics.stage("host"):
                touched += self._collect(flight, table)
        return touched

    def _write_state(self, plan: Plan) -> None:
        self.runner.clear(plan.allocated)
        for request in plan.admitted:
            self.state.admit(request, self.config.spec)
            self.policy.reset(request.row)
            if self.drafter is not None:
                self.drafter.admit(request.row, request.num_draft_computed)
            if self.simulation is not None:
                self.simulation.admit(request)
        for request in plan.grown:
            if request.row >= 0:  # not preempted since
                self.state.write_blocks(request)

    def _launch(self, requests: list[Request]) -> Flight:
        """Queue a step of these requests."""
        rows = [request.row for request in requests]
        own = [request.params.num_speculative_tokens for request in requests]
        limits = [self.max_k if n is None else min(n, self.max_k) for n in own]
        k = self.policy.choose(rows, limits)
        self.metrics.num_forward_steps += 1
        passes = k
        if k and self.graphs is None and self.drafter is not None and self.drafter.has_model:
            drafting = [row for row, n in zip(rows, own, strict=True) if n != 0]
            passes = self.policy.passes(drafting, len(rows) - len(drafting), k)
        no_waiting = self.graphs is not None or use_triton(self.state.tokens)
        if passes and no_waiting and self.scheduler.draft_cache:
            self._catch_up(requests)
        if self.graphs is not None:
            result = self.graphs.run(rows, k)
        else:
            ahead = self.scheduler.slots_ahead
            longest = max(min(r.num_tokens + ahead, r.max_len) for r in requests)
            result = self.runner.packed_step(rows, k, passes, longest, self.policy)
        wanted = [-1 if r.params.logprobs is None else r.params.logprobs for r in requests]
        logprobs = self.runner.logprobs(result, wanted) if max(wanted) >= 0 else None
        return Flight(requests, rows, k, self.runner.fetch(result), logprobs)

    def _catch_up(self, requests: list[Request]) -> None:
        """Let the draft model compute what it has missed of texts it is to continue, beyond what a step
        computes itself without waiting. (Unrecorded on a CPU, it does so when it is asked to draft.)"""
        assert self.drafter is not None
        missing, budget = [], self.config.max_num_batched_tokens
        for request in requests:
            first = request.num_draft_computed
            count = min(request.num_tokens - 1 - first, budget)
            if request.params.num_speculative_tokens != 0 and count >= self.drafter.catch_up:
                missing.append((request.row, first, count))
                request.num_draft_computed += count
                budget -= count
        if missing:
            with self.metrics.stage("propose"):
                self.runner.draft_prefill(missing)

    def _collect(self, flight: Flight, table: list[list[int]]) -> list[Request]:
        """Hand each request its tokens, and retire those that ended."""
        entries = reported(flight.logprobs)
        touched = []
        for request, row, line in zip(flight.requests, flight.rows, table, strict=True):
            kept, drafted, accepted, drafter, match, code, *rest = line
            tokens, sources = rest[:kept], rest[len(rest) // 2 :][:kept]
            logprobs = None
            if (num_top := request.params.logprobs) is not None:
                logprobs = [as_dict(t, *next(entries), num_top) for t in tokens]
            if request.is_finished:
                continue  # by the host, after this step was queued
            touched.append(request)
            if flight.k:
                self.policy.observe(row, drafter, match, drafted, accepted)
            before = request.num_tokens
            if drafter == MODEL:  # its last draft was never fed to it
                request.num_draft_computed = before + min(accepted, max(drafted - 1, 0))
            step = StepOutput(tokens, drafted, accepted, drafter, sources, FINISH[code], logprobs)
            ended = request.append(step)
            accepted = min(accepted, request.num_tokens - before)
            self.metrics.spec.record(drafted, accepted, request.num_tokens - before, drafter)
            if request.row >= 0:  # not preempted since
                self.scheduler.register(request)
            if ended:
                if request.error is not None:  # what it computed may be NaN
                    self.scheduler.pool.forget(request.blocks)
                self.scheduler.finish(request)
                self.metrics.num_finished += 1
        return touched
