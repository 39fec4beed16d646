"""The policy verifies drafts that save time, learns online, and costs little where drafts are rejected."""

import random
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanospec.drafters.estimates import DraftTimes, Estimator, RowProposal, StepCosts, tokens_per_step
from nanospec.drafters.policy import EXPLORE, OVERHEAD, AutoPolicy, Policy
from nanospec.kernels import NO_DRAFTER
from nanospec.kernels.speculation.report import RowReport

KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FLAT = {k: 10.0 + 0.01 * k for k in KS}  # drafts are free
HALF = {k: 10.0 + 2.0 * k for k in KS}
STEEP = {k: 10.0 * (k + 1) for k in KS}  # verifying a token costs as much as decoding it

SIZES = (1, 2, 4, 8, 16, 32, 64)
CHEAP = [10.0 + 0.1 * n for n in SIZES]  # cost almost independent of the number of tokens
SLOPED = [10.0 + n for n in SIZES]
FREE_TO_4 = [10.0 + max(n - 4, 0) for n in SIZES]  # 10 ms, and 1 ms per token beyond 4

NGRAM, MODEL = 0, 1  # drafter indices
NONE = RowProposal(0, NO_DRAFTER, 0, 0)


def captured(by_k: dict[int, float]) -> AutoPolicy:
    return AutoPolicy(StepCosts(captured={1: by_k, 64: by_k}))


def packed(ms: Sequence[float] = CHEAP, **more: Any) -> AutoPolicy:
    return AutoPolicy(StepCosts(packed=dict(zip(SIZES, ms, strict=True)), **more))


def report(drafted: int, accepted: int, drafter: int = NGRAM, match: int = 3) -> RowReport:
    return RowReport([], drafted, accepted, drafter if drafted else NO_DRAFTER, match, 0, [])


def observe_row(policy: Policy, row: int, accepted: int, drafted: int = 4, steps: int = 30) -> None:
    for _ in range(steps):
        policy.observe(row, report(drafted, accepted))


def choose(policy: Policy, rows: int | dict[int, int], context: int = 0, waiting: bool = True) -> int:
    """Return the chosen K for rows with the given limits; a number means rows with a limit of 16."""
    limits = rows if isinstance(rows, dict) else dict.fromkeys(range(rows), 16)
    choice = policy.choose(limits, limits, context, waiting)
    return min(choice.k, choice.model_k)


def usual_k(policy: Policy, rows: int | dict[int, int]) -> int:
    """Return the most frequent K, which excludes probes."""
    ks = [choose(policy, rows) for _ in range(100)]
    return max(set(ks), key=ks.count)


def to_verify(
    policy: Policy, drafts: Sequence[int], match: int | Sequence[int] = 3, context: int = 0,
    waiting: bool = True,
) -> list[int]:  # fmt: skip
    """Return the number of drafts to verify in a packed step of rows 0, 1, ..."""
    matches = [match] * len(drafts) if isinstance(match, int) else match
    choose(policy, len(drafts), context, waiting)
    offers = enumerate(zip(drafts, matches, strict=True))
    taken = policy.count_drafts([RowProposal(row, NGRAM if n else -1, n, m) for row, (n, m) in offers])
    assert all(0 <= n <= offered for n, offered in zip(taken, drafts, strict=True))
    return taken


def test_cost_interpolation_and_extrapolation() -> None:
    costs = StepCosts(packed={1: 10.0, 2: 11.0, 4: 15.0})
    assert [costs.cost(1, n) for n in (1, 2, 3, 4, 5, 6)] == [10, 11, 13, 15, 17, 19]
    assert StepCosts(packed={1: 10.0, 2: 9.0, 4: 12.0}).packed == {1: 10.0, 2: 10.0, 4: 12.0}
    model = StepCosts(packed={1: 10.0, 9: 18.0}, propose=lambda rows, drafts: 5.0 * drafts)
    assert model.by_k(2, 2) == {0: 11.0, 1: 18.0, 2: 25.0}
    costs = StepCosts(packed={1: 10.0, 9: 18.0}, attention=(0.004, 0.001))
    assert costs.cost(2, 8, 100) == pytest.approx(17 + 100 * 0.008), "attention cost is wrong"


