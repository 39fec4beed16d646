"""The simulator: traces match n-gram lookup, and automatic K has no regret."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import simulate, traces
from bench.roofline import Machine
from bench.simulate import compare
from bench.strategies import Batch, Fixed, Strategy, automatic
from bench.traces import MAX_DRAFTS, Text, Trace, replay, synthetic
from nanospec.drafters.estimates import StepCosts

H200 = Machine()
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def step_costs(form: str, B: int, shape: str) -> StepCosts:
    """Return the costs of packed or captured steps of B rows."""
    if form == "recorded":
        if shape in simulate.roofline.MODELS:
            return simulate.recorded_costs(shape, (B,), H200)
        packed = step_costs("packed", B, shape)
        return StepCosts(captured={B: {K: packed.cost(B, B * (K + 1)) for K in simulate.KS}})
    match shape:
        case "flat":
            return StepCosts(packed={n: 10 + 0.001 * n for n in SIZES})
        case "cpu":
            return simulate.cpu_costs()
        case "linear":
            return StepCosts(packed={n: 10.0 * n for n in SIZES})
    return simulate.packed_costs(shape, B, H200)


# ---- traces ------------------------------------------------------------------------------------


def text(seed: int, length: int = 60, vocabulary: int = 6) -> Text:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(20)], [rng.randrange(vocabulary) for _ in range(length)]


def test_trace_example() -> None:
    prompt, reference = [1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 7, 1, 2, 3]
    trace = replay((prompt, reference), min_n=2, max_n=3)
    # "1 2" is followed by 3 4 5; "1 2 3" by 4 5; "2 3 4" by 5; 7 and "7 1" have no match;
    # "1 2" is last followed by 3 4 7.
    assert trace.match == [2, 3, 3, 0, 0, 2]
    assert trace.run == [2, 1, 0, 0, 0, 1]
    assert [trace.drafts(i, 4) for i in range(6)] == [4, 4, 3, 0, 0, 0]


def test_periodic_text_has_maximum_drafts() -> None:
    trace = replay(([1, 2, 3, 1, 2, 3], [1, 2, 3] * 10), 1, 5)
    assert trace.run == [min(30 - i, MAX_DRAFTS) for i in range(30)]


# ---- the simulator -----------------------------------------------------------------------------


def test_one_token_per_row_and_step_without_drafts() -> None:
    source = [synthetic(0.8, 1.0, 100, seed) for seed in range(4)]
    for form in ("packed", "recorded"):
        costs = step_costs(form, 4, "cpu")
        outcome = simulate.simulate(source, 4, Fixed(0, costs), 1000)
        assert (outcome.tokens, outcome.steps, outcome.drafted) == (1000, 250, 0)
        assert outcome.rate == pytest.approx(4 / costs.cost(4, 4))


def test_fixed_k_tokens_per_step() -> None:
    source = [synthetic(0.6, 1.0, 4000, seed) for seed in range(4)]
    for k in (1, 3, 8):
        outcome = simulate.simulate(source, 2, Fixed(k, StepCosts(captured={2: {0: 1.0, k: 1.0}})), 20_000)
        expected = sum(0.6**j for j in range(k + 1))
        assert outcome.tokens / outcome.steps / 2 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("shape", ["flat", "cpu", "qwen3-8b", "linear"])
@pytest.mark.parametrize("B", [1, 16, 64])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("form", ["packed", "recorded"])
def test_no_regret(form: str, acceptance: float, B: int, shape: str) -> None:
    """Reach at least 95% of the best fixed K in hindsight, and 98% of no speculation."""
    source = [synthetic(acceptance, 0.6, 300, seed) for seed in range(16)]
    result = compare(source, B, step_costs(form, B, shape), tokens=max(8000, 150 * B))
    assert result["auto_to_best_fixed"] >= 0.95
    assert result["speedup"]["auto"] >= 0.98


@pytest.mark.parametrize("shape", ["cpu", "qwen3-0.6b", "qwen3-8b", "linear"])
@pytest.mark.parametrize("form", ["packed", "recorded"])
def test_wrong_matches_cost_at_most_two_percent(form: str, shape: str) -> None:
    """Lookup always finds drafts, and all are rejected."""
    source = [Trace([3] * 400, [0] * 400) for _ in range(4)]
    for B in (1, 16):
        assert compare(source, B, step_costs(form, B, shape), tokens=4000)["speedup"]["auto"] >= 0.98


def run_trace(trace: Trace, strategy: Strategy) -> list[tuple[int, int]]:
    """Run one request and return (position, drafts verified) of every step."""
    batch, steps, left = Batch([trace], 1), [], len(trace)
    batch.at = [0]
    while left > 0:
        right, at = batch.right(), batch.at[0]
        drafts, _ = strategy.plan(batch)
        taken = [min(drafts[0], right[0])]
        strategy.observe(drafts, taken, batch.advance([taken[0] + 1]))
        steps.append((at, drafts[0]))
        left -= taken[0] + 1
    return steps


@pytest.mark.parametrize("shape", ["cpu", "qwen3-8b"])
@pytest.mark.parametrize("form", ["packed", "recorded"])
def test_request_becoming_repetitive_is_noticed(form: str, shape: str) -> None:
    """Within 60 steps; after that most of each step's drafts are taken."""
    trace = Trace([3] * 600, [0] * 600) + synthetic(1.0, 1.0, 3000)
    steps = run_trace(trace, automatic(step_costs(form, 1, shape)))
    turn = next(i for i, (at, _) in enumerate(steps) if at >= 600)
    assert sum(drafts for _, drafts in steps[100:turn]) < 1.2 * (turn - 100), "hardly any before"
    assert min(drafts for _, drafts in steps[turn + 60 : -2]) >= 8


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("code edits", "quotation", "long quotation", "retrieval", "news", "Shakespeare")
    texts = {name: [text(seed) for seed in range(3)] for name in names}
    monkeypatch.setattr(traces, "workloads", lambda tokenizer, count: texts)
    monkeypatch.setattr(simulate, "STEADY", (200, 5))
    simulate.main(["--batch", "1", "4", "--tokenizer", str(smollm2), "--out", str(tmp_path)])
    assert (tmp_path / "simulate.json").is_file()
    assert "recorded, H200, qwen3-8b" in capsys.readouterr().out
