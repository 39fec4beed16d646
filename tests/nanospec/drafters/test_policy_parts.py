"""The parts of the policy by themselves: budgets, margin, probes and who is believed, number by number."""

from __future__ import annotations

from typing import Any

import pytest

import nanospec.drafters.policy
from nanospec.drafters.costs import Attention, StepCosts
from nanospec.drafters.policy import (
    ENOUGH,
    MOST_SAVED,
    OTHERS_BUDGET,
    PROBE_BUDGET,
    PROMISES_DECAY,
    AutoPolicy,
    _Promises,
    _Slowest,
)
from nanospec.kernels.codes import NOBODY

NGRAM, MODEL = 0, 1  # places of drafters


def recorded(**by_k: float) -> AutoPolicy:
    """ms of a step of any number of rows by K, as k0=10.0."""
    return AutoPolicy(StepCosts(captured={8: {int(name[1:]): ms for name, ms in by_k.items()}}))


def promise(policy: AutoPolicy, *tokens: float) -> None:
    """Have the estimator say how many tokens a step yields with each K."""
    policy.estimator.tokens = lambda *_: list(tokens)  # type: ignore[method-assign]


def test_another_k_must_promise_more_by_a_margin() -> None:
    policy = recorded(k0=10.0, k1=10.0)
    policy._affords = lambda ms: False  # type: ignore[method-assign]
    found = []
    for tokens in (1.001, 1.003, 1.0, 0.9985, 0.997, 1.0):
        promise(policy, 1.0, tokens)
        found.append(policy.choose([0], [1]))
    assert found == [0, 1, 1, 1, 0, 0]


def test_a_larger_k_is_probed_as_often_as_what_it_costs_more_allows() -> None:
    policy = recorded(k0=10.0, k1=11.0, k2=11.5)
    promise(policy, 1.0, 1.5, 1.5)
    ks = [policy.choose([0], [2]) for _ in range(400)]
    assert set(ks) == {1, 2}
    assert ks.count(2) == pytest.approx(400 * PROBE_BUDGET * 10 / 0.5, abs=1)
    assert not policy._probed, "nothing is learned about a row by drafting more where it drafts"


def test_the_budgets_are_filled_up_to_a_bound_and_spent() -> None:
    policy = recorded(k0=10.0)
    policy.choose([0, 1], [0, 0])
    assert (policy._credit, policy._allowance) == (PROBE_BUDGET * 10, OTHERS_BUDGET * 10)
    for _ in range(3000):
        policy.choose([0, 1], [0, 0])
    assert (policy._credit, policy._allowance) == (MOST_SAVED * 10, 10)
    assert policy._affords(MOST_SAVED * 10)
    assert policy._credit == 0
    assert not policy._affords(1e-9)
    assert policy._affords(0.0)


def test_a_probe_of_rows_without_drafts_pays_for_the_next_if_it_succeeds() -> None:
    policy = recorded(k0=10.0, k4=10.2)
    promise(policy, 2.0, 2.0)
    ks: list[int] = []
    while not any(ks):
        assert not policy.probes(0)
        ks.append(policy.choose([0, 1], [4, 4]))
    assert len(ks) == 4  # 0.05 ms at a time
    assert policy.probes(0)
    assert policy.probes(1)
    policy._probing = False  # the next step
    before = policy._credit
    policy.observe(0, NGRAM, 3, 4, 3)
    assert policy._credit == before + 3 * 10.0 / 2  # tokens in ms of a step for two
    assert not policy.probes(0)
    assert policy.probes(1)
    policy.observe(0, NGRAM, 3, 4, 3)
    policy.reset(1)
    policy.observe(1, NGRAM, 3, 4, 3)
    assert policy._credit == before + 15.0


def test_drafts_that_pay_are_no_probe() -> None:
    policy = recorded(k0=10.0, k4=10.0)
    promise(policy, 1.0, 3.0)
    assert policy.choose([0], [4]) == 4
    before = policy._credit
    policy.observe(0, NGRAM, 3, 4, 4)
    assert policy._credit == before
    assert not policy.probes(0)
    assert not policy.probes(0, NGRAM)


def of_model(pass_ms: float) -> AutoPolicy:
    costs = StepCosts(packed={1: 10.0, 64: 40.0}, propose=lambda rows, passes: pass_ms * passes)
    return AutoPolicy(costs, MODEL)


