"""The drafts verified are those that pay, found online, at little cost where nothing pays."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise, product
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanospec.drafters.costs import Attention, StepCosts
from nanospec.drafters.estimator import COARSE, tokens_per_step
from nanospec.drafters.policy import AutoPolicy, Policy
from nanospec.kernels.codes import NOBODY

KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FLAT = {k: 10.0 + 0.01 * k for k in KS}  # drafts are free
STEEP = {k: 10.0 * (k + 1) for k in KS}  # verifying a token costs as much as decoding it
HALF = {k: 10.0 + 2.0 * k for k in KS}

SIZES = (1, 2, 4, 8, 16, 32, 64)
CHEAP = [10.0 + 0.1 * n for n in SIZES]  # a step costs about the same whatever it scores
LINEAR = [10.0 * n for n in SIZES]  # nothing is gained by scoring tokens together

NGRAM, MODEL = 0, 1  # places of drafters


def recorded(by_k: dict[int, float]) -> AutoPolicy:
    return AutoPolicy(StepCosts(captured={1: by_k, 64: by_k}))


def packed(ms: Sequence[float] = CHEAP) -> AutoPolicy:
    return AutoPolicy(StepCosts(packed=dict(zip(SIZES, ms, strict=True))))


def teach(policy: Policy, row: int, accepted: int, drafted: int = 4, steps: int = 30) -> None:
    for _ in range(steps):
        policy.observe(row, NGRAM if drafted else NOBODY, 3, drafted, accepted)


def choose(policy: Policy, rows: Sequence[int], most: int = 16, queue: bool = True) -> int:
    return policy.choose(rows, [most] * len(rows), queue=queue)


def ks_over(policy: Policy, rows: range, steps: int) -> list[int]:
    return [choose(policy, rows) for _ in range(steps)]


def usual(ks: list[int]) -> int:
    """What was chosen mostly: all but the probes."""
    return max(set(ks), key=ks.count)


def cut(policy: Policy, drafts: list[int], match: list[int] | None = None, queue: bool = True) -> list[int]:
    """The drafts taken in a packed step of rows 0, 1, ..."""
    rows = range(len(drafts))
    choose(policy, rows, queue=queue)
    drafter = [NGRAM if d else NOBODY for d in drafts]
    return policy.cut(rows, drafter, drafts, match or [3 if d else 0 for d in drafts])


# ---- costs -------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1e4), min_size=len(SIZES), max_size=len(SIZES)))
def test_more_tokens_never_cost_less(ms: list[float]) -> None:
    costs = StepCosts(packed=dict(zip(SIZES, ms, strict=True)))
    cost = [costs.cost(1, n) for n in range(1, 200)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(cost))
    assert cost[0] == pytest.approx(ms[0])


def test_cost_is_interpolated_between_and_extrapolated_beyond_what_was_measured() -> None:
    costs = StepCosts(packed={1: 10.0, 2: 11.0, 4: 15.0})
    assert [costs.cost(1, n) for n in (1, 2, 3, 4, 5, 6)] == [10, 11, 13, 15, 17, 19]


def test_noise_of_measurement_is_smoothed_away() -> None:
    assert StepCosts(packed={1: 10.0, 2: 9.0, 4: 12.0}).packed == {1: 10.0, 2: 10.0, 4: 12.0}


@given(
    st.dictionaries(
        st.integers(1, 300),
        st.dictionaries(st.sampled_from(KS[1:]), st.floats(0.01, 100)),
        min_size=1,
        max_size=6,
    )
)
def test_costs_rise_with_drafts_and_rows(ms: dict[int, dict[int, float]]) -> None:
    costs = StepCosts(captured={B: {0: 1.0, **row} for B, row in ms.items()})
    for B in ms:
        assert list(costs.by_k(B)) == sorted(costs.by_k(B))
        assert all(a <= b for a, b in pairwise(costs.by_k(B).values()))
        assert all(costs.cost(B, B * (k + 1)) == ms for k, ms in costs.by_k(B).items())
    for small, large in pairwise(sorted(ms)):
        for k in costs.by_k(small).keys() & costs.by_k(large).keys():
            assert costs.by_k(small)[k] <= costs.by_k(large)[k]


def test_a_batch_takes_the_smallest_bucket_that_holds_it() -> None:
    costs = StepCosts(captured={4: {0: 1.0}, 1: {0: 0.5}, 16: {0: 2.0}})
    assert [costs.cost(n, n) for n in (1, 2, 4, 5, 16)] == [0.5, 1.0, 1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="17 exceeds the largest captured one, 16"):
        costs.cost(17, 17)


@pytest.mark.parametrize("ms", [{}, {4: {1: 2.0}}])
def test_no_drafts_must_have_a_cost(ms: dict[int, dict[int, float]]) -> None:
    with pytest.raises(ValueError, match="K=0"):
        StepCosts(captured=ms)


def test_attention_is_fitted_and_added_for_every_cached_position() -> None:
    attention = Attention.fit({1: 0.005, 4: 0.008})
    assert attention == pytest.approx((0.004, 0.001))
    costs = StepCosts(packed={1: 10.0, 9: 18.0}, attention=attention)
    assert costs.cost(1, 1, 100) == pytest.approx(10 + 100 * 0.005)
    assert costs.cost(2, 8, 100) == pytest.approx(17 + 100 * 0.008), "four tokens see each position"
    assert costs.cost(2, 8) == 17


@pytest.mark.parametrize("ms", [{1: 0.004, 4: 0.003}, {1: -0.001, 4: 0.003}, {1: -0.001, 4: -0.002}])
def test_noise_makes_no_attention_cheaper_than_none(ms: dict[int, float]) -> None:
    attention = Attention.fit(ms)
    assert min(attention) >= 0
    assert attention.row + 4 * attention.query <= max(*ms.values(), 0.0)


@example(ms=[1.0] * 6 + [2.0], tokens=32, context=0)
@given(
    st.lists(st.floats(0.01, 1e4), min_size=len(SIZES), max_size=len(SIZES)),
    st.integers(1, 80),
    st.integers(0, 9000),
)
def test_no_token_costs_less_than_the_least_slope(ms: list[float], tokens: int, context: int) -> None:
    costs = StepCosts(packed=dict(zip(SIZES, ms, strict=True)), attention=Attention(0.004, 0.001))
    cost = [costs.cost(3, n, context) for n in range(tokens, 140)]
    steps = [b - a for a, b in pairwise(cost)]
    assert min(steps) == pytest.approx(costs.least_slope(3, tokens, context), abs=1e-8 * cost[-1])
    one_by_one = list(islice(costs.rising(3, tokens, context), len(steps)))
    assert one_by_one == pytest.approx(cost[1:], rel=1e-9)


# ---- tokens per step ---------------------------------------------------------------------------


@pytest.mark.parametrize("a", [0, 16, 32, 58, COARSE])
def test_with_equal_chances_it_is_the_usual_formula(a: int) -> None:
    x = a / COARSE
    for limit in (16, 4, 0):
        expected = [sum(x**j for j in range(min(k, limit) + 1)) for k in KS]
        assert tokens_per_step((x, x, x), KS, limit) == pytest.approx(expected)


@pytest.mark.parametrize(("miss", "full", "on"), [(0.125, 0.75, 0.875), (0.5, 0.25, 0.5), (0.75, 1.0, 0.25)])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_tokens_per_step_against_a_random_run(miss: float, full: float, on: float, k: int) -> None:
    rng, steps, tokens, copying = random.Random(0), 40_000, 0, False
    for _ in range(steps):
        accepted = 0
        while accepted < k and rng.random() < (on if accepted else full if copying else miss):
            accepted += 1
        tokens += accepted + 1
        copying = accepted == k
    assert tokens_per_step((miss, full, on), (0, k), 16) == (1, pytest.approx(tokens / steps, rel=0.02))


def test_a_row_that_copies_forever_fills_every_step() -> None:
    assert tokens_per_step((0.1, 1.0, 1.0), KS, 16) == tuple(k + 1 for k in KS)
    assert tokens_per_step((0.0, 1.0, 1.0), KS, 16) == (1,) * len(KS), "it never begins to"


# ---- estimates ---------------------------------------------------------------------------------


def test_match_lengths_learn_from_all_requests() -> None:
    estimator = packed().estimator
    (long_before, _), (short_before, _) = estimator.chances(9, (NGRAM, 5)), estimator.chances(9, (NGRAM, 1))
    assert short_before < long_before, "longer matches are right more often"
    for row in range(8):
        for _ in range(50):
            estimator.observe(row, (NGRAM, 1), 4, 3)
            estimator.observe(row, (NGRAM, 5), 4, 0)
    assert estimator.chances(9, (NGRAM, 1))[0] > 0.9
    assert estimator.chances(9, (NGRAM, 5))[0] < 0.1


def test_drafters_are_judged_apart() -> None:
    estimator = packed().estimator
    for _ in range(50):
        estimator.observe(0, (NGRAM, 2), 4, 3)
        estimator.observe(0, (MODEL, 0), 4, 0)
    assert estimator.chances(0, (NGRAM, 2))[0] > 0.9 > 0.1 > estimator.chances(0, (MODEL, 0))[0]


def test_what_follows_a_step_accepted_in_full_is_judged_apart() -> None:
    estimator = packed().estimator
    for _ in range(50):  # right, and wrong after it
        estimator.observe(0, (NGRAM, 2), 2, 2)
        estimator.observe(0, (NGRAM, 2), 2, 0)
    assert estimator.chances(0, (NGRAM, 2))[0] > 0.9
    estimator.observe(0, (NGRAM, 2), 2, 2)
    assert estimator.chances(0, (NGRAM, 2))[0] < 0.1


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=60))
def test_estimates_stay_probabilities(steps: list[tuple[int, int]]) -> None:
    policy = packed()
    for drafted, accepted in steps:
        policy.observe(0, NGRAM, 2, drafted, min(accepted, drafted))
        for row in (0, 1):
            assert all(0 <= chance <= 1 for chance in policy.estimator.chances(row, (NGRAM, 2)))


# ---- one K for all rows ------------------------------------------------------------------------


def test_a_fixed_policy_takes_all() -> None:
    policy = Policy()
    policy.observe(0, NGRAM, 3, 5, 0)
    policy.reset(0)
    assert policy.choose([0, 1], [3, 16]) == 16
    assert policy.passes([0, 1], 1, 16) == 16
    assert policy.cut(range(3), [NGRAM] * 3, [3, 0, 16], [3, 0, 3]) == [3, 0, 16]


def test_accepted_drafts_that_cost_nothing_are_all_taken() -> None:
    policy = recorded(FLAT)
    teach(policy, 0, accepted=4)
    assert choose(policy, [0]) == 16
    assert choose(policy, [0], 5) == 4, "at most what is asked for"
    assert choose(policy, [0], 0) == 0


def test_rows_that_may_not_draft_gain_nothing() -> None:
    policy = recorded(HALF)
    for row in range(16):
        teach(policy, row, accepted=4)
    assert choose(policy, range(16)) > 2
    assert usual([policy.choose(range(16), [16] + 15 * [0]) for _ in range(50)]) == 0
    assert policy.choose(range(16), [2] * 16) == 2


def test_rejected_drafts_end_at_none() -> None:
    policy = recorded(HALF)
    teach(policy, 0, accepted=0)
    assert usual(ks_over(policy, range(1), 100)) == 0


def test_nothing_is_drafted_where_verifying_costs_as_much_as_decoding() -> None:
    policy = recorded(STEEP)
    for row in range(8):
        teach(policy, row, accepted=3)
    assert usual(ks_over(policy, range(8), 100)) == 0


def test_a_row_without_a_match_does_not_switch_drafting_off() -> None:
    policy = recorded(HALF)
    for row in range(8):
        teach(policy, row, accepted=4 if row else 0, drafted=4 if row else 0)
    assert choose(policy, range(8)) >= 4


def test_one_row_that_copies_does_not_make_many_pay() -> None:
    policy = recorded({k: 10.0 + 5.0 * k for k in KS})
    for row in range(32):
        teach(policy, row, accepted=0 if row else 4, drafted=0 if row else 4)
    assert usual(ks_over(policy, range(32), 100)) == 0
    assert usual(ks_over(policy, range(1), 100)) > 0, "alone it gains"


def test_a_missing_k_is_never_chosen() -> None:
    policy = AutoPolicy(StepCosts(captured={1: FLAT, 8: {0: 10.0, 2: 10.1}}))
    for row in range(8):
        teach(policy, row, accepted=4)
    assert choose(policy, range(8)) == 2


def test_a_new_request_starts_from_the_common_record() -> None:
    policy = recorded(HALF)
    teach(policy, 0, accepted=0, steps=10)
    for row in range(1, 32):
        teach(policy, row, accepted=4)
    assert usual(ks_over(policy, range(1), 50)) == 0
    policy.reset(0)
    assert choose(policy, [0]) > 0


def test_the_choice_does_not_flutter() -> None:
    rng = random.Random(0)
    policy, ks = recorded(HALF), []
    for _ in range(1000):
        k = choose(policy, range(16))
        ks.append(policy._best)
        for row in range(16 if k else 0):
            accepted = 0
            while accepted < k and rng.random() < 0.7:
                accepted += 1
            policy.observe(row, NGRAM, 3, k, accepted)
    settled = ks[100:]
    assert max(settled) - min(settled) <= 2
    assert sum(a != b for a, b in pairwise(settled)) < 0.1 * len(settled)


# ---- row by row --------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(1, 5)), min_size=1, max_size=9),
    st.sampled_from((CHEAP, LINEAR, [1.0] * 7, [0.001] * 7)),
    st.integers(0, 100),
)
def test_never_more_than_proposed(asked: list[tuple[int, int]], ms: list[float], seed: int) -> None:
    policy, rng = packed(ms), random.Random(seed)
    drafts = [d for d, _ in asked]
    match = [m if d else 0 for d, m in asked]
    for _ in range(6):
        taken = cut(policy, drafts, match)
        assert all(0 <= t <= d for t, d in zip(taken, drafts, strict=True))
        for row, (t, m) in enumerate(zip(taken, match, strict=True)):
            policy.observe(row, NGRAM, m, t, rng.randint(0, t))


def test_accepted_drafts_are_taken_in_full() -> None:
    policy = packed()
    teach(policy, 0, accepted=8, drafted=8)
    assert cut(policy, [16]) == [16]


def test_drafts_that_fail_end_at_none() -> None:
    policy = packed([10 + n for n in SIZES])
    teach(policy, 0, accepted=0)
    assert cut(policy, [16]) == [0]


def test_nothing_is_drafted_where_scoring_tokens_together_gains_nothing() -> None:
    assert cut(packed(LINEAR), [16, 4]) == [0, 0]


def test_the_number_of_drafts_grows_with_acceptance() -> None:
    taken = []
    for accepted in (1, 2, 4, 8):
        policy = packed([10 + 0.5 * n for n in SIZES])
        teach(policy, 0, accepted, drafted=8)
        taken += cut(policy, [16])
    assert taken == sorted(taken)
    assert taken[0] < taken[-1]


def test_the_number_of_drafts_is_the_best_one() -> None:
    """Against trying all of them; also where 2 tokens cost as much as 8."""
    for ms in ([10 + 0.8 * n for n in SIZES], [10.0, 17.0, 17.0, 17.5, 20.0, 30.0, 50.0]):
        for accepted, drafted in ((1, 2), (2, 3), (4, 5), (9, 10)):
            policy = packed(ms)
            teach(policy, 0, accepted, drafted, steps=300)
            first, on = policy.estimator.chances(0, (NGRAM, 3))
            rate = [
                (1 + sum(first * on**i for i in range(k))) / policy.costs.cost(1, k + 1) for k in range(17)
            ]
            assert cut(policy, [16]) == [rate.index(max(rate))]


def test_the_drafts_of_a_batch_are_the_best_ones() -> None:
    """Against trying all combinations for three requests of different acceptance."""
    policy = packed([10 + 1.0 * n for n in SIZES])
    for _ in range(60):
        for row, accepted in enumerate((0, 2, 4)):
            policy.observe(row, NGRAM, 3, 5, accepted)
    chances = [policy.estimator.chances(row, (NGRAM, 3)) for row in range(3)]

    def rate(taken: tuple[int, ...]) -> float:
        gains = [first * on**i for (first, on), d in zip(chances, taken, strict=True) for i in range(d)]
        return (3 + sum(gains)) / policy.costs.cost(3, 3 + sum(taken))

    best = max(product(range(5), repeat=3), key=rate)
    assert tuple(cut(policy, [4, 4, 4])) == best
    assert best[0] < best[1] < best[2]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=9),
    st.lists(st.floats(0.0, 9.0), min_size=len(SIZES), max_size=len(SIZES)),
    st.integers(0, 5000),
)
def test_drafts_that_cannot_pay_may_be_left_out_beforehand(
    rows: list[tuple[int, int, int]], more: list[float], context: int
) -> None:
    """Against weighing all of them, one by one from the likeliest on."""
    ms = dict(zip(SIZES, accumulate(more, initial=10.0)))
    policy = AutoPolicy(StepCosts(packed=ms, attention=Attention(0.003, 0.001)))
    policy._affords = lambda ms: False  # type: ignore[method-assign]
    B, drafts, match = len(rows), [n for n, _, _ in rows], [m for _, m, _ in rows]
    for row, (_, m, accepted) in enumerate(rows):
        for _ in range(5):
            policy.observe(row, NGRAM, m, 9, accepted)
    policy.choose(range(B), [16] * B, context)
    chances = [policy.estimator.chances(row, (NGRAM, m)) for row, m in enumerate(match)]
    gains = [first * on**i for (first, on), n in zip(chances, drafts, strict=True) for i in range(n)]
    totals = accumulate(sorted(gains, reverse=True), initial=float(B))
    rate = [total / policy.costs.cost(B, B + n, context) for n, total in enumerate(totals)]
    taken = policy.cut(range(B), [NGRAM if n else NOBODY for n in drafts], drafts, match)
    assert rate[sum(taken)] == pytest.approx(max(rate))


FLAT_03 = [10 + 0.3 * (n - 1) for n in SIZES]
FREE_TO_4 = [10.0 + max(n - 4, 0) for n in SIZES]  # 10 ms, beyond 4 tokens 1 ms more for each


@pytest.mark.parametrize("queue", [True, False])
def test_where_nobody_waits_the_slowest_row_loses_little_to_others(queue: bool) -> None:
    """Row 0 copies, 15 do not. A draft costs 1 ms, a row's share of a step is 0.8 ms, a token's 1.4."""
    policy = packed(FREE_TO_4)
    teach(policy, 0, 8, drafted=8)
    costs, steps, B = policy.costs, 400, 16
    taken = [sum(cut(policy, [8] + [0] * 15, queue=queue)) for _ in range(steps)]
    lost = sum(costs.cost(B, B + n) - costs.cost(B, B) for n in taken)
    saved = sum(taken) * (costs.cost(B, B) - costs.cost(1, 1)) / 15
    share = (lost - saved) / (steps * costs.cost(B, B))
    if queue:
        assert set(taken) == {8}
        assert share > 0.03
    else:
        assert 0.002 < share < 0.01  # both budgets, for others and for probes


@pytest.mark.parametrize(
    ("ms", "chances"),
    [(FREE_TO_4, (1, 1, 1, 0)), (FLAT_03, (0.8, 0)), (FLAT_03, (0.8, 0.8, 0.8, 0))],
    ids=["probes", "one", "three"],
)
def test_a_row_of_which_nothing_is_accepted_loses_little(ms: list[float], chances: tuple[float, ...]) -> None:
    """Though rows beside it make its drafts look promising, and others' are probed with success."""
    policy, B, steps, rng = packed(ms), len(chances), 800, random.Random(0)
    cost = partial(policy.costs.cost, B)
    total = 0.0
    for _ in range(steps):
        taken = cut(policy, [8] * B, queue=False)
        total += cost(B + sum(taken))
        for row, n in enumerate(taken):
            accepted = next((i for i in range(n) if rng.random() >= chances[row]), n)
            policy.observe(row, NGRAM if n else NOBODY, 3, n, accepted)
    assert total < 1.1 * steps * cost(B)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_that_copy_alike_are_nobodys_loss(rows: int) -> None:
    policies = packed(FREE_TO_4), packed(FREE_TO_4)
    for policy, row in product(policies, range(rows)):
        teach(policy, row, 8, drafted=8)
    for _ in range(20):
        busy, quiet = (cut(policy, [8] * rows, queue=queue) for policy, queue in zip(policies, (True, False)))
        assert busy == quiet == [8] * rows


