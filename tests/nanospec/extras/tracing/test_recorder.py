"""Traces record the steps that ran, and tracing does not change the output."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nanospec.device.graphs as graphs
from nanospec import SamplingParams
from nanospec.drafters import Drafter, draft_limits, make_proposal
from nanospec.drafters.policy import Policy
from nanospec.engine.engine import Engine
from nanospec.extras.tracing.recorder import MAX_REQUESTS, find_recorder, walk
from nanospec.kernels import launch
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from nanospec.outputs import RequestOutput
from tests.drive import MODES, Job, cycle, cycle_model, finish, make_engine, outcome, random_jobs, run
from tests.nanospec.extras.tracing.records import check, record_of
from tests.random_weights import random_heads
from tests.tape import TapeCapture
from tests.tiny import tiny_model

SETUPS: dict[str, dict[str, Any]] = {
    "lookup": {"k": 4},
    "auto": {"k": "auto"},
    "tree": {"k": 6, "spec": {"tree_width": 3}},
    "heads": {"k": 3, "spec": {"method": "ngram+medusa"}},
    "head-tree": {"k": 5, "spec": {"method": "medusa", "tree_width": 2}},
    "draft-auto": {"k": "auto", "spec": {"method": "ngram+draft"}},
    "rejection": {"k": 3, "spec": {"method": "draft", "acceptance": "rejection"}},
    "none": {"k": None},
    "K0": {"k": 0},
    "few-pages": {"k": 4, "num_blocks": 12},
}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def traced(model: Model, setup: str, **options: Any) -> Engine:
    settings = {**SETUPS[setup], **options}
    method = settings.get("spec", {}).get("method", "")
    if "medusa" in method:
        settings["heads"] = random_heads(model, 3, vocab=50)
    if "draft" in method:
        settings["draft_model"] = tiny_model(num_layers=1)
    return make_engine(model, settings.pop("k"), **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "setup",
    [pytest.param(s, marks=pytest.mark.long) if s in ("draft-auto", "rejection") else s for s in SETUPS],
)
def test_steps_add_up_to_the_output_and_tracing_does_not_change_it(
    model: Model, setup: str, mode: str
) -> None:
    jobs = random_jobs(random.Random(setup), 64, 9)
    engine = traced(model, setup, trace=True, **MODES[mode])
    requests = run(engine, jobs)
    for request in requests:
        check(request)
    plain = run(traced(model, setup, **MODES[mode]), jobs)
    assert [outcome(r).token_ids for r in requests] == [outcome(r).token_ids for r in plain]
    assert all(r.extension_data is None for r in plain)
    if setup == "few-pages":
        assert engine.metrics.num_preemptions > 0
    if "tree" in setup:
        steps = [step for r in requests for step in record_of(r).steps]
        assert any(step.parents != list(range(len(step.parents))) for step in steps)


@settings(max_examples=12)
@given(st.integers(0, 1 << 30), st.sampled_from(["lookup", "tree", "few-pages"]), st.integers(0, 2))
def test_random_requests_and_aborts(seed: int, setup: str, num_aborted: int) -> None:
    rng, engine = random.Random(seed), _engine_once(setup)
    requests = [engine.add(job.prompt, job.params) for job in random_jobs(rng, 64, 5, max_tokens=20)]
    for _ in range(rng.randint(1, 6)):
        engine.step()
    for request in rng.sample(requests, num_aborted):
        engine.abort(request)
    finish(engine)
    for request in requests:
        check(request)


_engines: dict[str, Engine] = {}


def _engine_once(setup: str) -> Engine:
    if setup not in _engines:
        _engines[setup] = traced(tiny_model(), setup, trace=True, **MODES["as-on-gpu"])
    return _engines[setup]


def test_captured_step_records_drafts_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    with launch.forced("triton"):
        small = tiny_model(num_layers=1)
        few: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 32}
        engine = make_engine(small, 2, trace=True, spec={"tree_width": 2}, enforce_eager=False, **few)
        [request] = run(engine, [Job([1, 2, 3, 1, 2, 4, 1, 2], SamplingParams(temperature=0, max_tokens=4))])
    check(request)
    assert record_of(request).steps[0].drafts


@pytest.mark.parametrize("mode", MODES)
def test_step_without_drafts_records_none(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cycle_model(), 2, trace=True, **MODES[mode])
    ks = itertools.cycle(((2, 2), (0, 0)))
    monkeypatch.setattr(Policy, "choose", lambda *args: next(ks))
    [request] = run(engine, [Job(cycle(0, 40), SamplingParams(temperature=0, max_tokens=12))])
    check(request)
    assert [len(step.drafts) for step in record_of(request).steps] == [2, 0] * 3


def test_rejected_and_unverified_drafts_are_recorded(model: Model) -> None:
    engine = make_engine(cycle_model(), 4, trace=True)
    # Lookup of 3 finds 9, but the model continues with 4.
    [request] = run(engine, [Job([3, 9, 9, 1, 2, 3], SamplingParams(temperature=0, max_tokens=6))])
    first = record_of(request).steps[0]
    assert (first.tokens, first.accepted, first.verified) == ([4], [], 4)
    assert (first.drafts, first.sources, first.match_len) == ([9, 9, 1, 2], [1, 2, 3, 4], 1)
    assert (first.method, first.reason) == ("ngram", "fixed")


def test_reasons_for_number_of_drafts(model: Model) -> None:
    def reasons(engine: Engine, prompt: list[int], **params: Any) -> list[str]:
        sampling = SamplingParams(temperature=0, **{"max_tokens": 4, **params})
        return [step.reason for step in record_of(run(engine, [Job(prompt, sampling)])[0]).steps]

    fixed = make_engine(cycle_model(), 2, trace=True)
    assert reasons(fixed, [5], num_speculative_tokens=0) == ["off"] * 4
    assert reasons(fixed, [5], max_tokens=2) == ["no match", "end"]
    assert reasons(fixed, cycle(0, 40), max_tokens=3) == ["fixed"]
    auto = make_engine(cycle_model(), "auto", trace=True)
    result = {*reasons(auto, cycle(0, 40), max_tokens=60), *reasons(auto, [1, 5, 1, 5, 1], max_tokens=20)}
    assert result <= {"pays", "probe", "does not pay", "no match", "end"}
    assert "pays" in result


def test_recorder_keeps_latest_requests(model: Model) -> None:
    engine = make_engine(cycle_model(), 1, trace=True)
    run(engine, [Job([1], SamplingParams(max_tokens=1))] * (MAX_REQUESTS + 3))
    recorder = find_recorder(engine.extensions)
    assert len(recorder.requests) == MAX_REQUESTS
    assert recorder.num_requests == MAX_REQUESTS + 3


def test_no_trace_unless_enabled(model: Model) -> None:
    engine = make_engine(model, 2)
    [request] = run(engine, [Job([1, 2], SamplingParams(max_tokens=2))])
    output = RequestOutput("a", None, [1, 2], [request.completion()])
    for ask in (output.trace, lambda: find_recorder(engine.extensions)):
        with pytest.raises(ValueError, match=r"No trace was recorded; .*trace=True"):
            ask()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_walk_follows_tree(drafts: list[int], data: st.DataObject) -> None:
    parents = [data.draw(st.integers(0, i)) for i in range(len(drafts))]
    tokens = data.draw(st.lists(st.integers(0, 2), max_size=9))
    verified = data.draw(st.integers(0, len(drafts)))
    places = walk(tokens, drafts[:verified], parents)
    for (before, place), token in zip(itertools.pairwise([0, *places]), tokens):
        assert parents[place - 1] == before
        assert drafts[place - 1] == token
        assert place <= verified
    last = places[-1] if places else 0
    if len(places) < len(tokens):
        ahead = [i for i in range(verified) if parents[i] == last and drafts[i] == tokens[len(places)]]
        assert ahead == []


def test_drafter_may_use_int64(model: Model) -> None:
    class Repeat(Drafter):
        def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
            last = table.tokens[rows.clamp(min=0), table.num_tokens[rows.clamp(min=0)] - 1].long()
            return make_proposal(last[:, None].repeat(1, k), draft_limits(table, rows, k).long())

    job = Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    plain, request = (run(make_engine(model, 3, drafter=Repeat(), trace=t), [job])[0] for t in (False, True))
    assert outcome(request) == outcome(plain)
    check(request)


@pytest.mark.parametrize("mode", MODES)
def test_dropped_drafts_are_not_recorded(model: Model, mode: str) -> None:
    class Invalid(Drafter):
        def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
            return make_proposal(
                rows.new_tensor([5, 6, -1, 7][:k]).repeat(len(rows), 1), rows.new_full((len(rows),), k + 2)
            )

    job = Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    [request] = run(make_engine(model, 4, drafter=Invalid(), trace=True, **MODES[mode]), [job])
    assert {(*step.drafts,) for step in record_of(request).steps} <= {(5, 6), ()}
    check(request)
