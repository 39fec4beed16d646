"""The simulator: traces match n-gram lookup, and automatic K is nearly as fast as the best fixed K."""

from collections.abc import Callable

import pytest

from bench import simulate
from bench.roofline import MODELS, Machine, account
from bench.traces import MAX_DRAFTS, replay, synthetic
from nanospec.drafters.estimates import StepCosts

COSTS: dict[str, Callable[[int], StepCosts]] = {  # of steps of B rows
    "cpu": lambda B: StepCosts({B: simulate.CPU_MS}),
    "linear": lambda B: StepCosts({B: {1 << i: 10.0 * (1 << i) for i in range(11)}}),
    "flat": lambda B: StepCosts({B: {B * (K + 1): 10 + 0.001 * B * (K + 1) for K in simulate.KS}}, True),
    "captured": lambda B: simulate.captured_costs("qwen3-8b", (B,), Machine()),
}


def test_traces_match_lookup() -> None:
    trace = replay(([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 7, 1, 2, 3]), min_n=2, max_n=3)
    # "1 2" is followed by 3 4 5; "1 2 3" by 4 5; "2 3 4" by 5; 7 and "7 1" have no match;
    # "1 2" is last followed by 3 4 7.
    assert trace.match == [2, 3, 3, 0, 0, 2]
    assert trace.run == [2, 1, 0, 0, 0, 1]
    assert [trace.drafts(i, 4) for i in range(6)] == [4, 4, 3, 0, 0, 0]
    periodic = replay(([1, 2, 3, 1, 2, 3], [1, 2, 3] * 10), 1, 5)
    assert periodic.run == [min(30 - i, MAX_DRAFTS) for i in range(30)]


def test_bound_counts_bytes_of_quantized_weights() -> None:
    """Qwen3-8B has 36 layers with 192.9 million weights, and 622 million in lm_head."""
    whole, quantized = (account(MODELS["qwen3-8b"], 1, 0, bits=bits).parts for bits in (16, 5))
    saved = [one[0] - other[0] for one, other in zip(whole, quantized, strict=True)]
    layers, head = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288), 151936 * 4096
    assert saved == [0, 0, layers * 11 / 8, 0, head * 7 / 8, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "acceptance", "B"),
    [("cpu", 0.0, 16), ("cpu", 1.0, 1), ("linear", 0.6, 16), ("flat", 0.9, 1),
     ("captured", 0.0, 1), ("captured", 0.3, 16)],
)  # fmt: skip
def test_no_regret(costs: str, acceptance: float, B: int) -> None:
    """Automatic K reaches 95% of the speed of the best fixed K in hindsight, and 98% of no speculation."""
    source = [synthetic(acceptance, 0.6, 300, seed) for seed in range(16)]
    result = simulate.compare(source, B, COSTS[costs](B), tokens=max(8000, 150 * B))
    assert result["auto_to_best_fixed"] >= 0.95
    assert result["speedup"]["auto"] >= 0.98