def test_draft_times_of_other_sizes_and_ages() -> None:
    times = DraftTimes()
    assert times(4, 4) == 0
    for ms in (9.0, 2.0, 2.0):
        times.add(4, 4, ms)
    assert times(5, 4) == 2.0
    assert [times(4, k) for k in (0, 2, 8)] == [0, 1, 2], "larger K takes at least as long"
    assert times(1, 4) == 0, "unmeasured smaller batches must cost 0"
    for _ in range(3000):
        times.fade()
    assert times(4, 4) < 1, "old times must fade"
    times.add(4, 4, 2.0)
    assert times(4, 4) == 2.0


def test_tokens_per_step() -> None:
    """Constant acceptance gives a geometric sum; other acceptance is compared with a simulation."""
    for x, limit in product((0.0, 0.25, 0.5, 0.9, 1.0), (16, 4, 0)):
        expected = [sum(x**j for j in range(min(k, limit) + 1)) for k in KS]
        assert tokens_per_step(x, x, x, KS, limit) == pytest.approx(expected)
    rng, steps, k, tokens, copying = random.Random(0), 40_000, 4, 0, False
    miss, full, further = 0.125, 0.75, 0.875
    for _ in range(steps):
        accepted = 0
        while accepted < k and rng.random() < (further if accepted else full if copying else miss):
            accepted += 1
        tokens += accepted + 1
        copying = accepted == k
    assert tokens_per_step(miss, full, further, (0, k), 16) == [1, pytest.approx(tokens / steps, rel=0.02)]


def first(estimator: Estimator, row: int, drafter: int = NGRAM, match: int = 0) -> float:
    """Return the acceptance probability of a row's first draft."""
    return estimator.gains(RowProposal(row, drafter, 1, match))[0]


def test_rates_are_kept_by_match_length_drafter_row_and_last_step() -> None:
    estimator = Estimator()
    assert first(estimator, 9, match=1) < first(estimator, 9, match=2) < first(estimator, 9, match=5)
    for _ in range(50):
        for row in range(8):  # the rates of match lengths are shared by requests
            estimator.observe(row, NGRAM, 1, 4, 3)
            estimator.observe(row, NGRAM, 5, 4, 0)
        estimator.observe(10, NGRAM, 2, 4, 3)
        estimator.observe(10, MODEL, 0, 4, 0)
        estimator.observe(11, NGRAM, 2, 4, 0)
    assert first(estimator, 9, match=1) > 0.85
    assert first(estimator, 9, match=5) < 0.15
    assert first(estimator, 10, match=2) > 2 * first(estimator, 11, match=2)
    assert first(estimator, 10, MODEL) < 0.1
    before = first(estimator, 7 + 5, match=2)
    estimator.reset(10)
    assert first(estimator, 10, match=2) == before, "reset must restore the initial rate"
    for accepted in (2, 0) * 50:  # accepted, then rejected
        estimator.observe(0, MODEL, 0, 2, accepted)
    assert first(estimator, 0, MODEL) > 0.9
    estimator.observe(0, MODEL, 0, 2, 2)
    assert first(estimator, 0, MODEL) < 0.1, "rate after full acceptance must be separate"


def test_fixed_policy_and_free_drafts() -> None:
    fixed, policy = Policy(), captured(FLAT)
    observe_row(fixed, 0, 0)
    assert choose(fixed, {0: 3, 1: 16}) == 16
    assert to_verify(fixed, [3, 0, 16]) == [3, 0, 16]
    assert fixed.expected_speedup is None
    observe_row(policy, 0, accepted=4)
    assert [choose(policy, {0: most}) for most in (16, 5, 0)] == [16, 4, 0]
    assert policy.expected_speedup == 1


def test_model_replaces_matches_that_are_accepted_less_often() -> None:
    costs = StepCosts(packed=dict(zip(SIZES, CHEAP)), propose=lambda rows, drafts: 0.5 * drafts)
    policy = AutoPolicy(costs, MODEL)
    for match, accepted in ((1, 0), (2, 1), (3, 4)):
        for row in (0, 1):
            for _ in range(40):
                policy.observe(row, report(4, accepted, match=match))
    for row, accepted in ((0, 4), (1, 0)):  # the model's drafts
        for _ in range(40):
            policy.observe(row, report(4, accepted, MODEL, 0))
    limits = {0: 16, 1: 16}
    found = [policy.choose(limits, limits, 0, True).min_match for _ in range(EXPLORE)]
    assert found.count(()) == 1, "matches of any length must sometimes be verified"
    assert set(map(tuple, found)) == {(3, 1), ()}


