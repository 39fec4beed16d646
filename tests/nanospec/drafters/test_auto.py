"""Automatic K in the running engine: it exploits repetition, drops failing drafts, and keeps outputs."""

from __future__ import annotations

import json

import pytest

from nanospec.config import SamplingParams
from nanospec.drafters.estimates import StepCosts
from nanospec.drafters.policy import AutoPolicy, ByRow, Policy
from nanospec.engine.locking import SharedEngine
from nanospec.kernels.speculation.report import RowReport
from nanospec.models.decoder import Model
from tests.drive import Job, assert_same, junk, make_engine, outcome, run, run_alone, use_drafter
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.mark.parametrize("eager", [True, False], ids=["packed", "captured"])
def test_automatic_k_speculates_without_changing_output(model: Model, eager: bool) -> None:
    jobs = [
        Job([3, 1, 3, 1], SamplingParams(temperature=0, max_tokens=80, logit_bias={7: 60.0})),
        Job([2, 9, 4], SamplingParams(temperature=1.0, seed=2, max_tokens=60)),
    ]
    engine = make_engine(model, "auto", max_num_seqs=2, enforce_eager=eager, max_model_len=128)
    assert isinstance(engine.policy, AutoPolicy)
    costs = engine.policy.costs
    assert bool(costs.packed) == eager
    if costs.captured:  # a step of this model costs microseconds: noise
        engine.policy.costs = smooth(costs, 0.01)
    requests = run(engine, jobs)
    for request, expected in zip(requests, run_alone(model, jobs, max_model_len=128), strict=True):
        assert_same(outcome(request), expected)
    assert requests[0].stats.tokens_per_step > 2
    report = json.loads(json.dumps(SharedEngine(engine).report()))
    assert ("step_ms_by_tokens" in report) == eager
    if engine.worker.graphs is not None:
        assert report["captured_steps"]["count"] == len(engine.worker.graphs.buckets())
        assert set(report["step_ms_by_batch_and_k"]) == {"1", "2"}
        assert set(engine.worker.graphs.captures) == set(engine.worker.graphs.buckets())


def smooth(costs: StepCosts, per_token: float) -> StepCosts:
    """Return the same table with synthetic times."""
    captured = {B: {k: 1 + per_token * k for k in by_k} for B, by_k in costs.captured.items()}
    return StepCosts(captured, {n: 1 + per_token * n for n in costs.packed})


@pytest.mark.parametrize("eager", [True, False], ids=["packed", "captured"])
def test_failing_drafts_are_dropped(model: Model, eager: bool) -> None:
    engine = make_engine(model, "auto", max_num_seqs=1, enforce_eager=eager)
    assert isinstance(engine.policy, AutoPolicy)
    engine.policy.costs = smooth(engine.policy.costs, 0.05)
    use_drafter(engine, junk(model.config.vocab_size))
    [request] = run(engine, [Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=110))])
    assert request.stats.num_accepted <= request.stats.num_tokens // 10
    assert request.stats.num_drafted < 2 * request.stats.num_tokens


def test_policy_receives_context_length_and_waiting_flag(model: Model) -> None:
    """Steps without drafts are not observed."""
    engine = make_engine(model, "auto", max_num_seqs=2, enforce_eager=False)
    calls: list[tuple[int, bool]] = []

    class Spy(Policy):
        def choose(
            self, limits: ByRow, drafter_limits: ByRow, context: int, waiting: bool
        ) -> tuple[int, int]:
            calls.append((context, waiting))
            return 0, 0

        def observe(self, row: int, report: RowReport) -> None:
            raise AssertionError

    engine.policy = Spy()
    run(engine, [Job([1] * n, SamplingParams(temperature=0, max_tokens=2)) for n in (3, 20, 5)])
    assert calls[0] == (23, True)
    assert not calls[-1][1]
