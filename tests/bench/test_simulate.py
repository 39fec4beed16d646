"""The simulator: traces match n-gram lookup, and automatic K has no regret."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import simulate, traces
from bench.roofline import Machine
from bench.strategies import Fixed
from bench.traces import MAX_DRAFTS, Text, Trace, replay, synthetic
from nanospec.drafters.estimates import StepCosts


def step_costs(form: str, B: int, shape: str) -> StepCosts:
    """Return the costs of packed or captured steps of B rows."""
    if form == "recorded" and shape in simulate.roofline.MODELS:
        return simulate.recorded_costs(shape, (B,), Machine())
    if form == "recorded":
        packed = step_costs("packed", B, shape)
        return StepCosts(captured={B: {K: packed.cost(B, B * (K + 1)) for K in simulate.KS}})
    if shape == "cpu":
        return simulate.cpu_costs()
    if shape in ("flat", "linear"):
        cost = {"flat": lambda n: 10 + 0.001 * n, "linear": lambda n: 10.0 * n}[shape]
        return StepCosts(packed={n: cost(n) for n in (1 << i for i in range(11))})
    return simulate.packed_costs(shape, B, Machine())


def test_traces_match_lookup() -> None:
    trace = replay(([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 7, 1, 2, 3]), min_n=2, max_n=3)
    # "1 2" is followed by 3 4 5; "1 2 3" by 4 5; "2 3 4" by 5; 7 and "7 1" have no match;
    # "1 2" is last followed by 3 4 7.
    assert trace.match == [2, 3, 3, 0, 0, 2]
    assert trace.run == [2, 1, 0, 0, 0, 1]
    assert [trace.drafts(i, 4) for i in range(6)] == [4, 4, 3, 0, 0, 0]
    periodic = replay(([1, 2, 3, 1, 2, 3], [1, 2, 3] * 10), 1, 5)
    assert periodic.run == [min(30 - i, MAX_DRAFTS) for i in range(30)]


def test_tokens_per_step_of_fixed_k() -> None:
    source = [synthetic(0.6, 1.0, 4000, seed) for seed in range(4)]
    for form in ("packed", "recorded"):
        costs = step_costs(form, 4, "cpu")
        outcome = simulate.simulate(source, 4, Fixed(0, costs), 1000)
        assert (outcome.tokens, outcome.steps, outcome.drafted) == (1000, 250, 0)
        assert outcome.rate == pytest.approx(4 / costs.cost(4, 4))
    for k in (1, 8):
        outcome = simulate.simulate(source, 2, Fixed(k, StepCosts(captured={2: {0: 1.0, k: 1.0}})), 20_000)
        expected = sum(0.6**j for j in range(k + 1))
        assert outcome.tokens / outcome.steps / 2 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("form", "acceptance", "B", "shape"),
    [
        ("packed", 0.0, 16, "cpu"),
        ("packed", 0.6, 1, "linear"),
        ("packed", 0.9, 16, "qwen3-8b"),
        ("packed", 1.0, 1, "cpu"),
        ("recorded", 0.0, 1, "qwen3-8b"),
        ("recorded", 0.3, 16, "cpu"),
        ("recorded", 0.6, 16, "linear"),
        ("recorded", 0.9, 1, "flat"),
    ],
)
def test_no_regret(form: str, acceptance: float, B: int, shape: str) -> None:
    """Reach at least 95% of the best fixed K in hindsight, and 98% of no speculation."""
    source = [synthetic(acceptance, 0.6, 300, seed) for seed in range(16)]
    result = simulate.compare(source, B, step_costs(form, B, shape), tokens=max(8000, 150 * B))
    assert result["auto_to_best_fixed"] >= 0.95
    assert result["speedup"]["auto"] >= 0.98


@pytest.mark.parametrize(("form", "shape"), [("packed", "qwen3-0.6b"), ("recorded", "cpu")])
def test_wrong_matches_cost_at_most_two_percent(form: str, shape: str) -> None:
    """Lookup always finds drafts, and all are rejected."""
    source = [Trace([3] * 400, [0] * 400) for _ in range(4)]
    assert simulate.compare(source, 4, step_costs(form, 4, shape), tokens=4000)["speedup"]["auto"] >= 0.98


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(0)

    def text() -> Text:
        return rng.choices(range(6), k=20), rng.choices(range(6), k=60)

    texts = {name: [text(), text()] for name in ("code edits", "Shakespeare")}
    monkeypatch.setattr(traces, "workloads", lambda tokenizer, count: texts)
    monkeypatch.setattr(simulate, "STEADY", (50, 5))
    simulate.main(["--batch", "2", "--tokenizer", str(smollm2), "--out", str(tmp_path)])
    assert (tmp_path / "simulate.json").is_file()
    assert "recorded, H200, qwen3-8b" in capsys.readouterr().out
