"""Captured steps: buckets, padding, and that no host value is frozen into a capture."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import nanospec.device.graphs as graphs
from nanospec import SamplingParams
from nanospec.device.graphs import MAX_STEP_TOKENS, Bucket, StepGraphs, batch_sizes
from nanospec.device.step import StepResult
from nanospec.device.timing import dummy_rows, elapsed_ms, replay_ms
from nanospec.engine.engine import Engine
from nanospec.kernels import launch
from nanospec.kernels.transfer import upload
from nanospec.models.decoder import Model
from tests.drive import Job, assert_same, make_engine, outcome, run, run_alone
from tests.random_weights import random_heads
from tests.tape import TapeCapture
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def graphs_of(engine: Engine) -> StepGraphs:
    assert engine.worker.graphs is not None
    return engine.worker.graphs


@pytest.mark.parametrize("largest", [1, 3, 8, 64, 100, 256])
def test_batch_sizes(largest: int) -> None:
    sizes = batch_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert all(b <= 2 * a for a, b in pairwise(sizes))
    assert set(sizes) <= {1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, largest}


def test_every_reachable_bucket_is_captured(model: Model) -> None:
    engine = make_engine(model, 6, enforce_eager=False, max_num_seqs=5)
    captured = graphs_of(engine)
    assert set(captured.captures) == set(captured.buckets())
    assert not any(stage.seconds for stage in engine.worker.stages.values())  # a capture is not a step
    for rows in range(1, 6):
        for k in range(7):
            bucket = captured.bucket_for(rows, k)
            assert bucket in captured.captures
            assert bucket.batch_size >= rows
            assert bucket.k <= k
    assert all(captured.bucket_for(rows, 0).k == 0 for rows in range(1, 6))


@pytest.mark.parametrize("lazy", [False, True], ids=["at-start", "lazy"])
def test_capture_at_start_or_on_demand(model: Model, lazy: bool) -> None:
    engine = make_engine(model, 3, enforce_eager=False, max_num_seqs=4, lazy_capture=lazy)
    before = len(graphs_of(engine).captures)
    assert before == (0 if lazy else len(graphs_of(engine).buckets()))
    run(engine, [Job([1, 2, 3, 1, 2, 3], SamplingParams(temperature=0, max_tokens=n)) for n in (3, 9, 5)])
    assert lazy == (len(graphs_of(engine).captures) > before)


def test_oversized_buckets_are_skipped_and_k_is_reduced() -> None:
    steps = StepGraphs(lambda rows, k, requested: None, torch.device("cpu"), 256, [3, 16])  # type: ignore
    actual = steps.buckets()
    assert all(b.k == 0 or b.batch_size * (b.k + 1) <= MAX_STEP_TOKENS for b in actual)
    assert actual[0].batch_size * (actual[0].k + 1) == steps.max_tokens == 1024
    chosen = [steps.bucket_for(rows, 16) for rows in (1, 60, 64, 256)]
    assert chosen == [Bucket(1, 16), Bucket(64, 3), Bucket(64, 3), Bucket(256, 3)]
    assert steps.bucket_for(256, 2) == Bucket(256, 0)
    assert {*chosen, Bucket(256, 0)} <= {*actual}


def test_captures_share_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    monkeypatch.setattr(graphs, "CudaCapture", lambda step, pool: pools.append(pool))
    steps = StepGraphs(lambda rows, k, requested: None, torch.device("cpu"), 2, [1])  # type: ignore
    steps._pool = "pool"  # type: ignore[assignment]
    steps.capture_all()
    assert pools == ["pool"] * 4


def test_rows_are_uploaded_only_on_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """All buckets share the rows; capturing one in between steps no row."""
    stepped: list[list[int]] = []
    sent: list[list[int]] = []

    def step(rows: Tensor, k: int, requested: Any) -> StepResult:
        stepped.append(rows.tolist())
        return StepResult(rows[:, None].clone(), rows[:, None].clone(), rows.clone(), rows[:, None].clone())

    def spy(values: list[int], *given: Any, **named: Any) -> Tensor:
        sent.append(values)
        return upload(values, *given, **named)

    monkeypatch.setattr(graphs, "upload", spy)
    steps = StepGraphs(step, torch.device("cpu"), 4, [1], lazy=True)
    for rows, k, again in (
        ([2, 0, 1], 0, True),
        ([2, 0, 1], 0, False),
        ([2, 0, 1, 3], 0, True),
        ([2, 0], 0, True),  # captured now
        ([2, 0], 0, False),
        ([2, 0], 1, True),  # the same
        ([2, 0], 0, False),
        ([0], 0, True),
    ):
        stepped.clear()
        sent.clear()
        assert steps.run(rows, steps.bucket_for(len(rows), k)).report.flatten().tolist() == rows
        padded = rows + [-1] * (4 * (len(rows) > 2) - len(rows))
        assert sent == [padded] * again
        assert stepped.pop() == padded
        assert all(row == -1 for captured in stepped for row in captured)


def test_tape_capture_freezes_host_values() -> None:
    """Check that a `TapeCapture` detects a step that reads host values."""
    counts = torch.zeros(3)
    host = [5.0]

    def step(rows: Tensor) -> Tensor:
        counts.add_(host[0])
        return rows + 1

    rows = torch.tensor([1, 2, 3])
    tape = TapeCapture(lambda: step(rows))  # type: ignore[arg-type,return-value]
    host[0], counts[:] = 7.0, 0.0
    rows.copy_(torch.tensor([4, 5, 6]))
    tape.replay()
    assert tape.result.tolist() == [5, 6, 7]  # type: ignore[attr-defined]
    assert counts.tolist() == [5.0] * 3  # the old value: frozen

    def reads(rows: Tensor) -> Tensor:
        return rows * int(rows[0])

    bad: Callable[[Tensor], Tensor] = reads
    with pytest.raises(AssertionError, match="makes the host wait"):
        TapeCapture(lambda: bad(rows))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("k", [0, 2])
def test_replay_ms_leaves_state_unchanged(model: Model, k: int) -> None:
    engine = make_engine(model, 2, enforce_eager=False, max_num_seqs=2)
    table = engine.worker.table
    before = [t.clone() for t in (table.num_tokens, table.finished, table.max_k, table.temperature)]
    steps: list[int] = []
    capture = graphs_of(engine).captures[Bucket(2, k)]
    replay = capture.replay

    def spy() -> None:
        assert (table.stop_ids[:2] == -1).all()
        replay()
        steps.append(int(capture.result.report[:, 1].sum()))  # drafts of both rows

    capture.replay = spy  # type: ignore[method-assign]
    fill_rows = partial(dummy_rows, table, engine.worker.num_blocks)
    assert replay_ms(graphs_of(engine), Bucket(2, k), fill_rows) > 0
    assert steps
    assert set(steps) == {2 * k}
    after = (table.num_tokens, table.finished, table.max_k, table.temperature)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
    jobs = [Job([1, 2, 3, 1, 2, 3], SamplingParams(temperature=0, max_tokens=9))]
    assert_same(outcome(run(engine, jobs)[0]), run_alone(model, jobs)[0])


def test_elapsed_ms_uses_cuda_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches everything before the first event is reached, when all ranks have met."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: order.append("idle"))
    barrier = partial(order.append, "barrier")
    assert elapsed_ms(lambda: order.append("run"), torch.device("cuda"), barrier) == 0.25
    assert order == ["idle", "sleep", "barrier", "event", "run", "event", "wait"]


@pytest.mark.parametrize("setup", [
    "ngram", "ngram, direct", "ngram-tree", "draft", "draft by rejection", "medusa-tree", "ngram-tree+draft",
])  # fmt: skip
def test_triton_capture_freezes_no_host_values(setup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture Triton kernels before any request exists, then replay them for various requests. Results are
    collected one step later unless "direct"."""
    jobs = [
        Job([1, 2, 3, 1, 2, 3, 1], SamplingParams(temperature=0, max_tokens=7)),
        Job([9, 4] * 5, SamplingParams(temperature=0.8, seed=3, top_k=5, max_tokens=5)),
    ]
    if setup.startswith("ngram") and "-tree" not in setup:
        biased = SamplingParams(temperature=0, max_tokens=8, presence_penalty=0.1, logit_bias={5: 50})
        jobs.append(Job([7, 5, 5], biased))
    wanted = run_alone(tiny_model(num_layers=1), jobs)
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    with launch.forced("triton"):
        # Created here, since weights are packed for the kernels.
        target, draft = tiny_model(num_layers=1), tiny_model(num_layers=1)
        spec = {
            "method": re.split(", | ", setup.replace("-tree", ""))[0],
            "tree_width": 2 if "tree" in setup else 1,
            "acceptance": "rejection" if "rejection" in setup else "exact",
        }
        if "rejection" in setup:  # other requests keep their own rule
            jobs[1] = Job(jobs[1].prompt, replace(jobs[1].params, acceptance="exact"))
        heads = random_heads(target, 2, vocab=40)
        engine = make_engine(
            target, 2, spec=spec, draft_model=draft if "draft" in setup else None, heads=heads,
            enforce_eager=False, max_num_seqs=2, max_model_len=32, async_scheduling="direct" not in setup,
        )  # fmt: skip
        requests = run(engine, jobs)
    for request, expected in zip(requests, wanted, strict=True):
        assert_same(outcome(request), expected)
    stats = engine.metrics.spec
    assert stats.num_drafted > 0
    assert stats.num_accepted > 0 or len(jobs) == 2
    if setup.startswith("draft"):
        assert stats.num_accepted == stats.num_drafted
