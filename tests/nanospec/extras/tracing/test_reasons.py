"""A watched policy decides what it does unwatched, and what is told of it is what was weighed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec.drafters.costs import StepCosts
from nanospec.drafters.policy import AutoPolicy, Policy
from nanospec.extras.tracing.reasons import WatchedPolicy
from nanospec.kernels.codes import NOBODY

SIZES = (1, 2, 4, 8, 16, 64)


def costs_of(slope: float, captured: bool) -> StepCosts:
    if captured:
        by_k = {k: 10 + slope * k for k in (0, 1, 2, 4, 8)}
        return StepCosts(captured={1: by_k, 4: by_k})
    return StepCosts(
        packed={n: 10 + slope * n for n in SIZES}, propose=lambda rows, passes: 0.1 * rows * passes
    )


@given(st.floats(0.01, 8), st.booleans(), st.sampled_from([NOBODY, 1]), st.integers(0, 1 << 20))
def test_it_decides_the_same(slope: float, captured: bool, model: int, seed: int) -> None:
    rng = random.Random(seed)
    free = AutoPolicy(costs_of(slope, captured), model)
    watched = WatchedPolicy(AutoPolicy(costs_of(slope, captured), model), costs_of(slope, captured))
    for _ in range(30):
        rows = sorted(rng.sample(range(4), rng.randint(1, 4)))
        limits, queue = [rng.choice((0, 3, 8)) for _ in rows], rng.random() < 0.5
        k = free.choose(rows, limits, 100, queue)
        assert watched.choose(rows, limits, 100, queue) == k
        assert watched.weighed.ms >= watched.weighed.plain_ms > 0
        drafting = [row for row, limit in zip(rows, limits) if limit]
        if model != NOBODY and k and drafting and not captured:
            n = free.passes(drafting, len(rows) - len(drafting), k)
            assert watched.passes(drafting, len(rows) - len(drafting), k) == n
        drafts = [rng.randint(0, limit) if k else 0 for limit in limits]
        drafter = [rng.choice((0, max(model, 0))) if n else NOBODY for n in drafts]
        match = [rng.randint(1, 5) if d == 0 else 0 for d in drafter]
        taken = [k] * len(rows)
        if not captured and k:
            taken = free.cut(rows, drafter, drafts, match)
            assert watched.cut(rows, drafter, drafts, match) == taken
            told = [watched.weighed.by_row.get(row) for row in rows]
            assert [set(rates or {0: 0}) for rates in told] == [set(range(n + 1)) for n in drafts]
            promised = {rates[n] for rates, n in zip(told, taken) if rates}  # all speak of the same step
            assert max(promised, default=0) == pytest.approx(min(promised, default=0))
        for row, d, n, length, drafted in zip(rows, drafter, taken, match, drafts):
            accepted = rng.randint(0, min(n, drafted))
            for policy in (free, watched):
                policy.observe(row, d, length, min(n, drafted), accepted)
        if rng.random() < 0.1:
            free.reset(rows[0])
            watched.reset(rows[0])


def test_no_hope_promises_less_and_a_probe_is_called_one() -> None:
    policy = WatchedPolicy(AutoPolicy(costs_of(8, False)), costs_of(8, False))
    probed = 0
    for _ in range(3000):
        policy.choose([0], [8])
        [n] = policy.cut([0], [0], [4], [1])
        policy.observe(0, 0, 1, n, 0)
        probed += bool(policy.weighed.probes)
        assert bool(n) == bool(policy.weighed.probes) or probed < 20
    assert policy.weighed.by_row[0][0] > policy.weighed.by_row[0][4]
    assert 0 < probed < 1000


def test_a_fixed_policy_has_nothing_to_tell() -> None:
    policy = WatchedPolicy(Policy(), costs_of(1, False))
    assert policy.choose([0, 1], [4, 2]) == 4
    assert policy.cut([0, 1], [0, 0], [4, 2], [1, 1]) == [4, 2]
    assert (policy.weighed.by_row, policy.weighed.common, policy.weighed.probes) == ({}, {}, set())
    assert (policy.weighed.ms, policy.weighed.plain_ms) == (18, 12)
