"""The policy verifies drafts that save time, learns online, and costs little where drafts are rejected."""

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from nanospec.drafters.estimates import Estimator, StepCosts, tokens_per_step
from nanospec.drafters.policy import EXPLORE, MARGIN, OVERHEAD, AutoPolicy, Choice, Policy
from nanospec.kernels import NO_DRAFTER
from nanospec.kernels.speculation.report import RowReport
from nanospec.kernels.speculation.trim import Estimates
from tests.trimmed import count_verified

KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
FLAT = {k: 10.0 + 0.01 * k for k in KS}  # drafts are free
HALF = {k: 10.0 + 2.0 * k for k in KS}
STEEP = {k: 10.0 * (k + 1) for k in KS}  # verifying a token costs as much as decoding it

SIZES = (1, 2, 4, 8, 16, 32, 64)
CHEAP = [10.0 + 0.1 * n for n in SIZES]  # cost almost independent of the number of tokens
SLOPED = [10.0 + n for n in SIZES]
FREE_TO_4 = [10.0 + max(n - 4, 0) for n in SIZES]  # 10 ms, and 1 ms per token beyond 4

NGRAM, MODEL = 0, 1  # drafter indices


def captured(*by_k: dict[int, float], sizes: Sequence[int] = (1, 4, 8, 32, 64)) -> AutoPolicy:
    """Return a policy for captured steps of these batch sizes, with the ms of each K."""
    costs = zip(sizes, by_k * len(sizes) if len(by_k) == 1 else by_k)
    return AutoPolicy(StepCosts({B: {B * (k + 1): ms for k, ms in row.items()} for B, row in costs}, True))


def by_tokens(ms: Sequence[float] = CHEAP, **more: Any) -> StepCosts:
    return StepCosts({64: dict(zip(SIZES, ms, strict=True))}, **more)


def packed(ms: Sequence[float] = CHEAP, **more: Any) -> AutoPolicy:
    return AutoPolicy(by_tokens(ms, **more))


def report(drafted: int, accepted: int, drafter: int = NGRAM, match: int = 3) -> RowReport:
    return RowReport([], drafted, accepted, drafter if drafted else NO_DRAFTER, match, 0, [])


def observe_row(policy: Policy, row: int, accepted: int, drafted: int = 4, steps: int = 30) -> None:
    for _ in range(steps):
        policy.observe({row: report(drafted, accepted)})


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
    waiting: bool = True, drafter: int = NGRAM,
) -> list[int]:  # fmt: skip
    """Return the number of drafts to verify in a step of rows 0, 1, ..."""
    limits = dict.fromkeys(range(len(drafts)), 16)
    choice = policy.choose(limits, limits, context, waiting)
    return count_verified(choice, drafts, [match] * len(drafts) if isinstance(match, int) else match, drafter)


def estimates(choice: Choice, num_drafters: int = 1) -> Estimates:
    return Estimates.of(torch.tensor(choice.estimates), num_drafters)


def test_cost_interpolation_and_extrapolation() -> None:
    costs = StepCosts({9: {1: 10.0, 2: 11.0, 4: 15.0}})
    assert [costs.cost(1, n) for n in (1, 2, 3, 4, 5, 6)] == [10, 11, 13, 15, 17, 19]
    assert StepCosts({1: {1: 10.0, 2: 9.0, 4: 12.0}}).ms[1] == {1: 10.0, 2: 10.0, 4: 12.0}
    model = StepCosts({2: {1: 10.0, 9: 18.0}})
    model.add_drafting(2, 1, 5.0)
    model.add_drafting(2, 2, 10.0)
    assert model.by_k(2, 2) == {0: 11.0, 1: 18.0, 2: 25.0}
    costs = StepCosts({2: {1: 10.0, 9: 18.0}}, attention=(0.004, 0.001))
    assert costs.cost(2, 8, 100) == pytest.approx(17 + 100 * 0.008), "attention cost is wrong"
    policy = captured({0: 10.0, 2: 12.0}, {0: 20.0, 1: 21.0}, sizes=(2, 4))
    assert policy.costs.by_k(2, 9) == {0: 10.0, 2: 12.0}
    assert policy.costs.by_k(4, 0) == {0: 20.0}
    assert policy.costs.by_k(3, 9) == {0: 20.0, 1: 21.0}, "drafting takes as long for fewer rows"
    assert policy.costs.cost(3, 6) == 20.5
    assert policy.costs.cost(3, 3) == 20, "a bucket does not take less for fewer tokens"


@pytest.mark.parametrize("context", [0, 300])
def test_estimates_have_the_measured_costs(context: int) -> None:
    policy = packed([10.0, 11.0, 15.0, 15.0, 16.0, 30.0, 40.0], attention=(0.004, 0.001))
    choice = policy.choose({0: 16, 1: 16}, {0: 16, 1: 16}, context, True)
    e = estimates(choice)
    for n in (2, 3, 8, 20, 64, 100):
        ms = e.base_ms + ((n - e.cost_at).clamp(min=0) * e.cost_slope).sum()
        assert float(ms) == pytest.approx(policy.costs.cost(2, n, context), rel=1e-5)


