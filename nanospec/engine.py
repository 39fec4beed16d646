"""The loop: schedule, step, collect, finish.

    engine.add(prompt_ids, params)      -> Request, waiting
    engine.step()                       -> requests that got tokens or ended
    engine.abort(request)

The engine has token ids in and out; text, chat and batches of prompts are `llm.py`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from .blocks import BlockPool
from .config import EngineConfig
from .drafters import NgramDrafter
from .kernels import commit
from .memory import plan_cache
from .metrics import Metrics
from .model import Model
from .policy import AutoPolicy, FixedPolicy, Policy
from .request import Logprob, Request, Status, StepOutput
from .runner import Runner, StepResult
from .sampling import MAX_STOP_IDS, SamplingParams
from .scheduler import Plan, Scheduler
from .state import State
from .tokenizer import Detokenizer, Tokenizer

FINISH = {commit.RUNNING: None, commit.STOPPED: "stop", commit.LENGTH: "length", commit.NAN: "error"}
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that consecutive requests get unrelated seeds


class Engine:
    """Runs requests on one model."""

    def __init__(self, config: EngineConfig, model: Model, tokenizer: Tokenizer | None = None) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        spec, size = config.spec, config.block_size
        num_blocks, self.max_model_len = plan_cache(config, model)
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            BlockPool(num_blocks), size, config.max_num_seqs, config.max_num_batched_tokens, spec.max_k
        )
        self.state = State(
            config.max_num_seqs,
            self.max_model_len,
            -(-self.max_model_len // size),
            model.config.vocab_size,
            model.device,
        )
        self.policy: Policy = FixedPolicy()
        self.runner = Runner(
            model,
            self.state,
            num_blocks,
            size,
            NgramDrafter(spec) if spec.max_k else None,
            self.policy,
            self.metrics,
        )
        if spec.max_k and spec.num_speculative_tokens == "auto":
            cost = self.runner.measure_cost()
            self.policy = self.runner.policy = AutoPolicy(cost, spec.prompt_lookup_max)
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ValueError with a sentence if the request cannot run."""
        vocab = self.model.config.vocab_size
        if not prompt_ids:
            raise ValueError("The prompt is empty; give at least one token.")
        if len(prompt_ids) >= self.max_model_len:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens, but max_model_len={self.max_model_len} must hold "
                "it and at least one new token; shorten it or raise max_model_len."
            )
        bad = next((t for t in prompt_ids if not 0 <= t < vocab), None)
        if bad is not None:
            raise ValueError(f"The prompt holds token id {bad}; ids go from 0 to {vocab - 1}.")
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = next((t for t in ids if not 0 <= t < vocab), None)
            if bad is not None:
                raise ValueError(f"{name} names token id {bad}; ids go from 0 to {vocab - 1}.")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; use stop_token_ids or load one.")

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
        eos: tuple[int, ...] = ()
        if self.tokenizer is not None and not params.ignore_eos:
            eos = self.tokenizer.eos_token_ids
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
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos)))[:MAX_STOP_IDS],
            salt=salt if salt or self.config.enable_prefix_caching else f"{number}".encode(),
            detokenizer=Detokenizer(self.tokenizer) if self.tokenizer is not None else None,
        )
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; what it has produced stays."""
        if request.status is Status.FINISHED:
            return
        self.scheduler.finish(request)
        request.finish("abort")
        self.metrics.num_aborted += 1

    def abort_all(self) -> None:
        """End everything and forget cached blocks, which an interrupted step may have left half-written."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request)
        self.scheduler.pool.clear_cache()

    def step(self) -> list[Request]:
        """Run one step; returns the requests that got tokens or ended in it."""
        with self.metrics.stage("host"):
            plan = self.scheduler.schedule()
            self._write_state(plan)
            self.metrics.num_preemptions += len(plan.preempted)
            self.metrics.num_cached_tokens += plan.num_cached_tokens
        if plan.prefill:
            with self.metrics.stage("prefill"):
                self.runner.prefill([(r.row, start, count) for r, start, count in plan.prefill])
            self.metrics.num_prefill_tokens += sum(count for _, _, count in plan.prefill)
        if not plan.decode:
            return []
        result = self._decode(plan.decode)
        with self.metrics.stage("host"):
            self._collect(plan.decode, result)
        return plan.decode

    def _write_state(self, plan: Plan) -> None:
        for request in plan.admitted:
            self.state.admit(request, self.config.spec)
            self.policy.reset(request.row)
        for request in plan.grown:
            if request.row >= 0:  # not preempted since
                self.state.write_blocks(request)

    def _decode(self, requests: list[Request]) -> StepResult:
        device = self.model.device
        k = self.config.spec.max_k
        wanted = [-1 if r.params.logprobs is None else r.params.logprobs for r in requests]
        self.metrics.num_forward_steps += 1
        return self.runner.step(
            torch.tensor([r.row for r in requests], dtype=torch.int32, device=device),
            k,
            max(min(r.num_tokens + k, r.max_len) for r in requests),
            torch.tensor(wanted, device=device) if max(wanted) >= 0 else None,
        )

    def _collect(self, requests: list[Request], result: StepResult) -> None:
        """Hand each request its tokens, and retire those that ended."""
        columns = (result.kept, result.num_drafts, result.num_accepted, result.source, result.match_len)
        table = torch.stack([*columns, result.finished.to(torch.int32)], 1).tolist()
        emitted = result.emitted.tolist()
        reported = _logprobs(result)
        for request, tokens, (kept, drafted, accepted, source, match, code) in zip(
            requests, emitted, table, strict=True
        ):
            logprobs = None
            if (num_top := request.params.logprobs) is not None:
                logprobs = [_as_dict(t, *next(reported), num_top) for t in tokens[:kept]]
            self.policy.observe(request.row, match, drafted, accepted)
            before = request.num_tokens
            request.append(StepOutput(tokens[:kept], drafted, accepted, source, FINISH[code], logprobs))
            accepted = min(accepted, request.num_tokens - before)
            self.metrics.spec.record(drafted, accepted, request.num_tokens - before)
            self.scheduler.register(request)
            if request.status is Status.FINISHED:
                self.scheduler.finish(request)
                self.metrics.num_finished += 1


def _logprobs(result: StepResult) -> Iterator[tuple[float, int, list[float], list[int]]]:
    """(own log-probability, rank, top values, top ids) of each reported token, in order."""
    if result.logprobs is None:
        return iter(())
    return zip(*(column.tolist() for column in result.logprobs), strict=True)


def _as_dict(
    token: int, own: float, rank: int, top: list[float], ids: list[int], num_top: int
) -> dict[int, Logprob]:
    """The token itself first, then the `num_top` likeliest."""
    found = {token: Logprob(own, rank)}
    for i in range(num_top):
        found.setdefault(ids[i], Logprob(top[i], i + 1))
    return found
