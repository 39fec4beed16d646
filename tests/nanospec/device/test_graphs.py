"""Captured steps: buckets, padding, uploads and timing."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.device import graphs
from nanospec.device.graphs import MAX_STEP_TOKENS, Bucket, StepGraphs, batch_sizes
from nanospec.device.step import StepResult
from nanospec.device.timing import dummy_rows, elapsed_ms, replay_ms
from nanospec.kernels.transfer import upload
from tests.drive import Job, make_engine, run_and_compare
from tests.tiny import tiny_model

CPU = torch.device("cpu")


def test_batch_sizes() -> None:
    powers = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for largest in (1, 3, 8, 64, 100, 256):
        sizes = batch_sizes(largest)
        assert sizes == [size for size in powers if size < largest] + [largest]
        assert all(b <= 2 * a for a, b in pairwise(sizes))


def no_step(rows: Tensor, k: int, requested: Any) -> Any:
    return None


def test_bucket_for() -> None:
    """Large buckets are skipped, so K is reduced."""
    steps = StepGraphs(no_step, CPU, 256, [3, 16])
    actual = steps.buckets()
    assert all(b.k == 0 or b.batch_size * (b.k + 1) <= MAX_STEP_TOKENS for b in actual)
    assert actual[0].batch_size * (actual[0].k + 1) == steps.max_tokens == 1024
    chosen = [steps.bucket_for(rows, 16) for rows in (1, 60, 64, 256)]
    assert chosen == [Bucket(1, 16), Bucket(64, 3), Bucket(64, 3), Bucket(256, 3)]
    assert steps.bucket_for(256, 2) == Bucket(256, 0)
    for rows, k in product((1, 2, 3, 5, 33, 100, 193, 256), range(17)):
        bucket = steps.bucket_for(rows, k)
        assert bucket in actual
        assert bucket.batch_size >= rows
        assert bucket.k <= k


def test_captures_share_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    monkeypatch.setattr(graphs, "CudaCapture", lambda step, pool: pools.append(pool))
    steps = StepGraphs(no_step, CPU, 2, [1])
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
    steps = StepGraphs(step, CPU, 4, [1], lazy=True)
    assert not steps.captures
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
    assert steps.replays == {(4, 0): 3, (2, 0): 3, (2, 1): 1, (1, 0): 1}


@pytest.mark.parametrize("k", [0, 2])
def test_replay_ms_leaves_state_unchanged(k: int) -> None:
    model = tiny_model()
    engine = make_engine(model, 2, enforce_eager=False, max_num_seqs=2)
    table, captured = engine.worker.table, engine.worker.graphs
    assert captured is not None
    assert set(captured.captures) == set(captured.buckets())
    assert not any(stage.seconds for stage in engine.worker.stages.values())  # a capture is not a step
    before = [column.clone() for column in (table.num_tokens, table.finished, table.max_k, table.temperature)]
    steps: list[int] = []
    capture = captured.captures[Bucket(2, k)]
    replay = capture.replay

    def spy() -> None:
        assert (table.stop_ids[:2] == -1).all()
        replay()
        steps.append(int(capture.result.report[:, 1].sum()))  # drafts of both rows

    capture.replay = spy  # type: ignore[method-assign]
    fill_rows = partial(dummy_rows, table, engine.worker.num_blocks)
    assert replay_ms(captured, Bucket(2, k), fill_rows) > 0
    assert steps == [2 * k] * 6
    after = (table.num_tokens, table.finished, table.max_k, table.temperature)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    run_and_compare(engine, model, [Job([1, 2, 3, 1, 2, 3], SamplingParams(temperature=0, max_tokens=9))])


def test_elapsed_ms_uses_cuda_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches everything before the first event is reached, when all ranks have met."""
    order: list[str] = []

    def event(enable_timing: bool) -> Any:
        assert enable_timing
        record, wait = partial(order.append, "event"), partial(order.append, "wait")
        return SimpleNamespace(record=record, synchronize=wait, elapsed_time=lambda end: 0.25)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: order.append("idle"))
    barrier = partial(order.append, "barrier")
    assert elapsed_ms(lambda: order.append("run"), torch.device("cuda"), barrier) == 0.25
    assert order == ["idle", "sleep", "barrier", "event", "run", "event", "wait"]