def test_drafting_times_of_other_sizes_and_ages() -> None:
    costs = StepCosts({64: {1: 10.0}})
    assert costs.drafting(4, 4) == 0
    for _ in range(3):
        costs.add_drafting(4, 4, 2.0)
    assert costs.drafting(5, 4) == 2.0
    assert [costs.drafting(4, k) for k in (0, 2, 8)] == [0, 1, 2], "larger K takes at least as long"
    assert costs.drafting(1, 4) == 0, "unmeasured smaller batches must cost 0"
    for _ in range(3000):
        costs.fade_drafting(0.05)
    assert costs.drafting(4, 4) < 1, "old times must fade"
    for _ in range(30):
        costs.add_drafting(4, 4, 2.0)
    assert costs.drafting(4, 4) == pytest.approx(2.0, rel=0.01)


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
    chances, factors = estimator.chances(2)[0], estimator.factors(row, drafter)
    return min(chances[9 * drafter + match] * factors[match > 0], 1.0)


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
    observe_row(policy, 0, accepted=4)
    assert [choose(policy, {0: most}) for most in (16, 5, 0)] == [16, 4, 0]
    assert not policy.probing


def test_model_replaces_matches_that_are_accepted_less_often() -> None:
    policy = AutoPolicy(by_tokens(), 2, MODEL)
    policy.costs.add_drafting(2, 4, 2.0)
    for match, accepted in ((1, 0), (2, 1), (3, 4)):
        for _ in range(40):
            policy.observe({0: report(4, accepted, match=match), 1: report(4, 4, MODEL, 0)})
    limits = {0: 16, 1: 16}
    found = [float(estimates(policy.choose(limits, limits, 0, True), 2).min_match) for _ in range(EXPLORE)]
    assert sorted(found) == [0.0] + [3.0] * (EXPLORE - 1), "matches of any length must sometimes be verified"


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
    policy = captured(HALF, {0: 10.0, 2: 10.1}, HALF, sizes=(1, 8, 16))
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


@pytest.mark.parametrize("waiting", [True, False])
def test_rows_without_drafts_are_slowed_little(waiting: bool) -> None:
    """All drafts of row 0 are accepted; 15 rows have no drafts. Verifying a draft costs 1 ms."""
    policy, B, steps, taken = packed(FREE_TO_4), 16, 400, []
    observe_row(policy, 0, 8, drafted=8)
    for _ in range(steps):
        [n, *_] = to_verify(policy, [8] + [0] * 15, waiting=waiting)
        policy.observe({0: report(n, n), **{row: report(0, 0) for row in range(1, 16)}})
        taken.append(n)
    plain = policy.costs.cost(B, B)
    lost = sum(policy.costs.cost(B, B + n) - plain for n in taken)
    saved = sum(taken) * (plain - policy.costs.cost(B, 1)) / 15
    share = (lost - saved) / (steps * plain)
    if waiting:
        assert set(taken) == {8}
        assert share > 0.03
    else:
        assert share <= MARGIN, "cost to other rows exceeds the limit"


def drafted_steps(
    policy: AutoPolicy, B: int, pass_ms: float, accepted: int, steps: int, drafts_in: int = 1
) -> list[int]:
    """Return the drafts verified per step, for a draft model that takes `pass_ms` per draft, has drafts in
    one of `drafts_in` steps, and is right in the first `accepted` drafts."""
    result = []
    for step in range(steps):
        limits = dict.fromkeys(range(B), 8)
        choice = policy.choose(limits, limits, 0, True)
        k = min(choice.k, choice.model_k)
        drafts = [k if step % drafts_in == 0 else 0] * B
        verified = count_verified(choice, drafts, [0] * B, MODEL, 2) if k else drafts
        policy.add_time(pass_ms * k)
        drafter = MODEL if drafts[0] else NO_DRAFTER
        seen = {r: RowReport([], n, min(n, accepted), drafter, 0, 0, []) for r, n in enumerate(verified)}
        policy.observe(seen if k else {})
        result.append(k if drafts_in > 1 else sum(verified))
    return result


def model_policy() -> AutoPolicy:
    return AutoPolicy(StepCosts({64: {1: 10.0, 64: 40.0}}), 2, MODEL)


@pytest.mark.parametrize("B", [1, 8])
def test_improving_draft_model_is_noticed(B: int) -> None:
    policy = model_policy()
    assert sum(drafted_steps(policy, B, 1.0, 0, 300)[200:]) <= 20 * B
    assert min(drafted_steps(policy, B, 1.0, 99, 300)[-20:]) >= 2 * B


def test_model_that_often_has_no_drafts_is_rarely_run() -> None:
    assert sum(k > 0 for k in drafted_steps(model_policy(), 1, 1.0, 99, 200, drafts_in=20)[50:]) < 30


