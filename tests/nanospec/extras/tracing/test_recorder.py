"""Traces record the steps that ran, and tracing does not change the output."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from nanospec import SamplingParams
from nanospec.drafters.estimates import StepCosts
from nanospec.drafters.policy import Policy
from nanospec.extras.tracing.recorder import MAX_REQUESTS, Recorder, find_recorder, walk
from nanospec.outputs import RequestOutput
from tests.drive import MODES, Job, cycle_model, finish, make_engine, random_jobs, run
from tests.nanospec.extras.tracing.records import check, record_of
from tests.tiny import tiny_model

SETUPS: list[dict[str, Any]] = [
    {"k": "auto", **MODES["as-on-gpu"]},
    {"k": 5, "spec": {"method": "ngram+eagle3", "tree_width": 2}, **MODES["plain"]},
    {"k": 3, "spec": {"method": "draft", "acceptance": "typical"}, **MODES["as-on-gpu"]},
    {"k": 4, "num_blocks": 8, **MODES["plain"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=["auto", "tree", "typical", "few-pages"])
def test_steps_add_up_to_the_output_and_tracing_does_not_change_it(setup: dict[str, Any]) -> None:
    model, few, tree = tiny_model(), "num_blocks" in setup, "tree_width" in str(setup)
    models: dict[str, Any] = {"draft_model": tiny_model(num_layers=1)} if "'draft'" in str(setup) else {}
    jobs = random_jobs(random.Random("few-pages" if few else "auto"), 64, 9 if few else 4, max_tokens=25)
    engine, untraced = (make_engine(model, trace=on, **setup, **models) for on in (True, False))
    requests = [engine.add(job.prompt, job.params) for job in (*jobs, jobs[0])]
    for _ in range(4):
        engine.step()
    engine.abort(requests[-1])
    finish(engine)
    for request in requests:
        check(request)
    plain = run(untraced, jobs)
    assert [r.output_ids for r in requests[:-1]] == [r.output_ids for r in plain]
    assert all(r.extension_data is None for r in plain)
    assert not few or engine.metrics.num_preemptions > 0
    steps = [step for r in requests for step in record_of(r).steps]
    assert any(step.parents != [*range(len(step.parents))] for step in steps) == tree
    assert walk([5, 9, 6], [5, 6], [0, 1]) == [1], "the walk must end at a mismatch"


def test_reason_for_number_of_drafts() -> None:
    recorder: Any = Recorder()
    auto, fixed = SimpleNamespace(costs=StepCosts({1: {1: 1.0}})), Policy()
    for own, left, drafted, verified, k, policy, probing, reason in (
        (0, 9, 0, 0, 2, auto, False, "off"), (None, 1, 0, 0, 2, auto, False, "end"),
        (4, 2, 0, 0, 0, fixed, False, "does not pay"), (None, 2, 0, 0, 2, auto, False, "no match"),
        (None, 2, 2, 2, 2, fixed, False, "fixed"), (None, 2, 2, 0, 2, auto, False, "does not pay"),
        (None, 2, 2, 1, 2, auto, False, "pays"), (None, 2, 2, 1, 2, auto, True, "probe"),
    ):  # fmt: skip
        recorder._policy = policy
        params, data = SimpleNamespace(num_speculative_tokens=own), SimpleNamespace(num_tokens=8)
        request: Any = SimpleNamespace(params=params, extension_data=data, max_len=8 + left)
        for max_k, expected in ((3, reason), (0, "off")):
            recorder._worker = SimpleNamespace(max_k=max_k)
            assert recorder._reason(request, drafted, verified, k, probing) == expected


def test_share_of_time_without_drafts() -> None:
    recorder: Any = Recorder()
    step: Any = SimpleNamespace(rows=[0, 1], k=3, requests=[SimpleNamespace(num_tokens=5)] * 2)
    result: Any = SimpleNamespace(report=SimpleNamespace(num_drafted=2))
    recorder._costs = SimpleNamespace(cost=lambda rows, n, context: n * context)
    assert recorder._plain_share(step, [result, result]) == 2 / 6


def test_latest_requests_are_kept_if_enabled() -> None:
    engine, jobs = make_engine(cycle_model(), 1, trace=True), [Job([1], SamplingParams(max_tokens=1))]
    run(engine, jobs * (MAX_REQUESTS + 3))
    recorder = find_recorder(engine.extensions)
    assert (len(recorder.requests), recorder.num_requests) == (MAX_REQUESTS, MAX_REQUESTS + 3)
    engine = make_engine(cycle_model(), 1)
    [request] = run(engine, jobs)
    output = RequestOutput("a", None, [1], [request.completion()])
    for ask in (output.trace, lambda: find_recorder(engine.extensions)):
        with pytest.raises(ValueError, match=r"No trace was recorded; .*trace=True"):
            ask()
