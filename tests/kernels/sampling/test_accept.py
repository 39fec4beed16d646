"""Acceptance rules: rejection sampling keeps the distribution, typical acceptance follows its definition, and
exact rows keep their targets."""

import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nanospec.kernels import EXACT, REJECTION, TYPICAL, launch
from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling import accept, noise, sample
from nanospec.kernels.sampling.accept import DELTA, EPSILON
from nanospec.kernels.sampling.scores import penalize
from nanospec.kernels.speculation import verify
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from tests.kernels.batches import ints, make_batch, make_table, proposal_of, random_logits, random_table, real

pytestmark = pytest.mark.usefixtures("poison")

IMPLEMENTATIONS = {"naive": accept.naive, "kernel": accept.launch}


def drawn(logits: Tensor | None = None, sampled: Tensor | None = None) -> Proposal:
    """Return a proposal with only the fields `accept` reads: the logits drafts were drawn from."""
    none = ints()
    return Proposal(none, none, none, none, none, logits=logits, sampled=sampled)


def draft(scores: Tensor, s: int, position: int, table: Table) -> int:
    """Sample a draft from a draft model's logits [V] with the request's noise at the position."""
    scores = scores.float()
    if table.penalized[s]:
        scores = penalize(scores, s, position, (), table)
    return max(int(sample.draw(scores, s, position, table)), 0)


class Case(NamedTuple):
    targets: Tensor
    logits: Tensor
    table: Table
    batch: Batch
    proposal: Proposal


