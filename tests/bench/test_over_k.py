"""What is counted over K: the same tokens by every engine, speed-ups within a round."""

from __future__ import annotations

from typing import Any

import pytest

from bench.over_k import Run, race, summary, together
from tests.drive import make_engine
from tests.tiny import tiny_model


def test_every_engine_writes_the_same_and_counts_its_own() -> None:
    model = tiny_model()
    engines = {str(k): make_engine(model, k) for k in (0, 2)}
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]
    for _ in range(2):  # the second counts what is new
        runs = race(engines, prompts, max_tokens=12)
        assert runs["0"].tokens == runs["2"].tokens == runs["0"].rows
        assert runs["0"].drafted == []
        assert runs["2"].rows < runs["0"].rows
        assert len(runs["2"].drafted) == 2
        assert runs["2"].drafted[0] <= runs["2"].rows
        assert runs["0"].steps < runs["0"].rows, "two rows a step"
        assert runs["0"].ms > 0
        for run in runs.values():
            assert len(run.done_ms) == 2
            assert 0 < min(run.done_ms) <= max(run.done_ms) == pytest.approx(run.ms)


def test_waves_are_counted_together() -> None:
    assert together([Run(1.0, [1.0], 2, 3, 4, [1]), Run(10.0, [2.0, 5.0], 20, 30, 40, [5, 2])]) == (
        11.0, [1.0, 2.0, 5.0], 22, 33, 44, [6, 2],
    )  # fmt: skip


def test_a_row_for_each_k() -> None:
    """Speed-ups are of the same round; a row of K = 2 may have had one guess, or none."""
    plain: Any = (20, 20, 20, [])
    guessed: Any = (10, 10, 20, [8, 6])
    slow = {"0": Run(200.0, [60.0, 200.0], *plain), "2": Run(110.0, [20.0, 110.0], *guessed)}
    fast = {"0": Run(100.0, [90.0, 100.0], *plain), "2": Run(50.0, [26.0, 50.0], *guessed)}
    none, two = summary([slow, fast])
    assert none["speedup"] == {"median": 1, "min": 1, "max": 1}
    assert none["guesses"] == {0: 20}
    assert two["guesses"] == {0: 2, 1: 2, 2: 6}
    assert (two["tokens_per_step"], two["guesses_per_step"]) == (2, 1.4)
    assert two["speedup"] == pytest.approx({"median": 1.9091, "min": 1.8182, "max": 2.0})
    assert two["ms_per_step"]["max"] == 11
    assert two["sooner"] == pytest.approx({"median": 2.25, "min": 2.0, "max": 2.5}, abs=1e-4)