def test_long_texts_make_drafts_pay() -> None:
    """A step takes long for them whether there are drafts or not."""
    costs = StepCosts(packed={1: 10.0, 64: 514.0}, attention=Attention(0.01, 0.0))
    taken = {}
    for context in (0, 4000):
        policy = AutoPolicy(costs)
        teach(policy, 0, accepted=4, drafted=5)
        policy.choose([0], [16], context)
        taken[context] = policy.cut([0], [NGRAM], [16], [3])[0]
    assert 0 < taken[0] < taken[4000]


def test_requests_are_judged_independently() -> None:
    policy = packed([10 + 0.5 * n for n in SIZES])
    for _ in range(40):
        policy.observe(0, NGRAM, 3, 8, 8)
        policy.observe(1, NGRAM, 3, 8, 0)
    assert cut(policy, [8, 8]) == [8, 0]


def test_a_new_request_in_a_row_starts_without_the_record_of_the_old_one() -> None:
    policy = packed([10 + 6 * n for n in SIZES])
    teach(policy, 0, accepted=0, steps=20)
    for row in range(1, 20):
        teach(policy, row, accepted=8, drafted=8)  # the common estimate is good
    assert cut(policy, [8])[0] < 8
    policy.reset(0)
    assert cut(policy, [8]) == [8]


