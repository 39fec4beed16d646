"""Run a scenario and compare it with the oracle and the invariants."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest import mock

from campaigns.simulate.baton import Baton, Turns
from campaigns.simulate.faults import RAISED, Faults
from campaigns.simulate.invariants import BlockTexts, check, check_counters
from campaigns.simulate.model import Mock, MockReader
from campaigns.simulate.oracle import Expected, limited, tokenizer
from campaigns.simulate.scenario import CALLS, CUSTOM, TEXT_VOCAB, Scenario, model_of, oracle_of
from campaigns.simulate.watch import Watch
from nanospec.config import SamplingParams
from nanospec.device.worker import Worker
from nanospec.drafters.estimates import StepCosts
from nanospec.drafters.methods import Drafters
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.engine.request import Request
from tests.drive import FunctionDrafter, assert_idle, make_engine


class Clock:
    """Replaces `time.perf_counter`. Each call advances the clock by 0.1 ms."""

    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


class Simulation:
    """A run of a scenario.

    Attributes:
        requests: the requests of the jobs that have arrived, by job.
        cut: the jobs that were aborted by the scenario, or were running when a fault was injected.
        seen: counts of events.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.rng = scenario, random.Random(scenario.seed)
        self.model = model_of(scenario.engine, scenario.seed)
        self._run_oracles()
        for fault in scenario.faults:
            if fault["kind"] == "nan":
                self._inject_nan(fault)
        self.seen: Counter[str] = Counter()
        self.clock = Clock()
        self.requests: dict[int, Request] = {}
        self.cut: set[int] = set()
        self.baton = Baton(self.rng)
        self.pieces: dict[int, list[str]] = {}

    def _run_oracles(self) -> None:
        self.oracles = [oracle_of(self.model, self.scenario.engine, job) for job in self.scenario.jobs]
        self.expected = [oracle.run() for oracle in self.oracles]
        self.exact = [self._is_exact(oracle.params) for oracle in self.oracles]

    def _inject_nan(self, fault: dict[str, Any]) -> None:
        """Make the model return NaN after a prefix of a request's output."""
        output = self.expected[fault["job"]].token_ids
        text = self.scenario.jobs[fault["job"]]["prompt"] + output[: fault["number"] % max(len(output), 1)]
        self.model.nan_after.add(tuple(text))
        for i, oracle in enumerate(self.oracles):
            if [*oracle.prompt, *self.expected[i].token_ids][: len(text)] == text:
                self.oracles[i] = oracle_of(self.model, self.scenario.engine, self.scenario.jobs[i])
                self.expected[i] = self.oracles[i].run()

    def run(self) -> Counter[str]:
        """Run the scenario and return the counts of events. Raises AssertionError on any violation."""
        with mock.patch("time.perf_counter", self.clock):
            self.prepare()
            (self._run_threads if self.scenario.threads else self._run_alone)()
            self._check_prefix_cache()
        return self.finish()

    def prepare(self) -> None:
        """Create the engine and install the checks and faults."""
        self.engine = self._engine()
        self.block_texts = BlockTexts(self.engine.config.block_size)
        self.watch = Watch(self.engine, self.scenario.engine)
        self.shared = SharedEngine(self.engine)
        self.faults = Faults(self.scenario.faults, self.seen, self._act)
        for name in CALLS:
            self.faults.watch(self.engine.worker, name)
        for drafter in self.engine.worker.drafters:
            self.faults.watch(drafter, "propose")
        self._engine_step = self.engine.step
        self.engine.step = self._step  # type: ignore[method-assign]

    def finish(self) -> Counter[str]:
        """Check the final state and return the counts of events."""
        assert_idle(self.engine)
        for i, request in self.requests.items():
            self._compare(i, request)
        whole = not self.faults.raised
        check_counters(self.engine.metrics, [*self.requests.values()], whole)
        self._count()
        return self.seen

    def _engine(self) -> Engine:
        settings = self.scenario.engine
        method, custom = settings["method"], settings["method"] in CUSTOM
        text = settings["vocab"] == TEXT_VOCAB
        spec = {name: settings[name] for name in ("tree_width", "acceptance")}
        draft: Mock | None = None
        given: Drafters | None = self._drafter(method) if custom else None
        if "draft" in method:
            draft = model_of(settings, self.scenario.seed)
            draft.after = draft.after + settings["blur"] * draft.after.roll(1, 0)
        if "dflash" in method:
            given, custom = [*method.split("+")[:-1], MockReader(self.model, spec["tree_width"])], True
        captured = {size: {size * (k + 1): 1 + 0.1 * k for k in (*range(8), 63)} for size in (1, 2, 4, 8)}
        by_tokens = {8: {1: 1.0, 64: 2.0, 600: 9.0}}
        costs = StepCosts(captured, True) if settings["captured"] else StepCosts(by_tokens)
        with mock.patch.object(Worker, "measure", return_value=costs):
            return make_engine(
                self.model,
                None if method == "none" else settings["k"],
                num_blocks=settings["blocks"],
                min_n=settings["min_n"],
                spec=spec if custom or method == "none" else {**spec, "method": method},
                draft_model=draft,
                drafter=given,
                tokenizer=tokenizer() if text else None,
                max_num_seqs=settings["rows"],
                max_model_len=settings["window"],
                max_num_batched_tokens=settings["budget"],
                block_size=settings["block_size"],
                enable_prefix_caching=settings["caching"],
                async_scheduling=settings["async_scheduling"],
                enforce_eager=not settings["captured"],
                lazy_capture=True,
                trace=settings["trace"],
            )

    def _drafter(self, kind: str) -> FunctionDrafter:
        """Return a custom drafter."""
        rng, vocab = random.Random(self.scenario.seed), self.scenario.engine["vocab"]
        texts = [
            job["prompt"] + expected.token_ids
            for job, expected in zip(self.scenario.jobs, self.expected, strict=True)
        ]

        def next_tokens(history: list[int], count: int) -> list[int]:
            n = len(history)
            text = next(
                (t for t in texts if kind == "mostly-correct" and t[:n] == history and len(t) > n), None
            )
            if text is None:
                return rng.choices(range(vocab), k=rng.randint(0, count))
            return [token if rng.random() < 0.8 else rng.randrange(vocab) for token in text[n : n + count]]

        return FunctionDrafter(next_tokens)

    def _act(self, fault: dict[str, Any] | None) -> None:
        """Apply a fault during a call, or switch threads."""
        if fault is None:
            self.baton.pause()
        elif fault["kind"] in RAISED:
            self.cut.update(i for i, request in self.requests.items() if not request.is_finished)
        elif fault["kind"] == "clock":
            self.clock.now += fault["seconds"]
        elif fault["job"] in self.requests:
            self._cut(fault["job"])

    def _cut(self, i: int) -> None:
        self.cut.add(i)
        self.shared.abort([self.requests[i]])

    # A loop in one thread, like the server's

    def _run_alone(self) -> None:
        jobs = self.scenario.jobs
        last = max(job["arrives"] + (job["ends"] or 0) for job in jobs)
        now = 0
        while now <= last or self.engine.has_work:
            with self.shared.turn():
                for i, job in enumerate(jobs):
                    if job["arrives"] == now:
                        self._add(i)
                    if job["ends"] is not None and job["arrives"] + job["ends"] == now:
                        self._cut(i)
                with self.faults.expected(bool(self.scenario.threads)):
                    self.shared.step()
            now += 1

    # Threads that each run some of the jobs, like callers of `LLM.generate`

    def _run_threads(self) -> None:
        self.shared._next = Turns(self.baton)  # type: ignore[assignment]
        self.shared._lock = Turns(self.baton)  # type: ignore[assignment]
        count, threads = len(self.scenario.jobs), self.scenario.threads
        parts = [range(first, count, threads) for first in range(threads)]
        self.baton.run([lambda part=part: self._thread(part) for part in parts])  # type: ignore[misc]

    def _thread(self, part: range) -> None:
        with self.shared.turn():
            for i in part:
                self._add(i)
        pending, waits = [self.requests[i] for i in part], 0
        while pending:
            with self.faults.expected(bool(self.scenario.threads)):
                for request in self.shared.wait(pending):
                    pending.remove(request)
            waits += 1
            for i in part:
                if self.scenario.jobs[i]["ends"] == waits:
                    self._cut(i)
            pending = [request for request in pending if not request.is_finished]

    def _check_prefix_cache(self) -> None:
        """Run one prompt four times after all jobs. The prefix cache must return all of its blocks, but only
        to requests with the same salt."""
        size, self.faults.over = self.engine.config.block_size, True
        blocks = 1 + (self.scenario.engine["budget"] > size)
        prompt = max((job["prompt"] for job in self.scenario.jobs), key=len)[: blocks * size + 1]
        whole = (len(prompt) - 1) // size * size * bool(self.scenario.engine["caching"])
        job = {"prompt": prompt, "params": {"temperature": 0.0, "max_tokens": 2, "seed": 0}}
        oracle = oracle_of(self.model, self.scenario.engine, job)
        output = oracle.run()
        for salt, expected in ((b"", None), (b"", whole), (b"x", 0), (b"x", whole)):
            self.oracles.append(oracle)
            self.expected.append(output)
            self.exact.append(self._is_exact(oracle.params))
            request = self.requests[len(self.requests)] = self.engine.add(prompt, oracle.params, salt=salt)
            while not request.is_finished:
                with self.shared.turn():
                    self.shared.step()
            hits, is_nan = request.num_cached_tokens, self.expected[-1].finish_reason == "abort"
            is_expected = is_nan or expected in (hits, None)
            assert is_expected, f"{hits} of {len(prompt)} tokens were cached, expected {expected}"

    def _add(self, i: int) -> None:
        job, oracle = self.scenario.jobs[i], self.oracles[i]
        index, salt = job.get("index", 0), job.get("salt", "").encode()
        with limited(self.scenario.engine):
            self.requests[i] = self.engine.add(oracle.prompt, oracle.params, index, salt)

    def _step(self) -> list[Request]:
        """Run a step of the engine and check the invariants."""
        with self.watch.step([*self.requests.values()]):
            touched = self._engine_step()
        self.seen["steps"] += 1
        for i, request in self.requests.items():
            self.block_texts.learn(request)
            self._compare_tokens(i, request)
            if i % 2:
                self._read(i, request)
        check(self.engine, self.model, self.block_texts)
        return touched

    def _read(self, i: int, request: Request) -> None:
        """Read the pieces of a stream. When the request is finished, they must add up to its text."""
        pieces = self.pieces.setdefault(i, [])
        pieces += [piece.text for piece in request.new_pieces()]
        assert not request.is_finished or "".join(pieces) == request.text, f"job {i} streams {pieces}"

    def _is_exact(self, params: SamplingParams) -> bool:
        """Return whether an output must equal the oracle's, token by token."""
        rule = params.acceptance or self.scenario.engine["acceptance"]
        alone = params.response_format is not None or self.scenario.engine["method"] == "none"
        return rule == "exact" or params.temperature == 0 or alone

    def _compare_tokens(self, i: int, request: Request) -> None:
        output = request.output_ids
        if self.exact[i]:
            expected = self.expected[i].token_ids[: len(output)]
            assert output == expected, f"job {i} generated {output} instead of {expected}"

    def _compare(self, i: int, request: Request) -> None:
        """Compare a finished request with the oracle."""
        assert request.is_finished, f"job {i} is not finished"
        output, expected = request.output_ids, self.expected[i]
        stats = request.stats
        assert stats.num_tokens == len(output), f"job {i} counts {stats.num_tokens} of {len(output)} tokens"
        assert len(request.draft_sources) == len(output)
        self._read(i, request)
        if not self.exact[i]:
            self._check_possible(i, output)
            return
        self._compare_tokens(i, request)
        matches = (output, request.finish_reason) == (expected.token_ids, expected.finish_reason)
        if request.finish_reason == "abort" and not matches:
            assert i in self.cut, f"job {i} was aborted unexpectedly: {request.error}"
            return
        assert matches, f"job {i}: got {(output, request.finish_reason)}, expected {expected[:2]}"
        if self.engine.tokenizer is not None:
            actual, correct = (request.text, request.stop_reason), (expected.text, expected.stop_reason)
            assert actual == correct, f"job {i}: got {actual}, expected {correct}"
        self._compare_logprobs(request, expected)
        if self._is_known(request) and not self.faults.raised:
            drafted, accepted = request.stats.num_drafted, request.stats.num_accepted
            assert accepted == drafted, f"job {i}: {drafted - accepted} correct drafts were rejected"

    def _is_known(self, request: Request) -> bool:
        """Return whether the draft model equals the target and must therefore predict the whole output."""
        settings, params = self.scenario.engine, request.params
        same = settings["method"] == "draft" and not settings["blur"] and request.finish_reason == "length"
        return same and not (params.changes_logits or request.constraint)

    def _compare_logprobs(self, request: Request, expected: Expected) -> None:
        n = request.params.logprobs
        assert len(request.logprobs) == (0 if n is None else len(expected.token_ids))
        for logprobs, token, scores in zip(request.logprobs, expected.token_ids, expected.scores):
            reference = scores.float().log_softmax(0)
            assert next(iter(logprobs)) == token
            assert all(abs(at.logprob - float(reference[t])) < 1e-4 for t, at in logprobs.items())
            assert logprobs[token].rank == 1 + int((reference > reference[token]).sum())

    def _check_possible(self, i: int, output: list[int]) -> None:
        """Check for typical acceptance that each token has nonzero probability."""
        oracle, tokens = self.oracles[i], list(self.oracles[i].prompt)
        for token in output:
            possible = oracle.is_possible(oracle.scores(tokens), tokens, token)
            assert possible, f"job {i} cannot generate {token}"
            tokens.append(token)

    def _count(self) -> None:
        """Count events, so that tests can check which features the scenarios cover."""
        metrics, spec = self.engine.metrics, self.engine.metrics.spec
        self.seen += Counter(
            requests=len(self.requests),
            tokens=sum(len(request.output_ids) for request in self.requests.values()),
            preemptions=metrics.num_preemptions,
            cached_tokens=metrics.num_cached_tokens,
            aborted=metrics.num_aborted,
            drafted=spec.num_drafted,
            accepted=spec.num_accepted,
            stopped_by_string=sum(isinstance(r.stop_reason, str) for r in self.requests.values()),
            guided=sum(r.constraint is not None for r in self.requests.values()),
            failed_grammars=sum("response_format failed" in (r.error or "") for r in self.requests.values()),
            nan=sum("NaN" in (r.error or "") for r in self.requests.values()),
            inexact=sum(not self.exact[i] for i in self.requests),
            async_scheduling=self.engine.lag,
            captured=self.engine.worker.graphs is not None,
            threaded=bool(self.scenario.threads),
        )


def simulate(scenario: Scenario) -> Counter[str]:
    """Run a scenario and return the counts of events. Raises on any violation."""
    return Simulation(scenario).run()