@pytest.mark.parametrize(
    ("by_k", "accepted", "rows", "copying", "pays"),
    [(HALF, 0, 1, 1, False), (STEEP, 3, 8, 8, False), (HALF, 4, 8, 7, True), (HALF, 4, 32, 1, False)],
)
def test_k_pays_for_the_whole_batch(
    by_k: dict[int, float], accepted: int, rows: int, copying: int, pays: bool
) -> None:
    policy = captured(by_k)
    for row in range(rows):
        observe_row(policy, row, *((accepted, 4) if row < copying else (0, 0)))
    assert (usual_k(policy, rows) > 0) == pays


def test_limits_missing_ks_and_new_requests() -> None:
    policy = AutoPolicy(StepCosts(captured={1: HALF, 8: {0: 10.0, 2: 10.1}, 16: HALF}))
    for row in range(1, 32):
        observe_row(policy, row, accepted=3)
    assert choose(policy, dict.fromkeys(range(1, 9), 16)) == 2
    sixteen = range(1, 17)
    assert [choose(policy, dict.fromkeys(sixteen, most)) > 2 for most in (2, 16)] == [False, True]
    one = {row: 16 * (row == 1) for row in sixteen}
    assert usual_k(policy, one) == 0, "K must be 0 if only one row gains"
    observe_row(policy, 0, accepted=0, steps=60)
    assert usual_k(policy, 1) == 0
    policy.reset(0)
    assert choose(policy, 1) > 0


@example(rows=[(4, 3, 0), (4, 3, 2), (4, 3, 4)], more=[10.0, 17.0, 0.0, 0.5, 2.5, 10.0, 20.0], context=0)
@example(rows=[(16, 3, 8)], more=[0.0] * 7, context=0)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=9),
    st.lists(st.floats(0.0, 9.0), min_size=len(SIZES), max_size=len(SIZES)),
    st.integers(0, 5000),
)
def test_count_drafts_is_optimal_for_the_batch(
    rows: list[tuple[int, int, int]], more: list[float], context: int
) -> None:
    """Compare with adding the drafts one by one, likeliest first."""
    policy, B = packed(list(accumulate(more, initial=10.0))[1:], attention=(0.003, 0.001)), len(rows)
    for row, (_, match, accepted) in enumerate(rows):
        for _ in range(5):
            policy.observe(row, report(9, accepted, match=match))
    counts, matches, _ = zip(*rows)
    offers = [RowProposal(row, NGRAM, n, match) for row, (n, match, _) in enumerate(rows)]
    gains = [gain for offer in offers for gain in policy.estimator.gains(offer)]
    assert all(0 <= gain <= 1 for gain in gains)
    totals = accumulate(sorted(gains, reverse=True), initial=float(B))
    rates = [total / policy.costs.cost(B, B + n, context) for n, total in enumerate(totals)]
    taken = to_verify(policy, counts, matches, context)
    assert policy.expected_speedup == pytest.approx(max(rates) / rates[0])
    best = [n for n, rate in enumerate(rates) if rate == pytest.approx(max(rates))]
    assert sum(taken) in {*best, *(n + 1 for n in best)}, "number of drafts is not optimal"


@pytest.mark.parametrize("waiting", [True, False])
def test_rows_without_drafts_are_slowed_little(waiting: bool) -> None:
    """All drafts of row 0 are accepted; 15 rows have no drafts. Verifying a draft costs 1 ms."""
    policy, B, steps, taken = packed(FREE_TO_4), 16, 400, []
    observe_row(policy, 0, 8, drafted=8)
    for _ in range(steps):
        [n, *_] = to_verify(policy, [8] + [0] * 15, waiting=waiting)
        policy.observe(0, report(n, n))
        taken.append(n)
    plain = policy.costs.cost(B, B)
    lost = sum(policy.costs.cost(B, B + n) - plain for n in taken)
    saved = sum(taken) * (plain - policy.costs.cost(B, 1)) / 15
    share = (lost - saved) / (steps * plain)
    if waiting:
        assert set(taken) == {8}
        assert share > 0.03
    else:
        assert taken[0] == 0, "the first step must not speculate"
        assert OVERHEAD / 4 < share < 0.012, "cost to other rows exceeds the limit"