# ---- a model's guesses -------------------------------------------------------------------------


def model_policy(pass_ms: float) -> AutoPolicy:
    costs = StepCosts(packed={1: 10.0, 64: 40.0}, propose=lambda rows, passes: pass_ms * passes)
    return AutoPolicy(costs, MODEL)


def drafted_steps(policy: AutoPolicy, B: int, right: bool, steps: int) -> list[int]:
    """Drafts verified in each step, of a model that is always right or never."""
    rows, found = range(B), []
    for _ in range(steps):
        k = policy.passes(rows, 0, choose(policy, rows, 8))
        drafts = policy.cut(rows, [MODEL if k else NOBODY] * B, [k] * B, [0] * B)
        for row, n in zip(rows, drafts, strict=True):
            policy.observe(row, MODEL, 0, n, n if right else 0)
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
    for row in range(1, 20):
        for _ in range(20):
            policy.observe(row, MODEL, 0, 8, 7)
    choose(policy, range(31))
    assert policy.passes([0], 0, 8) > 0
    assert policy.passes([0], 30, 8) == 0


# ---- probes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_k", [FLAT, HALF, STEEP], ids=["flat", "half", "steep"])
def test_probes_that_fail_cost_little_time(by_k: dict[int, float]) -> None:
    policy = recorded(by_k)
    spent = plain = 0.0
    for step in range(3000):
        k = choose(policy, range(4))
        if step >= 100:
            spent, plain = spent + by_k[k], plain + by_k[0]
        for row in range(4 if k else 0):
            policy.observe(row, NOBODY, 0, 0, 0)
    assert plain < spent < 1.006 * plain, "some, and at most half a percent"


