"""Automatic K in the running engine: it exploits repetition, drops failing drafts, and keeps outputs."""

from __future__ import annotations

import json

import pytest

from nanospec.config import SamplingParams
from nanospec.drafters.policy import ByRow, Policy
from nanospec.engine.locking import SharedEngine
from nanospec.kernels.speculation.report import RowReport
from nanospec.models.decoder import Model
from tests.drive import Job, make_engine, run, run_and_compare
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("steady")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.mark.parametrize("eager", [True, False], ids=["packed", "captured"])
def test_automatic_k_speculates_without_changing_output(model: Model, eager: bool) -> None:
    jobs = [
        Job([3, 1, 3, 1], SamplingParams(temperature=0, max_tokens=80, logit_bias={7: 60.0})),
        Job([2, 9, 4], SamplingParams(temperature=1.0, seed=2, max_tokens=60)),
    ]
    engine = make_engine(model, "auto", max_num_seqs=2, enforce_eager=eager)
    requests = run_and_compare(engine, model, jobs)
    assert requests[0].stats.tokens_per_step > 2
    report = json.loads(json.dumps(SharedEngine(engine).report()))
    assert ("step_ms_by_tokens" in report) == eager
    if engine.worker.graphs is not None:
        assert report["captured_steps"]["count"] == len(engine.worker.graphs.buckets())
        assert set(report["step_ms_by_batch_and_k"]) == {"1", "2"}
        assert set(engine.worker.graphs.captures) == set(engine.worker.graphs.buckets())


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