def random_case(seed: int, V: int, form: str, dtype: torch.dtype = torch.float32) -> Case:
    """Return rows with every rule, including greedy and padding rows."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = rng.sample([0, 1, 2, 3, -1], 5)
    q_len = [n if s >= 0 else 0 for n, s in zip([4, 2, 3, 5, 3], rows)]
    base_len = [rng.randint(0, 20) for _ in rows]
    batch = make_batch(q_len, base_len, form != "packed", form == "tree", rows=ints(*rows))
    table, S = random_table(rng, V), 4
    table.temperature[:] = torch.tensor(rng.sample([0.0, 0.5, 1.0, 1.0, 1.7], S))
    table.top_k[:] = torch.tensor(rng.choices([0, 0, V // 2, 5], k=S))
    table.min_p[:] = torch.tensor(rng.choices([0.0, 0.0, 0.05], k=S))
    logits = random_logits(rng, batch.num_tokens, V, dtype)
    input_ids = batch.input_ids.random_(0, V, generator=generator)
    K = 3  # fewer than the longest row's drafts, more than the others'
    draft_logits = torch.zeros(5, K + 1, V, dtype=dtype)[:, :K]  # evenly spaced, not contiguous
    for b, (s, start, n) in enumerate(zip(rows, batch.q_start.tolist(), q_len)):
        for j in range(min(n - 1, K)):
            # Some are close to the target's logits; likely drafts are never impossible for the target.
            away = torch.randn(V, generator=generator) * rng.choice([0.0, 0.5, 2.0])
            draft_logits[b, j] = logits[start + j] + away.to(dtype)
            position = base_len[b] + j + 1
            position += rng.choice([0, 0, 1000])  # the target's noise or other noise
            input_ids[start + j + 1] = draft(draft_logits[b, j], s, position, table)
    if form == "nan":
        logits[int(batch.q_start[rows.index(0)]), V // 2] = math.nan
        logits[int(batch.q_start[rows.index(1)]) + 1, 0] = math.inf
        draft_logits[rows.index(2), 0, 0] = math.nan
        draft_logits[rows.index(3), 0] = -math.inf
    sampled = None if seed % 2 else torch.tensor(rng.sample([True, True, True, True, False], 5))
    if batch.parents is not None and sampled is not None:  # next to trees, chains may have been sampled
        for b, n in enumerate(q_len):
            sampled[b] = batch.parents[real(batch, b)].tolist() == [0, *range(n - 1)][:n]
    table.rule[:] = torch.tensor(rng.sample([EXACT, REJECTION, TYPICAL, REJECTION, TYPICAL], S))
    proposal = drawn(None if form == "ngram" else draft_logits, sampled)
    return Case(sample.naive(logits, table, batch), logits, table, batch, proposal)


def check_unchanged_rows(case: Case, targets: Tensor) -> None:
    """Check rows without a rule, and REJECTION rows with drafts that were not sampled."""
    rule, sampled = case.table.rule.masked_fill(case.table.temperature == 0, EXACT), case.proposal.sampled
    for b, s in enumerate(case.batch.rows.tolist()):
        no_q = case.proposal.logits is None
        no_q |= case.batch.parents is not None if sampled is None else not sampled[b]
        if rule[s] == EXACT or (rule[s] == REJECTION and no_q):
            assert torch.equal(targets[real(case.batch, b)], case.targets[real(case.batch, b)])


def verified(targets: Tensor, batch: Batch) -> verify.Verdict:
    """Return the verdict on targets, for requests without limits."""
    return verify.naive(targets, batch, make_table(5000, max_len=0), proposal_of(batch))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chain", "packed", "tree", "nan", "ngram"])
def test_kernel_and_lazy_walk_match_naive(form: str) -> None:
    """The lazy walk draws targets that a lazy `sample` skipped, if another rule accepts further drafts."""
    changed = further = 0
    for seed, V in enumerate((63, 100, 40, 40, 40, 40, 40, 40)):
        case = random_case(seed, V, form, torch.float16 if V == 100 else torch.float32)
        before, tokens = case.targets.clone(), real(case.batch)
        expected = accept.naive(*case)
        check_unchanged_rows(case, expected)
        changed += int((expected[tokens] != before[tokens]).sum())
        if V == 63 or (V == 100 and form in ("chain", "tree")):
            actual = accept.launch(*case)
            assert actual.dtype == torch.int32
            assert actual[tokens].tolist() == expected[tokens].tolist(), f"V{V}"
        assert torch.equal(case.targets, before)
        lazy = sample.naive(case.logits, case.table, case.batch, lazy=True)
        with launch.forced("naive"):
            walked = verified(accept.accept(*case._replace(targets=lazy)), case.batch)
        verdict = verified(expected, case.batch)
        assert all(map(torch.equal, walked, verdict))
        further += int((verdict.num_emitted > verified(lazy, case.batch).num_emitted).sum())
    assert changed >= 3, changed
    assert further >= 2, further


@pytest.mark.slow
def test_kernel_with_several_tiles_of_the_vocabulary() -> None:
    for seed in (49, 55):  # changes targets by a residual draw and by typical acceptance
        case = random_case(seed, 5000, "chain")
        case = case._replace(batch=replace(case.batch, q_len=case.batch.q_len.clamp(max=2)))
        tokens, expected = real(case.batch), accept.naive(*case)
        assert torch.equal(accept.launch(*case)[tokens], expected[tokens])
        assert not torch.equal(case.targets[tokens], expected[tokens])


LIMITS: dict[str, Any] = {  # by request row
    "temperature": [0.5, 1.0, 1.0, 1.5, 0.5],
    "top_k": [0, 0, 5, 0, 7],
    "top_p": [1.0, 1.0, 1.0, 0.8, 0.9],
}


def test_rejection_sampling_matches_definition() -> None:
    """A draft is accepted with probability min(1, p / q), else replaced by a sample of max(p - q, 0)."""
    n, V, seed = 300, 12, 5
    generator = torch.Generator().manual_seed(8)
    p_logits, q_logits = torch.randn(2, n, V, generator=generator) * 1.5
    q_logits += p_logits
    table, positions = make_table(V, num_rows=5, seed=seed, rule=REJECTION, **LIMITS), 3 * torch.arange(n) + 1
    rows = (torch.arange(n) % 5).int()
    p, q = (
        torch.stack([accept.log_probs(x, s, table).exp().double() for x, s in zip(logits, rows.tolist())])
        for logits in (p_logits, q_logits)
    )
    streams = torch.tensor([seed, seed ^ accept.ACCEPTANCE.value, seed ^ accept.RESIDUAL.value])[:, None]
    draw, acceptance, residual = noise.naive(streams, positions, torch.arange(V)).double()  # [n, V] each
    drafts = (q.log() - draw).argmax(-1)
    at = drafts[:, None]
    accepted = ((-acceptance[:, :1].exp()).exp() * q.gather(1, at) < p.gather(1, at))[:, 0]
    expected = torch.where(accepted, drafts, ((p - q).clamp(min=0).log() - residual).argmax(-1))

    own = [draft(q_logits[b], int(s), int(positions[b]), table) for b, s in enumerate(rows)]
    assert own == drafts.tolist()
    ids = torch.stack((torch.zeros(n), drafts), 1).int().flatten()
    batch = make_batch([2] * n, (positions - 1).tolist(), rows=rows, input_ids=ids)
    logits = torch.stack((p_logits, p_logits), 1).flatten(0, 1)
    targets = sample.naive(logits, table, batch)
    targets = accept.naive(targets, logits, table, batch, drawn(q_logits[:, None]))
    assert targets.view(n, 2)[:, 0].tolist() == expected.tolist()
    assert 0 < int(accepted.sum()) < n


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_penalties_and_masks_of_draft_model(implementation: str) -> None:
    run = IMPLEMENTATIONS[implementation]
    # The target penalizes the first draft at the second query; the draft model does not.
    logits = torch.zeros(3, 4)
    logits[:, 1] = 8.0
    table = make_table(4, rule=REJECTION, temperature=1.0, penalized=True, presence=30.0)
    batch = make_batch([3], [10], input_ids=ints(0, 1, 1))
    targets = sample.naive(logits, table, batch)
    first, second, _ = run(targets, logits, table, batch, drawn(logits[None, :2])).tolist()
    assert first == 1  # p = q
    assert second != 1  # p(1) = 0, q(1) is near 1
    # Both agree at all positions, although stop tokens are allowed from the third on.
    logits = torch.zeros(6, 20)
    logits[:, 7] = 6.0
    table = make_table(20, temperature=1.0, rule=REJECTION, penalized=True, min_len=13)
    table.stop_ids[:, -1] = 7
    batch = make_batch([6], [10], input_ids=ints(0, 1, 2, 3, 4, 5))  # equally likely at all positions
    targets = sample.naive(logits, table, batch)
    assert targets.tolist()[:2] != [7, 7]
    targets = run(targets, logits, table, batch, drawn(logits[None, :5]))
    assert targets.tolist()[:5] == [1, 2, 3, 4, 5]


PEAKED = torch.tensor([0.6, 0.3, 0.07, 0.03]).log()  # H = 0.97 nats: the bound is min(0.09, 0.114)
BETWEEN = torch.tensor([0.6, 0.27, 0.1, 0.03]).log()  # H = 1.00: min(0.09, 0.111), and 0.1 between
SPREAD = torch.tensor([0.4, 0.2, 0.2, 0.114, 0.079, 0.007]).log()  # H = 1.49: min(0.09, 0.067), 0.079 between
TYPICAL_CASES: list[tuple[str, Tensor, dict[str, Any], int, bool]] = [  # scores, columns, draft, accepted
    ("unlikely", PEAKED, {}, 2, False),
    ("epsilon binds", BETWEEN, {}, 2, True),
    ("delta binds", SPREAD, {}, 4, True),
    ("below delta", SPREAD, {}, 5, False),
    ("outside top-p", PEAKED, {"top_p": 0.5}, 1, False),
    ("greedy", PEAKED, {"temperature": 0.0}, 1, False),
    ("bias", PEAKED, {"penalized": True, "bias": torch.tensor([0.0, 0.0, 0.0, 3.0])}, 3, True),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_typical_acceptance(implementation: str) -> None:
    assert (EPSILON, DELTA) == (0.09, 0.3)  # as in Medusa's reference code
    run, x = IMPLEMENTATIONS[implementation], 0  # drawn by the target
    for name, scores, columns, draft_token, accepted in TYPICAL_CASES:
        table = make_table(len(scores), rule=TYPICAL, **{"temperature": 1.0, **columns})
        batch = make_batch([2], [5], input_ids=ints(0, draft_token))
        targets = run(ints(x, x), scores.repeat(2, 1), table, batch, drawn())
        assert targets.tolist() == [draft_token if accepted else x, x], name
    # In a tree, the likeliest child is accepted, unless the target drew one; ties go to the first child, and
    # leaves keep their target. Drafts of a tree are not drawn from the logits, so REJECTION changes nothing.
    ids = ints(0, 1, 4, 2, 3, 1)  # children of the root: 1, 4, 2; of node 2: 3, 1
    batch = make_batch([6], [5], parents=[0, 0, 0, 0, 2, 2], rows=ints(2), input_ids=ids)
    logits = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.3]).log().repeat(6, 1)
    for own, expected in (([0] * 6, [4, 0, 1, 0, 0, 0]), ([1, 0, 3, 0, 0, 0], [1, 0, 3, 0, 0, 0])):
        table = make_table(5, temperature=1.0, rule=TYPICAL)
        assert run(ints(*own), logits, table, batch, drawn()).tolist() == expected
        table.rule[:] = REJECTION
        assert run(ints(*own), logits, table, batch, drawn(torch.zeros(1, 5, 5))).tolist() == own


def test_log_probs_at_low_temperature() -> None:
    """Dividing before subtracting the maximum would overflow to infinity - infinity = NaN."""
    table = make_table(3, temperature=1e-4)
    log_p = accept.log_probs(torch.tensor([3e38, 3e38, -3e38]), 0, table)
    assert log_p.tolist() == [pytest.approx(-math.log(2)), pytest.approx(-math.log(2)), -math.inf]