@pytest.mark.parametrize(("by_k", "within"), [(FLAT, 30), (HALF, 400)], ids=["flat", "half"])
def test_text_that_becomes_repetitive_is_noticed(by_k: dict[int, float], within: int) -> None:
    policy = recorded(by_k)
    for _ in range(200):
        if choose(policy, [0]):
            policy.observe(0, NOBODY, 0, 0, 0)
    ks = []
    for _ in range(1000):  # now every draft would be accepted
        ks.append(choose(policy, [0]))
        if ks[-1]:
            policy.observe(0, NGRAM, 5, ks[-1], ks[-1])
    assert min(ks[within:]) >= 4


def test_probes_that_succeed_do_not_lose_where_drafts_cannot_gain() -> None:
    policy, ms, tokens = recorded(STEEP), 0.0, 0
    for _ in range(2000):
        k = choose(policy, [0])
        if k:
            policy.observe(0, NGRAM, 5, k, k)
        ms, tokens = ms + STEEP[k], tokens + k + 1
    assert ms / tokens < 1.01 * STEEP[0]


def test_a_row_at_zero_is_probed_and_recovers() -> None:
    policy = packed([10 + n for n in SIZES])
    teach(policy, 0, accepted=0)
    assert sum(cut(policy, [8])[0] for _ in range(160)) <= 10, "drafts that cost a tenth of a step each"
    taken = []
    for _ in range(300):  # the text has become repetitive: every draft would be accepted now
        taken += cut(policy, [8])
        policy.observe(0, NGRAM, 3, taken[-1], taken[-1])
    assert min(taken[-20:]) == 8


