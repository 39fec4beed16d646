"""Timing steps leaves state unchanged and covers only possible step sizes."""

from collections import Counter
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.device.graphs import Bucket
from nanospec.device.timing import SIZES, attention_ms, forward_ms
from nanospec.kernels.batch import Batch
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from tests.drive import K, make_engine
from tests.tiny import tiny_model


@pytest.mark.parametrize("eager", [True, False], ids=["packed", "captured"])
def test_measure_leaves_state_unchanged(eager: bool) -> None:
    model, drafted = tiny_model(), list[int]()
    spec: dict[str, Any] = {"spec": {"method": "eagle3"}} if eager else {}
    k: K = "auto" if eager else 2  # "auto" would already have measured
    worker = make_engine(model, k, max_num_seqs=3, enforce_eager=eager, **spec).worker
    assert not any(stage.seconds for stage in worker.stages.values())  # timing is not a step
    if worker.graphs is not None:
        capture = worker.graphs.captures[Bucket(2, 2)]
        replay = capture.replay

        def spy() -> None:
            assert (worker.table.stop_ids[:2] == -1).all()
            replay()
            drafted.append(int(capture.result.report[:, 1].sum()))  # of both rows

        capture.replay = spy  # type: ignore[method-assign]
    worker.kv_cache.fill_(7)
    table = {name: column for name, column in worker.table._asdict().items() if isinstance(column, Tensor)}
    before = {name: column.clone() for name, column in table.items()}
    costs = worker.measure()
    changed = {name for name, column in before.items() if not torch.equal(column, table[name])}
    assert not changed & ({*before} if eager else {"num_tokens", "finished", "max_k", "temperature"})
    assert drafted == [4] * 6 * (not eager)
    if eager:
        assert (worker.kv_cache == 7).all()
        assert max(costs.ms[3]) >= 3 * (worker.max_k + 1)
        assert min(costs.attention) >= 0
        assert (worker.drafters[0].entry[:-1] < 0).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["draft", "eagle3", "dflash", "ngram+draft", "ngram+eagle3"])
def test_captured_steps_are_timed_with_the_drafts_of_the_model(method: str) -> None:
    model, last = tiny_model(), method.count("+")
    draft_model = tiny_model(1, num_layers=1) if "draft" in method else None
    engine = make_engine(
        model, "auto", spec={"method": method}, draft_model=draft_model, max_num_seqs=1, enforce_eager=False
    )
    assert engine.worker.graphs is not None
    for bucket, capture in engine.worker.graphs.captures.items():
        if bucket.k:
            most = min(bucket.k, engine.worker.drafters[-1].max_drafts)
            assert capture.result.report[:, [1, 3]].tolist() == [[most, last]]


def test_slow_forward_passes_are_repeated_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short passes have their own time limit. With several devices, all run the same number of passes."""
    model, passes, forward = tiny_model(), Counter[int](), Model.forward
    worker = make_engine(model, 0, max_num_seqs=1, enforce_eager=True).worker

    def counting(self: Model, batch: Batch, kv_cache: Tensor) -> Tensor:
        passes[batch.num_tokens] += 1
        return forward(self, batch, kv_cache)

    monkeypatch.setattr(Model, "forward", counting)
    cases = (0.0, 1, (9, 3)), (1 / 64, 1, (9, 3)), (1.5, 1, (2, 2)), (1.5, 2, (3, 3))
    for seconds, devices, repeats in cases:
        model.num_devices, clock = devices, count(step=seconds)
        monkeypatch.setattr("nanospec.device.timing.time.perf_counter", partial(next, clock))
        passes.clear()
        times = forward_ms(model, worker.kv_cache, worker.table, 64)
        assert tuple(times) == SIZES[:13]
        assert set(times.values()) == {seconds * 1000}
        assert (passes[1], passes[64]) == repeats


def test_attention_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take 1 ms per token, plus the expected costs for each of 64 positions of two rows."""

    def times(model: Model, kv_cache: Tensor, table: Table, batches: dict[int, Batch]) -> dict[int, float]:
        return {q: batch.num_tokens + 2 * 64 * (0.003 + 0.001 * q) for q, batch in batches.items()}

    monkeypatch.setattr("nanospec.device.timing._min_ms", times)
    model = tiny_model()
    table = Table.empty(2, 64 + 4, 16, model.config.vocab_size, "cpu")
    assert attention_ms(model, table, {1: 1.0, 2: 2.0}) == pytest.approx((0.003, 0.001))
