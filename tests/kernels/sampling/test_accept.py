"""The further rules of acceptance: rejection sampling keeps the distribution, typical acceptance does
what it says, and rows that ask for neither keep their targets.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nanospec.kernels import dispatch
from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling import accept, noise, penalties, probabilities, sample
from nanospec.kernels.sampling.accept import DELTA, EPSILON, EXACT, REJECTION, TYPICAL
from nanospec.kernels.sampling.sample import Params
from nanospec.kernels.speculation import verify
from tests.kernels.batches import S, make_params, make_rows, random_logits, random_params

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage

IMPLEMENTATIONS = {"naive": accept.naive, "kernel": accept.launch}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rules(*codes: int) -> Tensor:
    return torch.tensor(codes, dtype=torch.int8)


def make_parents(batch: Batch) -> Tensor:
    """[T] int32: the parent of each token, read off the ancestor masks."""
    assert batch.ancestors is not None
    parents = torch.full((batch.num_tokens,), -1, dtype=torch.int32)
    for start, n in zip(batch.q_start.tolist(), batch.q_len.tolist()):
        for i in range(1, n):
            parents[start + i] = (int(batch.ancestors[start + i]) ^ 1 << i).bit_length() - 1
    return parents


def draft(scores: Tensor, s: int, position: int, params: Params) -> int:
    """What a draft model draws from its logits [V]: with the request's own noise at the position."""
    scores = scores.float()
    if params.shaped[s]:
        scores = penalties.naive(scores, s, position, ints(), params)
    return max(int(sample.draw(scores, s, position, params)), 0)