def test_all_rows_at_zero_are_probed() -> None:
    policy = packed([10 + n for n in SIZES])
    for row in range(4):
        teach(policy, row, accepted=0)
    totals = [sum(column) for column in zip(*(cut(policy, [8] * 4) for _ in range(800)))]
    assert max(totals) - min(totals) <= 1


def test_steps_without_a_match_are_no_reason_to_probe() -> None:
    policy = packed([10 + n for n in SIZES])
    teach(policy, 0, accepted=0)
    assert [cut(policy, [0])[0] for _ in range(400)] == [0] * 400


def lines(call: Callable[[], Any]) -> int:
    """How many lines of Python run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_choosing_is_cheap() -> None:
    """For 64 rows of which nothing is known from before, and for rows whose chances have been met already."""
    policy, rng = recorded(HALF), random.Random(0)
    for row in range(64):
        drafted = rng.choice((0, 8))
        policy.observe(row, NGRAM, 3, drafted, rng.randint(0, drafted))
    tokens_per_step.cache_clear()
    assert 64 < lines(lambda: choose(policy, range(64))) < 64 * 60
    assert 64 < lines(lambda: choose(policy, range(64))) < 64 * 6


def test_cutting_is_cheap_where_little_can_pay() -> None:
    """For 64 rows with 16 drafts each, of which each costs as much as half a row."""
    policy, rng = AutoPolicy(StepCosts(packed={1: 10.0, 64: 73.0, 1088: 585.0})), random.Random(0)
    for _ in range(20):
        for row in range(64):
            policy.observe(row, NGRAM, 1 + row % 3, 1, rng.random() < 0.3)
    choose(policy, range(64))
    cut = partial(policy.cut, range(64), [NGRAM] * 64, [16] * 64, [1 + row % 3 for row in range(64)])
    assert 64 < lines(cut) < 64 * 30
