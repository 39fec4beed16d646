"""One K for the whole batch: the one that pays, found online, at little cost where nothing pays."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec.bucket_policy import COARSE, FINE, BucketCosts, BucketPolicy, tokens_per_step

KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FLAT = {k: 10.0 + 0.01 * k for k in KS}  # drafts are free
STEEP = {k: 10.0 * (k + 1) for k in KS}  # verifying a token costs as much as decoding it
HALF = {k: 10.0 + 2.0 * k for k in KS}


def make(by_k: dict[int, float]) -> BucketPolicy:
    return BucketPolicy(BucketCosts({1: by_k, 64: by_k}))


def teach(policy: BucketPolicy, row: int, accepted: int, drafted: int = 4, steps: int = 30) -> None:
    for _ in range(steps):
        policy.observe(row, 3, drafted, accepted)


def ks_over(policy: BucketPolicy, rows: range, steps: int) -> list[int]:
    return [policy.choose(rows, 16) for _ in range(steps)]


def usual(ks: list[int]) -> int:
    """What was chosen mostly: all but the probes."""
    return max(set(ks), key=ks.count)


# ---- costs -------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.integers(1, 300),
        st.dictionaries(st.sampled_from(KS[1:]), st.floats(0.01, 100)),
        min_size=1,
        max_size=6,
    )
)
def test_costs_rise_with_drafts_and_rows(ms: dict[int, dict[int, float]]) -> None:
    costs = BucketCosts({B: {0: 1.0, **row} for B, row in ms.items()})
    for B in ms:
        assert list(costs.of(B)) == sorted(costs.of(B))
        assert all(a <= b for a, b in pairwise(costs.of(B).values()))
    for small, large in pairwise(sorted(ms)):
        for k in costs.of(small).keys() & costs.of(large).keys():
            assert costs.of(small)[k] <= costs.of(large)[k]


def test_a_batch_takes_the_smallest_bucket_that_holds_it() -> None:
    costs = BucketCosts({4: {0: 1.0}, 1: {0: 0.5}, 16: {0: 2.0}})
    assert [costs.of(n)[0] for n in (1, 2, 4, 5, 16)] == [0.5, 1.0, 1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="17 exceeds the largest captured one, 16"):
        costs.of(17)


@pytest.mark.parametrize("ms", [{}, {4: {1: 2.0}}])
def test_no_drafts_must_have_a_cost(ms: dict[int, dict[int, float]]) -> None:
    with pytest.raises(ValueError, match="K=0"):
        BucketCosts(ms)


# ---- tokens per step ---------------------------------------------------------------------------


@pytest.mark.parametrize("a", [0, 16, 32, 58, COARSE])
def test_with_equal_chances_it_is_the_usual_formula(a: int) -> None:
    x = a / COARSE
    expected = [sum(x**j for j in range(k + 1)) for k in KS]
    assert tokens_per_step((a, a, a * FINE // COARSE), KS) == pytest.approx(expected)


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
    rates = int(miss * COARSE), int(full * COARSE), int(on * FINE)
    assert tokens_per_step(rates, (0, k)) == (1, pytest.approx(tokens / steps, rel=0.02))


def test_a_row_that_copies_forever_fills_every_step() -> None:
    assert tokens_per_step((1, COARSE, FINE), KS) == tuple(k + 1 for k in KS)
    assert tokens_per_step((0, COARSE, FINE), KS) == (1,) * len(KS), "it never begins to"


# ---- the choice --------------------------------------------------------------------------------


def test_accepted_drafts_that_cost_nothing_are_all_taken() -> None:
    policy = make(FLAT)
    teach(policy, 0, accepted=4)
    assert policy.choose([0], 16) == 16
    assert policy.choose([0], 5) == 4, "at most what is asked for"
    assert policy.choose([0], 0) == 0


def test_drafts_that_fail_end_at_none() -> None:
    policy = make(HALF)
    teach(policy, 0, accepted=0)
    assert usual(ks_over(policy, range(1), 100)) == 0


def test_nothing_is_drafted_where_verifying_costs_as_much_as_decoding() -> None:
    policy = make(STEEP)
    for row in range(8):
        teach(policy, row, accepted=3)
    assert usual(ks_over(policy, range(8), 100)) == 0


def test_a_row_without_a_match_does_not_switch_drafting_off() -> None:
    policy = make(HALF)
    for row in range(8):
        teach(policy, row, accepted=4 if row else 0, drafted=4 if row else 0)
    assert policy.choose(range(8), 16) >= 4


def test_one_row_that_copies_does_not_make_many_pay() -> None:
    policy = make({k: 10.0 + 5.0 * k for k in KS})
    for row in range(32):
        teach(policy, row, accepted=0 if row else 4, drafted=0 if row else 4)
    assert usual(ks_over(policy, range(32), 100)) == 0
    assert usual(ks_over(policy, range(1), 100)) > 0, "alone it gains"


def test_a_missing_k_is_never_chosen() -> None:
    policy = BucketPolicy(BucketCosts({1: FLAT, 8: {0: 10.0, 2: 10.1}}))
    for row in range(8):
        teach(policy, row, accepted=4)
    assert policy.choose(range(8), 16) == 2


def test_a_new_request_starts_from_the_common_record() -> None:
    policy = make(HALF)
    teach(policy, 0, accepted=0, steps=10)
    for row in range(1, 32):
        teach(policy, row, accepted=4)
    assert usual(ks_over(policy, range(1), 50)) == 0
    policy.reset(0)
    assert policy.choose([0], 16) > 0


# ---- probes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_k", [FLAT, HALF, STEEP], ids=["flat", "half", "steep"])
def test_probes_that_fail_cost_little_time(by_k: dict[int, float]) -> None:
    policy = make(by_k)
    spent = plain = 0.0
    for step in range(3000):
        k = policy.choose(range(4), 16)
        if step >= 100:
            spent, plain = spent + by_k[k], plain + by_k[0]
        for row in range(4 if k else 0):
            policy.observe(row, 0, 0, 0)
    assert plain < spent < 1.006 * plain, "some, and at most half a percent"


@pytest.mark.parametrize(("by_k", "within"), [(FLAT, 30), (HALF, 400)], ids=["flat", "half"])
def test_text_that_becomes_repetitive_is_noticed(by_k: dict[int, float], within: int) -> None:
    policy = make(by_k)
    for _ in range(200):
        if policy.choose([0], 16):
            policy.observe(0, 0, 0, 0)
    ks = []
    for _ in range(1000):  # now every draft would be accepted
        ks.append(policy.choose([0], 16))
        if ks[-1]:
            policy.observe(0, 5, ks[-1], ks[-1])
    assert min(ks[within:]) >= 4


def test_probes_that_succeed_do_not_lose_where_drafts_cannot_gain() -> None:
    policy, ms, tokens = make(STEEP), 0.0, 0
    for _ in range(2000):
        k = policy.choose([0], 16)
        if k:
            policy.observe(0, 5, k, k)
        ms, tokens = ms + STEEP[k], tokens + k + 1
    assert ms / tokens < 1.01 * STEEP[0]


def test_the_choice_does_not_flutter() -> None:
    rng = random.Random(0)
    policy, ks = make(HALF), []
    for _ in range(1000):
        k = policy.choose(range(16), 16)
        ks.append(policy._best)
        for row in range(16 if k else 0):
            accepted = 0
            while accepted < k and rng.random() < 0.7:
                accepted += 1
            policy.observe(row, 3, k, accepted)
    settled = ks[100:]
    assert max(settled) - min(settled) <= 2
    assert sum(a != b for a, b in pairwise(settled)) < 0.1 * len(settled)


def test_choosing_is_cheap() -> None:
    """About 20 us for 64 rows; the bound leaves room for a busy machine."""
    policy, rng, times = make(HALF), random.Random(0), []
    for _ in range(30):
        for row in range(64):
            drafted = rng.choice((0, 8))
            policy.observe(row, 3, drafted, rng.randint(0, drafted))
        start = time.perf_counter()
        policy.choose(range(64), 16)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5e-3