def test_a_model_runs_for_as_many_drafts_as_are_asked_for() -> None:
    policy = of_model(0.0)
    for _ in range(50):
        policy.observe(0, MODEL, 0, 8, 8)
    policy.choose([0], [8])
    assert policy.passes([0], 0, 8) == 8
    before = policy._credit
    assert policy.cut([0], [MODEL], [8], [0]) == [8]
    policy.observe(0, MODEL, 0, 8, 8)
    assert policy._credit == before, "no probe"


def test_what_a_model_guessed_as_a_probe_is_verified_whole_and_nobody_elses() -> None:
    policy = of_model(0.0)
    for _ in range(50):
        policy.observe(0, MODEL, 0, 8, 0)
        policy.observe(1, NGRAM, 3, 8, 0)
    policy.choose([0, 1], [8, 8])
    policy._credit = 100.0
    most = policy.passes([0, 1], 0, 8)
    assert most > 0
    assert policy._probing
    policy._credit = 0.0
    assert policy.cut([0, 1], [MODEL, NGRAM], [most, 5], [0, 3]) == [most, 0]
    assert policy.probes(0, MODEL)
    assert policy.probes(1, NOBODY)
    assert not policy.probes(1, NGRAM)


def test_a_new_request_inherits_nothing_of_its_row() -> None:
    policy = AutoPolicy(StepCosts(packed={1: 10.0, 64: 40.0}))
    policy.observe(3, NGRAM, 3, 2, 1)
    policy._probed.add(3)
    policy._promises[3].open = 5.0
    policy.reset(3)
    assert 3 not in policy._promises
    assert not policy.probes(3)
    fresh = AutoPolicy(StepCosts(packed={1: 10.0, 64: 40.0}))
    fresh.estimator = policy.estimator
    assert policy.estimator.chances(3, (NGRAM, 3)) == policy.estimator.chances(7, (NGRAM, 3))


def test_promises_count_less_the_longer_ago_they_were() -> None:
    promises = _Promises()
    assert promises.kept == 1
    promises.open = 7.0
    promises.settle(2)
    assert promises.kept == pytest.approx(3 / 8 / ENOUGH)
    assert promises.open == 0
    promises.settle(0)
    decayed = (2 * PROMISES_DECAY + 1) / (7 * PROMISES_DECAY + 1) / ENOUGH
    assert promises.kept == pytest.approx(decayed)
    promises.settle(50)
    assert promises.kept == 1, "never more than all"


def test_what_the_slowest_row_loses() -> None:
    """A step of 5 rows takes 14 ms, one of a single row 10: a row's end is counted as 0.75 ms."""
    slowest = _Slowest(5, 14.0, 10.0)
    assert slowest.loses(0, 0.8, 1.0, 15.0) == pytest.approx(1 - 0.8 * 0.75)
    assert slowest.loses(1, 0.5, 0.5, 16.0) == pytest.approx(2 - 1.3 * 0.75), "not yet all rows"
    for row in (2, 3):
        slowest.loses(row, 0.5, 1.0, 17.0)
    common = 14 - 5 * 0.75  # of a step that all are spared
    assert slowest.loses(4, 1.0, 1.0, 18.0) == pytest.approx(4 - 3.3 * 0.75 - 0.25 * common)
    assert slowest.loses(1, 0.5, 1.0, 18.0) == pytest.approx(4 - 3.8 * 0.75 - 0.5 * common)
    alone = _Slowest(1, 10.0, 10.0)
    assert alone.loses(0, 0.5, 1.0, 10.2) == pytest.approx(0.2 - 0.5 * 10)


@pytest.mark.parametrize("queue", [True, False])
def test_a_row_alone_has_its_share_of_the_text(queue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[float, ...]] = []

    def spy(*given: Any) -> _Slowest:
        made.append(given)
        return _Slowest(*given)

    monkeypatch.setattr(nanospec.drafters.policy, "_Slowest", spy)
    policy = AutoPolicy(StepCosts(packed={1: 10.0, 64: 73.0}, attention=Attention(0.01, 0.0)))
    policy.choose(range(4), [8] * 4, 400, queue)
    policy.cut(range(4), [NGRAM] * 4, [8] * 4, [3] * 4)
    assert made == ([] if queue else [(4, 13 + 4.0, 10 + 1.0)])
