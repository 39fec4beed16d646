"""Timing steps leaves state unchanged and covers only possible step sizes."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
import torch
from torch import Tensor

from nanospec.device.timing import SIZES, attention_ms, forward_ms
from nanospec.kernels.batch import Batch
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from tests.drive import make_engine
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def test_forward_ms_sizes(model: Model) -> None:
    worker = make_engine(model, 0, max_num_seqs=1, enforce_eager=True).worker
    for most, sizes in ((1, 2), (2, 2), (13, 6), (14, 7), (10_000, len(SIZES))):
        result = forward_ms(model, worker.kv_cache, worker.table, most)
        assert tuple(result) == SIZES[:sizes]
        assert min(result.values()) > 0


@pytest.mark.parametrize(
    ("seconds_per_pass", "devices", "short", "long"), [(0.0, 1, 9, 3), (3.0, 1, 2, 2), (3.0, 2, 3, 3)]
)
def test_slow_forward_passes_are_repeated_less(
    monkeypatch: pytest.MonkeyPatch, seconds_per_pass: float, devices: int, short: int, long: int
) -> None:
    model, passes, forward = tiny_model(), Counter[int](), Model.forward
    clock = count(step=seconds_per_pass / 2)

    def counting(self: Model, batch: Batch, kv_cache: Tensor) -> Tensor:
        passes[batch.num_tokens] += 1
        return forward(self, batch, kv_cache)

    worker = make_engine(model, 0, max_num_seqs=1, enforce_eager=True).worker
    model.num_devices = devices
    monkeypatch.setattr(Model, "forward", counting)
    monkeypatch.setattr("nanospec.device.timing.time.perf_counter", lambda: next(clock))
    times = forward_ms(model, worker.kv_cache, worker.table, 64)
    assert set(times.values()) == {seconds_per_pass / 2 * 1000}
    assert passes[1] == short
    assert passes[64] == long


def test_measure_leaves_state_unchanged(model: Model) -> None:
    worker = make_engine(model, "auto", max_num_seqs=3, enforce_eager=True).worker
    worker.kv_cache.fill_(7)
    before = [column.clone() for column in worker.table if isinstance(column, Tensor)]
    costs = worker.measure()
    assert (worker.kv_cache == 7).all()
    after = (column for column in worker.table if isinstance(column, Tensor))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert costs.packed
    assert max(costs.packed) >= 3 * (worker.max_k + 1)
    assert min(costs.attention) >= 0


def test_attention_ms(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1 ms per token, plus the expected costs for each of 64 positions of two rows; 0 if the context
    length is too short to measure."""

    def times(model: Model, kv_cache: Tensor, table: Table, batches: dict[int, Batch]) -> dict[int, float]:
        return {q: batch.num_tokens + 2 * 64 * (0.003 + 0.001 * q) for q, batch in batches.items()}

    def measured(max_context: int) -> tuple[float, float]:
        table = Table.empty(2, max_context, 16, model.config.vocab_size, "cpu")
        return attention_ms(model, table, {1: 1.0, 2: 2.0})

    assert measured(4) == (0, 0)
    measured(5)
    monkeypatch.setattr("nanospec.device.timing._min_ms", times)
    assert measured(64 + 4) == pytest.approx((0.003, 0.001))