def random_case(seed: int, V: int, form: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of `accept`: rows of every rule, greedy and padding rows among them."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = rng.sample([0, 1, 2, 3, -1], 5)
    q_len = [n if s >= 0 else 0 for n, s in zip([4, 2, 3, 5, 3], rows)]
    batch = make_rows(q_len, [rng.randint(0, 20) for _ in rows], form != "packed", form == "tree")
    params = random_params(rng, V)
    params.temperature[:] = torch.tensor(rng.sample([0.0, 0.5, 1.0, 1.0, 1.7], S))
    params.top_k[:] = torch.tensor(rng.choices([0, 0, V // 2, 5], k=S))
    params.min_p[:] = torch.tensor(rng.choices([0.0, 0.0, 0.05], k=S))
    logits = random_logits(rng, batch.num_tokens, V, dtype)
    input_ids = torch.randint(0, V, (batch.num_tokens,), generator=generator, dtype=torch.int32)
    K = 3  # fewer than the longest row has drafts, more than others have
    draft_logits = torch.zeros(5, K + 1, V, dtype=dtype)[:, :K]  # evenly spaced, not contiguous
    for b, (s, start, n) in enumerate(zip(rows, batch.q_start.tolist(), q_len)):
        for j in range(min(n - 1, K)):
            # Some near the target's; what is likely for the one is not impossible for the other.
            away = torch.randn(V, generator=generator) * rng.choice([0.0, 0.5, 2.0])
            draft_logits[b, j] = logits[start + j] + away.to(dtype)
            position = int(batch.base_len[b]) + j + 1
            position += rng.choice([0, 0, 1000])  # the target's noise, or some other
            input_ids[start + j + 1] = draft(draft_logits[b, j], s, position, params)
            if rng.random() < 0.3:
                input_ids[start + j + 1] = logits[start + j].argmax()
    if form == "nan":
        logits[int(batch.q_start[rows.index(0)]), V // 2] = math.nan
        logits[int(batch.q_start[rows.index(1)]) + 1, 0] = math.inf
        draft_logits[rows.index(2), 0, 0] = math.nan
        draft_logits[rows.index(3), 0] = -math.inf
    row_ids = ints(*rows)
    parents = make_parents(batch) if form == "tree" else None
    has_probs = None if seed % 2 else torch.tensor(rng.sample([True, True, True, True, False], 5))
    if parents is not None and has_probs is not None:  # beside trees, chains may have been drawn
        for b, (start, n) in enumerate(zip(batch.q_start.tolist(), q_len)):
            has_probs[b] = parents[start : start + n].tolist() == list(range(-1, n - 1))
    return {
        "targets": sample.naive(logits, input_ids, row_ids, params, batch),
        "logits": logits,
        "input_ids": input_ids,
        "rows": row_ids,
        "params": params,
        "batch": batch,
        "rule": rules(*rng.sample([EXACT, REJECTION, TYPICAL, REJECTION, TYPICAL], S)),
        "parents": parents,
        "draft_logits": None if form == "ngram" else draft_logits,
        "has_probs": has_probs,
    }


def places(batch: Batch, b: int) -> slice:
    return slice(int(batch.q_start[b]), int(batch.q_start[b]) + int(batch.q_len[b]))


def check_rows_that_keep_their_targets(case: dict[str, Any], targets: Tensor) -> None:
    params, rule = case["params"], case["rule"].tolist()
    for b, s in enumerate(case["rows"].tolist()):
        own = places(case["batch"], b)
        drawn = case["parents"] is None if case["has_probs"] is None else case["has_probs"][b]
        guess = case["draft_logits"] is None or not drawn
        if s >= 0 and (rule[s] == EXACT or params.temperature[s] == 0 or (rule[s] == REJECTION and guess)):
            assert torch.equal(targets[own], case["targets"][own])
        if s >= 0:
            assert torch.equal(targets[own] == -1, case["targets"][own] == -1)


FORMS = ["chain", "packed", "tree", "nan", "ngram"]


@pytest.mark.parametrize("form", FORMS)
def test_kernel_matches_naive(form: str) -> None:
    changed = 0
    for seed, V in enumerate((63, 100, 63, 2500)):
        case = random_case(seed, V, form, torch.float16 if V == 100 else torch.float32)
        before = case["targets"].clone()
        expected, actual = accept.naive(**case), accept.launch(**case)
        assert actual.dtype == torch.int32
        for b in range(5):
            own = places(case["batch"], b)
            assert actual[own].tolist() == expected[own].tolist(), f"V{V}, row {b}"
            changed += int((expected[own] != before[own]).sum())
        check_rows_that_keep_their_targets(case, actual)
        assert torch.equal(case["targets"], before)  # not written to
    assert changed >= (1 if form == "ngram" else 2), changed


@pytest.mark.parametrize("form", FORMS)
def test_lazy_walk_gives_the_same_verdict(form: str) -> None:
    """Targets that a lazy `sample` has not drawn are drawn when a further rule gets there."""
    further = 0
    for seed in range(12):
        case = random_case(seed, 40, form)
        verdict = (case["input_ids"], case["batch"], case["parents"])
        expected = verify.naive(accept.naive(**case), *verdict)
        check_rows_that_keep_their_targets(case, accept.naive(**case))
        arguments = {name: case[name] for name in ("logits", "input_ids", "rows", "params", "batch")}
        lazy = sample.naive(**arguments, lazy=True)
        further += int((expected.num_emitted > verify.naive(lazy, *verdict).num_emitted).sum())
        with dispatch.forced("naive"):
            actual = verify.naive(accept.accept(**{**case, "targets": lazy}), *verdict)
        for a, e in zip(actual, expected):
            assert torch.equal(a, e)
    assert further >= 4, further


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_exact_rows_keep_their_targets(implementation: str) -> None:
    case = random_case(3, 63, "chain")
    case["rule"] = rules(*[EXACT] * S)
    targets = IMPLEMENTATIONS[implementation](**case)
    for b in range(5):
        own = places(case["batch"], b)
        assert torch.equal(targets[own], case["targets"][own])


def test_kernel_row_does_not_depend_on_the_batch() -> None:
    case = random_case(1, 100, "chain")
    together, batch = accept.launch(**case), case["batch"]
    for b, s in enumerate(case["rows"].tolist()):
        if s < 0:
            continue
        own = places(batch, b)
        alone = {name: case[name][own] for name in ("targets", "logits", "input_ids")}
        rows = make_rows([int(batch.q_len[b])], [int(batch.base_len[b])], True)
        alone |= {"rows": ints(s), "batch": rows, "draft_logits": case["draft_logits"][b : b + 1]}
        assert torch.equal(accept.launch(**{**case, **alone}), together[own])


@pytest.mark.parametrize("bad", ["vocabulary", "rows", "stride"])
def test_kernel_refuses_draft_logits(bad: str) -> None:
    case = random_case(1, 10, "chain")
    shape = {"vocabulary": (5, 3, 9), "rows": (4, 3, 10), "stride": (5, 10, 3)}[bad]
    draft_logits = torch.zeros(shape)
    case["draft_logits"] = draft_logits.transpose(1, 2) if bad == "stride" else draft_logits
    with pytest.raises(ValueError, match="draft_logits"):
        accept.launch(**case)


# Rejection sampling.

V = 12
GENERATOR = torch.Generator().manual_seed(8)
P_FIRST, P_SECOND = torch.randn(V, generator=GENERATOR) * 1.5, torch.randn(V, V, generator=GENERATOR) * 1.5
Q_FIRST = P_FIRST + torch.randn(V, generator=GENERATOR)
Q_SECOND = P_SECOND + torch.randn(V, V, generator=GENERATOR)
CASES: dict[str, dict[str, float]] = {
    "T0.5": {"temperature": 0.5},
    "T1": {"temperature": 1.0},
    "T1.5": {"temperature": 1.5},
    "T1-top_k": {"temperature": 1.0, "top_k": 5},
    "T1.5-top_p": {"temperature": 1.5, "top_p": 0.8},
    "T0.5-top_k-top_p": {"temperature": 0.5, "top_k": 7, "top_p": 0.9},
}


SIZES, SEEDS = (4000, 64_000), range(8)


def steps(params: Params, n: int, q_first: Tensor, q_second: Tensor) -> tuple[Tensor, verify.Verdict]:
    """n steps of a request with two drafts of a draft model each, the step b at position 3 b.

    The second draft and the second target depend on the first draft, as they do in a model.
    """
    batch = make_rows([3] * n, [3 * b for b in range(n)], uniform=True)
    positions = batch.positions.tolist()
    first = [draft(q_first, 0, positions[3 * b] + 1, params) for b in range(n)]
    second = [draft(q_second[a], 0, positions[3 * b] + 2, params) for b, a in enumerate(first)]
    input_ids = ints(*[token for a, b in zip(first, second) for token in (0, a, b)])
    logits = torch.stack((P_FIRST.expand(n, V), P_SECOND[first], P_SECOND[second]), 1).view(3 * n, V)
    draft_logits = torch.stack((q_first.expand(n, V), q_second[first]), 1)
    arguments = (logits, input_ids, torch.zeros(n, dtype=torch.int32), params, batch)
    with dispatch.forced("naive"):
        targets = sample.sample(*arguments)
        targets = accept.accept(targets, *arguments, rules(*[REJECTION] * S), None, draft_logits)
    return input_ids.view(n, 3)[:, 1:], verify.naive(targets, input_ids, batch)


def noises(seed: int, position: Tensor) -> Tensor:
    """log E of all tokens at many positions [N], float64 [N, V]."""
    ids = torch.arange(V)
    mix: Any = noise.mix  # also works on int64 tensors
    first, second = noise.keys(seed, position)  # type: ignore[arg-type]
    bits = mix(mix(ids ^ first[:, None]) ^ second[:, None]) & 0x7FFFFFFF  # type: ignore[index]
    return noise.log_exponential(bits.int()).double()


class Streams(NamedTuple):
    draw: Tensor
    acceptance: Tensor
    residual: Tensor


@lru_cache(maxsize=2)
def streams(seed: int, first: int, step: int, n: int = SIZES[1]) -> Streams:
    """The noise of the n positions first, first + step, ..."""
    position = first + step * torch.arange(n)
    return Streams(
        noises(seed, position),
        noises(seed ^ accept.ACCEPTANCE.value, position)[:, 0],
        noises(seed ^ accept.RESIDUAL.value, position),
    )


def reject(p: Tensor, q: Tensor, drawn: Streams) -> tuple[Tensor, Tensor]:
    """Drafts and targets of N positions by rejection sampling, probabilities [N, V] or [V] float64."""
    drafts = (q.log() - drawn.draw).argmax(-1)
    p, q = (x.expand(len(drafts), V) for x in (p, q))
    at = drafts[:, None]
    accepted = (-drawn.acceptance.exp()).exp() * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0]
    residual = ((p - q).clamp(min=0).log() - drawn.residual).argmax(-1)
    return drafts, torch.where(accepted, drafts, residual)


def drawn_from(logits: Tensor, params: Params) -> Tensor:
    """[N, V] float64: what request row 0 draws from."""
    return torch.stack([probabilities.naive(row, 0, params).exp().double() for row in logits.view(-1, V)])


def distance(counts: Tensor, expected: Tensor) -> float:
    """Total variation of counts [A, V] from their expected shares of each row, over what it is by chance:
    about 1 for every number of draws, iff it shrinks like 1 / sqrt(N)."""
    n = counts.sum(-1, keepdim=True)
    chance = (2 / math.pi * n * expected * (1 - expected)).sqrt().sum()
    return float((counts - n * expected).abs().sum() / chance)


def count(first: Tensor, second: Tensor) -> Tensor:
    return torch.bincount(first * V + second, minlength=V * V).view(V, V).double()


def distances(params: Params, seed: int, shared_noise: bool = False) -> Tensor:
    """[what, size]: distances of the first token, of the second where the first draft was accepted, and
    of the bonus after an accepted draft, each with draws of both sizes."""
    p1, q1 = (drawn_from(logits, params)[0] for logits in (P_FIRST, Q_FIRST))
    p2, q2 = (drawn_from(logits, params) for logits in (P_SECOND, Q_SECOND))
    one, two = streams(seed, 0, 2), streams(seed, 1, 2)
    if shared_noise:
        one = one._replace(acceptance=one.draw[:, 0], residual=one.draw)
    d1, t1 = reject(p1, q1, one)
    _, t2 = reject(p2[d1], q2[d1], two)
    bonus = (p2[d1].log() - two.draw).argmax(-1)
    accepted = d1 == t1
    rate, expected = float(accepted.double().mean()), float(torch.minimum(p1, q1).sum())
    if not shared_noise:
        assert abs(rate - expected) < 5 * math.sqrt(expected * (1 - expected) / SIZES[1])
    columns = []
    for size in SIZES:
        parts = []
        for begin in range(0, SIZES[1], size):
            part = slice(begin, begin + size)
            yes, first, second, third = (x[part] for x in (accepted, t1, t2, bonus))
            counts = (count(first[yes], second[yes]), count(first[yes], third[yes]))
            alone = torch.bincount(first, minlength=V).double()[None]
            parts.append([distance(alone, p1[None]), *(distance(c, p2) for c in counts)])
        columns.append(torch.tensor(parts).mean(0))
    return torch.stack(columns, 1)


def test_rejection_keeps_the_distribution() -> None:
    """The distance to the target's distribution falls like 1 / sqrt(N), for first and later tokens."""
    table = torch.stack(
        [distances(make_params(V, **CASES[case]), seed) for seed in SEEDS for case in CASES]
    ).view(len(SEEDS), len(CASES), 3, 2)
    mean = table.mean((0, 1))
    assert bool(((mean > 0.8) & (mean < 1.25)).all()), mean
    ratio = mean[:, 0] / mean[:, 1]  # of total variations: 4 times this
    assert bool(((ratio > 0.75) & (ratio < 1.33)).all()), ratio
    assert bool((table.mean(0) < 1.6).all()), table.mean(0)


def test_shared_noise_would_show() -> None:
    """The test above sees what it is there for: acceptance that depends on the noise of the drafts."""
    biased = distances(make_params(V, temperature=1.0), 1, shared_noise=True)
    assert float(biased[0, 1]) > 10
    assert float(biased[0, 1] / biased[0, 0]) > 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_naive_is_the_rejection_sampling_tested_above(case: str) -> None:
    params, n = make_params(V, seed=5, **CASES[case]), 120
    p1, q1 = (drawn_from(logits, params)[0] for logits in (P_FIRST, Q_FIRST))
    p2, q2 = (drawn_from(logits, params) for logits in (P_SECOND, Q_SECOND))
    drafts, verdict = steps(params, n, Q_FIRST, Q_SECOND)
    d1, t1 = reject(p1, q1, streams(5, 1, 3, n))
    d2, t2 = reject(p2[d1], q2[d1], streams(5, 2, 3, n))
    bonus = (p2[d2].log() - streams(5, 3, 3, n).draw).argmax(-1)
    assert torch.equal(drafts.long(), torch.stack((d1, d2), 1))
    second, third = d1 == t1, (d1 == t1) & (d2 == t2)
    expected = torch.stack((t1, t2.where(second, -1), bonus.where(third, -1)), 1)
    assert torch.equal(verdict.emitted.long(), expected)
    assert bool(third.any())
    assert not bool(second.all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafts_from_the_target_itself_are_all_accepted(case: str) -> None:
    params = make_params(V, **CASES[case])
    assert bool((steps(params, 120, P_FIRST, P_SECOND)[1].num_emitted == 3).all())


def test_kernel_accepts_all_drafts_from_the_target_itself() -> None:
    """Equal logits have equal probabilities to the bit, whatever the batch they are in."""
    Q, size = 6, 3000
    logits = torch.randn(2 * Q, size, generator=torch.Generator().manual_seed(3)) * 2
    params = make_params(size, temperature=[1.0, 0.6, 1.0, 1.0], top_p=[1.0, 0.9, 1.0, 1.0])
    batch = make_rows([Q, Q], [3, 40], True)
    input_ids = torch.zeros(2 * Q, dtype=torch.int32)
    for t in range(2 * Q - 1):
        if t != Q - 1:
            input_ids[t + 1] = draft(logits[t], t // Q, int(batch.positions[t]) + 1, params)
    # Targets that reject everything, so that acceptance must come from the rule.
    targets = torch.full((2 * Q,), size - 1, dtype=torch.int32)
    arguments = (logits, input_ids, ints(0, 1), params, batch, rules(*[REJECTION] * S))
    verdict = verify.naive(
        accept.launch(targets, *arguments, None, logits.view(2, Q, size)[:, :-1]), input_ids, batch
    )
    assert verdict.num_emitted.tolist() == [Q, Q]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_penalties_of_the_draft_count_no_drafts(implementation: str) -> None:
    """The target has penalised the first draft away at the second query, its draft model has not."""
    logits = torch.zeros(3, 4)
    logits[:, 1] = 8.0
    params = make_params(4, temperature=1.0, shaped=True, presence=30.0)
    batch = make_rows([3], [10], True)
    arguments = (logits, ints(0, 1, 1), ints(0), params, batch)
    targets = sample.naive(*arguments)
    targets = IMPLEMENTATIONS[implementation](
        targets, *arguments, rules(*[REJECTION] * S), None, logits[None, :2]
    )
    assert int(targets[0]) == 1  # p = q
    assert int(targets[1]) != 1  # p(1) = 0, q(1) is near 1


def test_rejection_accepts_drafts_that_exact_would_not() -> None:
    """Of drafts drawn with noise of their own, EXACT accepts sum(p q), REJECTION sum(min(p, q))."""
    n = 60
    params = make_params(V, temperature=1.5)
    batch = make_rows([2] * n, [2 * b for b in range(n)], uniform=True)
    drafts = [draft(P_FIRST, 0, 10**6 + b, params) for b in range(n)]
    input_ids = ints(*[token for d in drafts for token in (0, d)])
    arguments = (P_FIRST.repeat(2 * n, 1), input_ids, torch.zeros(n, dtype=torch.int32), params, batch)
    targets = sample.naive(*arguments)
    further = (rules(*[REJECTION] * S), None, P_FIRST.expand(n, 1, V))
    assert int(verify.naive(targets, input_ids, batch).num_emitted.sum()) < 1.5 * n
    assert bool((verify.naive(accept.naive(targets, *arguments, *further), input_ids, batch)[1] == 2).all())


# Typical acceptance.

PEAKED = torch.tensor([0.6, 0.3, 0.07, 0.03]).log()  # H = 0.97 nats: the bound is min(0.09, 0.114)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize(
    ("case", "draft_token", "accepted"),
    [
        ("likely", 1, True),
        ("unlikely", 2, False),
        ("filtered", 1, False),
        ("greedy", 1, False),
        ("flat", 77, True),
        ("bias", 3, True),
    ],
)
def test_typical_accepts(case: str, draft_token: int, accepted: bool, implementation: str) -> None:
    scores = torch.zeros(1000) if case == "flat" else PEAKED  # flat: 0.001 > 0.3 * 0.001
    params = make_params(len(scores), temperature=0.0 if case == "greedy" else 1.0)
    if case == "filtered":
        params.top_p[:] = 0.5
    if case == "bias":
        params.shaped[:] = True
        params.bias[:, 3] = 3.0
    if case == "likely":
        p = PEAKED.exp()
        assert float(p[1]) > min(EPSILON, DELTA * float((p * p.log()).sum().exp())) > float(p[2])
    x = 0  # drawn by the target
    targets = IMPLEMENTATIONS[implementation](
        ints(x, x), scores.expand(2, -1).contiguous(), ints(0, draft_token), ints(0), params,
        make_rows([2], [5], True), rules(*[TYPICAL] * S),
    )  # fmt: skip
    assert targets.tolist() == [draft_token if accepted else x, x]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_typical_takes_the_likeliest_child(implementation: str) -> None:
    """Unless the target has drawn one of them; equals go to the first; leaves keep their target."""
    batch = make_rows([6], [5], True)
    parents = ints(-1, 0, 0, 0, 2, 2)
    batch.ancestors = torch.tensor([0b1, 0b11, 0b101, 0b1001, 0b10101, 0b100101])
    logits = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.3]).log().repeat(6, 1)
    params = make_params(5, temperature=1.0)
    ids = ints(0, 1, 4, 2, 3, 1)  # children of the root: 1, 4, 2; of place 2: 3, 1
    run = IMPLEMENTATIONS[implementation]
    for drawn, expected in (([0] * 6, [4, 0, 1, 0, 0, 0]), ([1, 0, 3, 0, 0, 0], [1, 0, 3, 0, 0, 0])):
        arguments = (ints(*drawn), logits, ids, ints(2), params, batch)
        assert run(*arguments, rules(*[TYPICAL] * S), parents).tolist() == expected
        draft_logits = torch.zeros(1, 5, 5)
        assert run(*arguments, rules(*[REJECTION] * S), parents, draft_logits).tolist() == drawn


@pytest.mark.parametrize("form", ["chain", "tree"])
def test_typical_accepts_all_that_exact_accepts(form: str) -> None:
    more = 0
    for seed in range(30):
        case = random_case(seed, 30, form)
        case["rule"] = rules(*[TYPICAL] * S)
        verdict = (case["input_ids"], case["batch"], case["parents"])
        exact, typical = (verify.naive(x, *verdict) for x in (case["targets"], accept.naive(**case)))
        for b, n in enumerate(exact.num_emitted.tolist()):
            assert typical.path[b, :n].tolist() == exact.path[b, :n].tolist()
            assert typical.emitted[b, : n - 1].tolist() == exact.emitted[b, : n - 1].tolist()
        more += int((typical.num_emitted - exact.num_emitted).sum())
    assert more > 20


def test_typical_changes_the_distribution() -> None:
    """Lossy, and by how much here: every draft above the bound is taken, whatever its probability."""
    n, params = 1500, make_params(V, temperature=1.0)
    p = drawn_from(PEAKED.repeat(3), params)[0]
    logits = p.float().log()
    batch = make_rows([2] * n, [2 * b for b in range(n)], uniform=True)
    generator = torch.Generator().manual_seed(1)
    drafts = torch.multinomial(p, n, replacement=True, generator=generator)  # even those of the target
    input_ids = torch.stack((torch.zeros_like(drafts), drafts), 1).flatten().int()
    arguments = (logits.repeat(2 * n, 1), input_ids, torch.zeros(n, dtype=torch.int32), params, batch)
    targets = accept.naive(sample.naive(*arguments), *arguments, rules(*[TYPICAL] * S))[::2]
    emitted = torch.bincount(targets, minlength=V) / n
    # A draft above the bound is emitted, else the target's own draw.
    bound = min(EPSILON, DELTA * float((p * p.log()).sum().exp()))
    taken = torch.where(p > bound, p, 0.0)
    expected = taken + (1 - taken.sum()) * p
    assert float((emitted - expected).abs().sum()) / 2 < 0.04
    assert 0.04 < float((emitted - p).abs().sum()) / 2 < 0.2


def test_nan_stays_nan_where_shaping_hides_it() -> None:
    """A barred stop token whose logit is NaN: the target says so, and no rule draws another."""
    V = 20
    logits = torch.zeros(2, V)
    logits[0, 3] = math.nan
    params = make_params(V, temperature=1.0, min_len=100, shaped=True)
    params.stop_ids[:, 0] = 3
    batch, ids, rows = make_rows([2], [5], True), ints(1, 2), ints(0)
    given = (logits, ids, rows, params, batch)
    targets = sample.naive(*given)
    assert targets[0] == -1
    for rule in (REJECTION, TYPICAL):
        changed = accept.naive(targets, *given, rules(*[rule] * S), None, torch.zeros(1, 1, V))
        assert changed[0] == -1