def test_draft_model_without_gain_is_rarely_run() -> None:
    assert sum(n > 0 for n in drafted_steps(model_policy(), 1, 30.0, 99, 300)) <= 40
    policy = model_policy()
    drafted_steps(policy, 8, 4.0, 99, 50)
    assert choose(policy, {0: 8}) > 0
    assert choose(policy, {0: 8} | dict.fromkeys(range(1, 31), 0)) == 0


def test_draft_model_that_becomes_slow_is_rarely_retried() -> None:
    policy, steps = model_policy(), 3000
    drafted_steps(policy, 1, 0.5, 3, 100)
    drafted_steps(policy, 1, 500.0, 3, 1000)
    assert 500.0 * sum(drafted_steps(policy, 1, 500.0, 3, steps)) < 0.05 * steps * policy.costs.cost(1, 1)


def test_k_is_zero_if_neither_the_model_nor_an_extension_drafts() -> None:
    policy, limits = AutoPolicy(StepCosts({2: {1: 10.0, 64: 40.0}}), 1, 0), {0: 8, 1: 4}
    for k in range(1, 9):
        policy.costs.add_drafting(2, k, 300.0)
    assert policy.choose(limits, limits, 0, True) == (0, 0, ())
    choice = policy.choose(limits, {0: 8, 1: 0}, 0, True)
    assert (choice.k, choice.model_k) == (8, 0)


def run_captured(
    policy: AutoPolicy, chances: Sequence[float], steps: int, match: int, drafter: int, num_drafters: int
) -> tuple[float, float]:
    """Return tokens per ms, and ms per step, of steps in which each draft of a row is accepted with its
    chance. All rows have k drafts."""
    rng, B, tokens, ms = random.Random(0), len(chances), 0, 0.0
    for _ in range(steps):
        limits = dict.fromkeys(range(B), 8)
        k = (choice := policy.choose(limits, limits, 0, False)).k
        verified = count_verified(choice, [k] * B, [match] * B, drafter, num_drafters) if k else [0] * B
        accepted = [0] * B
        for row, n in enumerate(verified):
            while accepted[row] < n and rng.random() < chances[row]:
                accepted[row] += 1
        if k:
            rows = enumerate(zip(verified, accepted, strict=True))
            policy.observe({row: RowReport([], n, a, drafter, match, 0, []) for row, (n, a) in rows})
        tokens += B + sum(accepted)
        ms += policy.costs.by_k(B, k)[k]
    return tokens / ms, ms / steps


def test_improving_lookup_is_noticed_in_captured_steps() -> None:
    """Probes verify drafts that estimates reject."""
    policy = captured(FLAT)
    speed, ms = run_captured(policy, [0.0] * 4, 600, 3, NGRAM, 1)
    assert ms < 10 * (1 + OVERHEAD)
    run_captured(policy, [0.95] * 4, 600, 3, NGRAM, 1)
    assert run_captured(policy, [0.95] * 4, 100, 3, NGRAM, 1)[0] > 5 * speed


@pytest.mark.parametrize("has_lookup", [False, True])
@pytest.mark.parametrize("chances", [[0.9] + [0.1] * 7, [0.0] + [0.9] * 7, [0.7] * 4])
def test_model_in_captured_steps_is_as_fast_as_with_the_best_k(
    chances: list[float], has_lookup: bool
) -> None:
    """The times of buckets include drafting, so verifying the drafts of a step costs little more."""
    by_k = {k: 10.0 + 3 * k for k in KS}
    costs = StepCosts({B: {B * (k + 1): ms for k, ms in by_k.items()} for B in (1, 4, 8)}, captured=True)
    policy, code = AutoPolicy(costs, 1 + has_lookup, has_lookup), int(has_lookup)
    run_captured(policy, chances, 400, 0, code, 1 + has_lookup)
    speed, _ = run_captured(policy, chances, 800, 0, code, 1 + has_lookup)
    best = max(sum(sum(p**i for i in range(k + 1)) for p in chances) / ms for k, ms in by_k.items())
    assert speed > 0.97 * best


@pytest.mark.parametrize("by_k", [FLAT, HALF, STEEP])
def test_failing_probes_cost_little(by_k: dict[int, float]) -> None:
    policy, spent, plain = captured(by_k), 0.0, 0.0
    for step in range(3000):
        k = choose(policy, 4)
        assert not k or policy.probing or step < 500
        if step >= 500:
            spent, plain = spent + by_k[k], plain + by_k[0]
        if k:
            policy.observe({row: report(0, 0) for row in range(4)})
    assert plain < spent < (1 + 1.2 * OVERHEAD) * plain or by_k is STEEP


def test_rows_without_drafts_are_probed_in_turn() -> None:
    policy = packed(SLOPED)
    for row in range(4):
        observe_row(policy, row, accepted=0, steps=100)
    totals = [sum(column) for column in zip(*(to_verify(policy, [8] * 4) for _ in range(800)))]
    assert max(totals) - min(totals) <= 1
    assert 0 < sum(totals) <= 800 * OVERHEAD * policy.costs.cost(4, 4), "probes cost too much"
