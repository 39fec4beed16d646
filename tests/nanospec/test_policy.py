"""The cost table is monotone; the automatic policy drafts what pays, for each request by itself."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels.speculation.proposal import Proposal
from nanospec.policy import AutoPolicy, CostTable, FixedPolicy

SIZES = [1, 2, 4, 8, 16, 32, 64]
CHEAP = [10.0 + 0.1 * n for n in SIZES]  # a step costs about the same whatever it scores
LINEAR = [10.0 * n for n in SIZES]  # nothing is gained by scoring tokens together


def auto(ms: list[float] = CHEAP, probe_every: int = 16) -> AutoPolicy:
    return AutoPolicy(CostTable(list(SIZES), list(ms)), max_match=5, probe_every=probe_every)


def proposal(drafts: list[int], match: list[int] | None = None) -> Proposal:
    count = torch.tensor(drafts, dtype=torch.int32)
    length = torch.tensor(match or [3 if d else 0 for d in drafts], dtype=torch.int32)
    tokens = torch.zeros(len(drafts), 16, dtype=torch.int32)
    return Proposal(tokens, count, tokens, length, count * 0)


def limit(policy: AutoPolicy, drafts: list[int], match: list[int] | None = None) -> list[int]:
    rows = torch.arange(len(drafts), dtype=torch.int32)
    return policy.limit(rows, proposal(drafts, match)).tolist()


def teach(policy: AutoPolicy, row: int, accepted: int, drafted: int = 8, steps: int = 40) -> None:
    for _ in range(steps):
        policy.observe(row, 3, drafted, accepted)


@given(st.lists(st.floats(0.01, 1e4), min_size=len(SIZES), max_size=len(SIZES)))
def test_more_tokens_never_cost_less(ms: list[float]) -> None:
    table = CostTable(list(SIZES), list(ms))
    cost = [table.step(n) for n in range(1, 200)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(cost))
    assert cost[0] == pytest.approx(ms[0])


def test_cost_is_interpolated_between_and_extrapolated_beyond_what_was_measured() -> None:
    table = CostTable([1, 2, 4], [10.0, 11.0, 15.0])
    assert [table.step(n) for n in (1, 2, 3, 4, 5, 6)] == [10, 11, 13, 15, 17, 19]


def test_noise_of_measurement_is_smoothed_away() -> None:
    assert CostTable([1, 2, 4], [10.0, 9.0, 12.0]).ms == [10.0, 10.0, 12.0]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(1, 5)), min_size=1, max_size=9),
    st.sampled_from((CHEAP, LINEAR, [1.0] * 7, [0.001] * 7)),
    st.integers(0, 100),
)
def test_never_more_than_proposed(
    asked: list[tuple[int, int]], ms: list[float], seed: int
) -> None:
    policy, rng = auto(ms, probe_every=2), random.Random(seed)
    drafts = [d for d, _ in asked]
    match = [m if d else 0 for d, m in asked]
    for _ in range(6):
        taken = limit(policy, drafts, match)
        assert all(0 <= t <= d for t, d in zip(taken, drafts, strict=True))
        for row, (t, m) in enumerate(zip(taken, match, strict=True)):
            policy.observe(row, m, t, rng.randint(0, t))


def test_accepted_drafts_are_taken_in_full() -> None:
    policy = auto()
    teach(policy, 0, accepted=8)
    assert limit(policy, [16]) == [16]


def test_drafts_that_fail_end_at_none() -> None:
    policy = auto([10 + n for n in SIZES])
    teach(policy, 0, accepted=0)
    assert limit(policy, [16]) == [0]


def test_nothing_is_drafted_where_scoring_tokens_together_gains_nothing() -> None:
    assert limit(auto(LINEAR), [16, 4]) == [0, 0]


def test_the_number_of_drafts_grows_with_acceptance() -> None:
    taken = []
    for accepted in (1, 2, 4, 8):
        policy = auto([10 + 0.5 * n for n in SIZES])
        teach(policy, 0, accepted)
        taken += limit(policy, [16])
    assert taken == sorted(taken)
    assert taken[0] < taken[-1]


def test_the_number_of_drafts_is_the_best_one() -> None:
    """Against trying all of them, with constant acceptance; also where 2 tokens cost as much as 8."""
    for ms in ([10 + 0.8 * n for n in SIZES], [10.0, 17.0, 17.0, 17.5, 20.0, 30.0, 50.0]):
        for accepted, drafted in ((1, 2), (2, 3), (4, 5), (9, 10)):
            policy = auto(ms)
            teach(policy, 0, accepted, drafted, steps=300)
            a, cost = policy.acceptance(0, 3), policy.cost
            rate = [sum(a**i for i in range(k + 1)) / cost.step(k + 1) for k in range(17)]
            assert limit(policy, [16]) == [rate.index(max(rate))]


def test_the_drafts_of_a_batch_are_the_best_ones() -> None:
    """Against trying all combinations for three requests of different acceptance."""
    policy = auto([10 + 0.5 * n for n in SIZES])
    for _ in range(60):
        for row, accepted in enumerate((0, 2, 4)):
            policy.observe(row, 3, 4, accepted)
    chances = [policy.acceptance(row, 3) for row in range(3)]

    def rate(taken: tuple[int, ...]) -> float:
        expected = sum(a**i for a, d in zip(chances, taken, strict=True) for i in range(d + 1))
        return expected / policy.cost.step(3 + sum(taken))

    best = max(product(range(5), repeat=3), key=rate)
    assert tuple(limit(policy, [4, 4, 4])) == best
    assert best[0] < best[1] < best[2]


def test_requests_are_judged_independently() -> None:
    policy = auto([10 + 0.5 * n for n in SIZES])
    for _ in range(40):
        policy.observe(0, 3, 8, 8)
        policy.observe(1, 3, 8, 0)
    good, bad = limit(policy, [8, 8])
    assert (good, bad) == (8, 0)


def test_a_new_request_in_a_row_starts_without_the_record_of_the_old_one() -> None:
    policy = auto([10 + 0.5 * n for n in SIZES])
    teach(policy, 0, accepted=0, steps=5)
    for _ in range(200):
        policy.observe(1, 3, 8, 8)  # the shared estimate is good
    assert limit(policy, [8])[0] < 8
    policy.reset(0)
    assert limit(policy, [8]) == [8]


def test_a_request_at_zero_is_probed_and_recovers() -> None:
    policy = auto([10 + n for n in SIZES], probe_every=16)
    teach(policy, 0, accepted=0)
    taken = []
    for _ in range(16 * 40):  # the text has become repetitive: every draft would be accepted now
        taken += limit(policy, [8])
        policy.observe(0, 3, taken[-1], taken[-1])
    assert taken[:16] == [0] * 15 + [1]
    assert taken[-1] == 8


def test_steps_without_a_match_are_no_reason_to_probe() -> None:
    policy = auto([10 + n for n in SIZES], probe_every=4)
    teach(policy, 0, accepted=0)
    assert [limit(policy, [0])[0] for _ in range(20)] == [0] * 20


def test_match_lengths_learn_from_all_requests() -> None:
    policy = auto()
    long_before, short_before = policy.acceptance(9, 5), policy.acceptance(9, 1)
    assert short_before < long_before, "longer matches are right more often"
    for row in range(8):
        for _ in range(50):
            policy.observe(row, 1, 4, 4)
            policy.observe(row, 5, 4, 0)
    assert policy.acceptance(9, 1) > 0.9
    assert policy.acceptance(9, 5) < 0.1


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60))
def test_acceptance_stays_a_probability(steps: list[tuple[int, int]]) -> None:
    policy = auto()
    for drafted, accepted in steps:
        policy.observe(0, 2, drafted, min(accepted, drafted))
        assert 0 <= policy.acceptance(0, 2) <= 1
        assert math.isfinite(policy.acceptance(1, 2))


def test_a_fixed_policy_takes_all() -> None:
    policy = FixedPolicy()
    policy.observe(0, 3, 5, 0)
    policy.reset(0)
    asked = proposal([3, 0, 16])
    assert policy.limit(torch.arange(3), asked).tolist() == [3, 0, 16]


def model_policy(pass_ms: float) -> AutoPolicy:
    return AutoPolicy(
        CostTable([1, 64], [10.0, 40.0]), max_match=4, propose_ms=lambda rows, passes: pass_ms * passes
    )


def drafted_steps(policy: AutoPolicy, B: int, right: bool, steps: int) -> list[int]:
    """Drafts verified in each step, of a model that is always right or never."""
    rows, found = list(range(B)), []
    for _ in range(steps):
        k = policy.passes(rows, 0, 8)
        offered = torch.full((B,), k, dtype=torch.int32)
        grid, none = offered.new_zeros(B, 8), torch.zeros_like(offered)
        drafts = policy.limit(torch.tensor(rows), Proposal(grid, offered, grid, none, none)).tolist()
        for row, n in zip(rows, drafts, strict=True):
            policy.observe(row, 0, n, n if right else 0)
        found.append(sum(drafts))
    return found


@pytest.mark.parametrize("B", [1, 8])
def test_a_model_that_becomes_right_is_noticed(B: int) -> None:
    policy = model_policy(1.0)
    drafted_steps(policy, B, False, 200)
    assert sum(drafted_steps(policy, B, False, 100)) <= 20 * B
    later = drafted_steps(policy, B, True, 120)
    assert min(later[-20:]) >= 2 * B


def test_a_model_that_costs_more_than_it_can_give_is_hardly_run() -> None:
    policy = model_policy(30.0)
    assert sum(1 for n in drafted_steps(policy, 1, True, 300) if n) <= 40


def test_rows_that_may_not_draft_gain_nothing_by_a_model() -> None:
    policy = model_policy(4.0)
    policy._by_match[0].add(100, 90, 1.0)
    assert policy.passes([0], 0, 8) > 0
    assert policy.passes([0], 30, 8) == 0
