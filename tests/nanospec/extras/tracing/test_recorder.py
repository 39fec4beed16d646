"""Traces record the steps that ran, and tracing does not change the output."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanospec import SamplingParams
from nanospec.drafters import Drafter, make_proposal
from nanospec.drafters.policy import Policy
from nanospec.engine.engine import Engine
from nanospec.extras.tracing.recorder import MAX_REQUESTS, Recorder, find_recorder, walk
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from nanospec.outputs import RequestOutput
from tests.drive import MODES, Job, cycle, cycle_model, finish, make_engine, outcome, random_jobs, run
from tests.nanospec.extras.tracing.records import check, record_of
from tests.random_weights import random_heads
from tests.tape import Tape
from tests.tiny import tiny_model

SETUPS: dict[str, dict[str, Any]] = {
    "auto": {"k": "auto"},
    "tree": {"k": 6, "spec": {"tree_width": 3}},
    "heads": {"k": 3, "spec": {"method": "ngram+medusa"}},
    "head-tree": {"k": 5, "spec": {"method": "medusa", "tree_width": 2}},
    "rejection": {"k": 3, "spec": {"method": "draft", "acceptance": "rejection"}},
    "K0": {"k": 0},
    "few-pages": {"k": 4, "num_blocks": 8},
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


@pytest.mark.parametrize(
    ("setup", "mode"),
    [*zip(SETUPS, itertools.cycle(MODES)), ("auto", "as-on-gpu"), ("few-pages", "as-on-gpu")],
)
def test_steps_add_up_to_the_output_and_tracing_does_not_change_it(
    model: Model, setup: str, mode: str
) -> None:
    jobs = random_jobs(random.Random(setup), 64, 9 if setup == "few-pages" else 5, max_tokens=30)
    engine, untraced = (traced(model, setup, trace=on, **MODES[mode]) for on in (True, False))
    requests = [engine.add(job.prompt, job.params) for job in (*jobs, *jobs[:2])]
    for _ in range(4):
        engine.step()
    for request in requests[len(jobs) :]:
        engine.abort(request)
    finish(engine)
    for request in requests:
        check(request)
    plain = run(untraced, jobs)
    assert [r.output_ids for r in requests[: len(jobs)]] == [r.output_ids for r in plain]
    assert all(r.extension_data is None for r in plain)
    if setup == "few-pages":
        assert engine.metrics.num_preemptions > 0
    if "tree" in setup:
        steps = [step for r in requests for step in record_of(r).steps]
        assert any(step.parents != list(range(len(step.parents))) for step in steps)


def test_recording_is_captured() -> None:
    """A replay records the new proposal of each row, without waiting for the device."""
    table, worker = Table.empty(3, 64, 16, 50, "cpu"), SimpleNamespace(max_k=3, device="cpu")
    recorder, rows = Recorder(), torch.tensor([2, -1, 0], dtype=torch.int32)
    recorder.attach(type("Worker", (), {"table": table, **vars(worker)})())
    table.num_tokens.copy_(torch.tensor([5, 6, 7]))
    drafts, counts = torch.arange(6).view(3, 2).int(), torch.tensor([2, 2, 1], dtype=torch.int32)
    proposal = make_proposal(drafts, counts)
    recorder.propose(table, rows, proposal)
    with Tape() as tape:
        assert recorder.propose(table, rows, proposal) is proposal
    for change in (0, 10):
        table.num_tokens.add_(change)
        proposal.drafts.add_(change)
        for entry in tape.entries:
            entry()
        lines = recorder._lines
        assert lines[2, [0, 1, 2, 3, 8, 9]].tolist() == [7 + change, 2, change, 1 + change, 0, 1]
        assert lines[0, [0, 1, 2]].tolist() == [5 + change, 1, 4 + change]
        assert not lines[1].any()
    recorder.admit(2)
    assert not lines[2].any()


@pytest.mark.parametrize("mode", MODES)
def test_step_without_drafts_records_none(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cycle_model(), 2, trace=True, **MODES[mode])
    ks = itertools.cycle(((2, 2), (0, 0)))
    monkeypatch.setattr(Policy, "choose", lambda *args: next(ks))
    [request] = run(engine, [Job(cycle(0, 40), SamplingParams(temperature=0, max_tokens=12))])
    check(request)
    assert [len(step.drafts) for step in record_of(request).steps] == [2, 0] * 3


def test_rejected_and_unverified_drafts_are_recorded() -> None:
    engine = make_engine(cycle_model(), 4, trace=True)
    # Lookup of 3 finds 9, but the model continues with 4.
    [request] = run(engine, [Job([3, 9, 9, 1, 2, 3], SamplingParams(temperature=0, max_tokens=6))])
    first = record_of(request).steps[0]
    assert (first.tokens, first.accepted, first.verified) == ([4], [], 4)
    assert (first.drafts, first.sources, first.match_len) == ([9, 9, 1, 2], [1, 2, 3, 4], 1)
    assert (first.method, first.reason, first.batch) == ("ngram", "fixed", 1)


@pytest.mark.parametrize(
    ("own", "left", "drafted", "verified", "k", "speedup", "reason"),
    [
        (0, 9, 0, 0, 2, 1.5, "off"), (None, 1, 0, 0, 2, 1.5, "end"), (4, 2, 0, 0, 0, None, "does not pay"),
        (None, 2, 0, 0, 2, 1.5, "no match"), (None, 2, 2, 2, 2, None, "fixed"),
        (None, 2, 2, 0, 2, 1.5, "does not pay"), (None, 2, 2, 1, 2, 1.01, "pays"),
        (None, 2, 2, 1, 2, 1.0, "probe"),
    ],
)  # fmt: skip
def test_reason_for_number_of_drafts(
    own: Any, left: int, drafted: int, verified: int, k: int, speedup: Any, reason: str
) -> None:
    recorder: Any = Recorder()
    params, data = SimpleNamespace(num_speculative_tokens=own), SimpleNamespace(num_tokens=8)
    request: Any = SimpleNamespace(params=params, extension_data=data, max_len=8 + left)
    for max_k, expected in ((3, reason), (0, "off")):
        recorder._worker = SimpleNamespace(max_k=max_k)
        assert recorder._reason(request, drafted, verified, k, speedup) == expected


def test_recorder_keeps_latest_requests() -> None:
    engine = make_engine(cycle_model(), 1, trace=True)
    run(engine, [Job([1], SamplingParams(max_tokens=1))] * (MAX_REQUESTS + 3))
    recorder = find_recorder(engine.extensions)
    assert (len(recorder.requests), recorder.num_requests) == (MAX_REQUESTS, MAX_REQUESTS + 3)


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


@pytest.mark.parametrize("mode", MODES)
def test_dropped_drafts_are_not_recorded(model: Model, mode: str) -> None:
    """A drafter may use int64."""

    class Invalid(Drafter):
        def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
            drafts = torch.tensor([5, 6, -1, 7][:k]).repeat(len(rows), 1)
            return make_proposal(drafts, torch.full((len(rows),), k + 2))

    job = Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    engines = (make_engine(model, 4, drafter=Invalid(), trace=on, **MODES[mode]) for on in (False, True))
    plain, request = (run(engine, [job])[0] for engine in engines)
    assert outcome(request) == outcome(plain)
    assert {(*step.drafts,) for step in record_of(request).steps} <= {(5, 6), ()}
    check(request)