def model_policy(pass_ms: float) -> AutoPolicy:
    costs = StepCosts(packed={1: 10.0, 64: 40.0}, propose=lambda rows, drafts: pass_ms * drafts)
    return AutoPolicy(costs, MODEL)


def drafted_steps(policy: AutoPolicy, B: int, right: bool, steps: int) -> list[int]:
    """Return the drafts verified per step, for a draft model that is always right or always wrong."""
    result = []
    for _ in range(steps):
        k = choose(policy, dict.fromkeys(range(B), 8))
        drafter = MODEL if k else NO_DRAFTER
        drafts = policy.count_drafts([RowProposal(row, drafter, k, 0) for row in range(B)])
        for row, n in enumerate(drafts):
            policy.observe(row, report(n, n if right else 0, MODEL, match=0))
        result.append(sum(drafts))
    return result


@pytest.mark.parametrize("B", [1, 8])
def test_improving_draft_model_is_noticed(B: int) -> None:
    policy = model_policy(1.0)
    assert sum(drafted_steps(policy, B, False, 300)[200:]) <= 20 * B
    assert min(drafted_steps(policy, B, True, 300)[-20:]) >= 2 * B


def test_model_that_often_has_no_drafts_is_rarely_run() -> None:
    policy, runs = model_policy(1.0), 0
    for step in range(200):
        k = choose(policy, {0: 8})
        drafts = policy.count_drafts([RowProposal(0, MODEL, k, 0) if k and step % 20 == 0 else NONE])
        if drafts[0]:
            policy.observe(0, report(drafts[0], drafts[0], MODEL, match=0))
        runs += k > 0 and step >= 50
    assert runs < 30


def test_draft_model_without_gain_is_rarely_run() -> None:
    assert sum(n > 0 for n in drafted_steps(model_policy(30.0), 1, True, 300)) <= 40
    policy = model_policy(4.0)
    drafted_steps(policy, 8, True, 50)
    assert choose(policy, {0: 8}) > 0
    assert choose(policy, {0: 8} | dict.fromkeys(range(1, 31), 0)) == 0


def test_k_is_zero_if_neither_the_model_nor_an_extension_drafts() -> None:
    costs = StepCosts(packed={1: 10.0, 64: 40.0}, propose=lambda rows, drafts: 30.0 * (drafts > 0))
    policy, limits = AutoPolicy(costs, 0), {0: 8, 1: 4}
    for waiting in (True, False):  # as in steps with drafts, the latter adds to what drafts may cost others
        assert policy.choose(limits, limits, 0, waiting).k == 0
    assert policy._accounts._spent == pytest.approx(-OVERHEAD * policy.costs.cost(2, 2))
    choice = policy.choose(limits, {0: 8, 1: 0}, 0, True)
    assert (choice.k, choice.model_k) == (8, 0)


@pytest.mark.parametrize("by_k", [FLAT, HALF, STEEP])
def test_failing_probes_cost_little(by_k: dict[int, float]) -> None:
    policy = captured(by_k)
    spent = plain = 0.0
    for step in range(3000):
        k = choose(policy, 4)
        assert policy.expected_speedup == 1 or step < 500
        if step >= 500:
            spent, plain = spent + by_k[k], plain + by_k[0]
        for row in range(4 if k else 0):
            policy.observe(row, report(0, 0))
    assert plain < spent < (1 + 1.2 * OVERHEAD) * plain or by_k is STEEP


def test_rows_without_drafts_are_probed_in_turn() -> None:
    policy = packed(SLOPED)
    for row in range(4):
        observe_row(policy, row, accepted=0, steps=100)
    totals = [sum(column) for column in zip(*(to_verify(policy, [8] * 4) for _ in range(800)))]
    assert max(totals) - min(totals) <= 1
    assert 0 < sum(totals) <= 800 * OVERHEAD * policy.costs.cost(4, 4), "probes cost too much"
