"""Typical acceptance follows its definition, and other rows keep their targets."""

import math
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nanospec.kernels import launch
from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling import sample, typical
from nanospec.kernels.sampling.typical import DELTA, EPSILON
from nanospec.kernels.speculation import verify
from nanospec.kernels.table import Table
from tests.kernels.batches import ints, make_batch, make_table, proposal_of, random_logits, random_table, real

pytestmark = pytest.mark.usefixtures("poison")

IMPLEMENTATIONS = {"naive": typical.naive, "kernel": typical.launch}


class Case(NamedTuple):
    targets: Tensor
    logits: Tensor
    table: Table
    batch: Batch


def random_case(seed: int, V: int, form: str, dtype: torch.dtype = torch.float32) -> Case:
    """Return rows with and without typical acceptance, including greedy and padding rows."""
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
    table.typical[:] = torch.tensor(rng.sample([False, True, True, True], S))
    logits = random_logits(rng, batch.num_tokens, V, dtype)
    likely = logits.float().topk(3).indices
    drafts = likely.gather(1, torch.randint(0, 3, (batch.num_tokens, 1), generator=generator))[:, 0]
    batch.input_ids[1:] = drafts[:-1]  # in a chain, among the most likely tokens
    if form == "nan":
        logits[int(batch.q_start[rows.index(0)]), V // 2] = math.nan
        logits[int(batch.q_start[rows.index(1)]) + 1, 0] = math.inf
    return Case(sample.naive(logits, table, batch), logits, table, batch)


def check_unchanged_rows(case: Case, targets: Tensor) -> None:
    """Check greedy rows and rows without typical acceptance."""
    applies = (case.table.typical & (case.table.temperature > 0)).tolist()
    for b, s in enumerate(case.batch.rows.tolist()):
        if not applies[s]:
            assert torch.equal(targets[real(case.batch, b)], case.targets[real(case.batch, b)])


def verified(targets: Tensor, batch: Batch) -> verify.Verdict:
    """Return the verdict on targets, for requests without limits."""
    return verify.naive(targets, batch, make_table(5000, max_len=0), proposal_of(batch))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chain", "packed", "tree", "nan"])
def test_kernel_and_lazy_walk_match_naive(form: str) -> None:
    """The lazy walk draws targets that a lazy `sample` skipped, if further drafts are accepted."""
    changed = further = 0
    for seed, V in enumerate((63, 100, 40, 40, 40, 40, 40, 40)):
        case = random_case(seed, V, form, torch.float16 if V == 100 else torch.float32)
        before, tokens = case.targets.clone(), real(case.batch)
        expected = typical.naive(*case)
        check_unchanged_rows(case, expected)
        changed += int((expected[tokens] != before[tokens]).sum())
        if V == 63 or (V == 100 and form in ("chain", "tree")):
            actual = typical.launch(*case)
            assert actual.dtype == torch.int32
            assert actual[tokens].tolist() == expected[tokens].tolist(), f"V{V}"
        assert torch.equal(case.targets, before)
        lazy = sample.naive(case.logits, case.table, case.batch, lazy=True)
        with launch.forced("naive"):
            walked = verified(typical.accept_typical(*case._replace(targets=lazy)), case.batch)
        verdict = verified(expected, case.batch)
        assert all(map(torch.equal, walked, verdict))
        further += int((verdict.num_emitted > verified(lazy, case.batch).num_emitted).sum())
    assert changed >= 3, changed
    assert further >= 2, further


@pytest.mark.slow
def test_kernel_with_several_tiles_of_the_vocabulary() -> None:
    for seed in range(2):
        case = random_case(seed, 5000, "chain")
        case = case._replace(batch=replace(case.batch, q_len=case.batch.q_len.clamp(max=2)))
        tokens, expected = real(case.batch), typical.naive(*case)
        assert torch.equal(typical.launch(*case)[tokens], expected[tokens])
        assert not torch.equal(case.targets[tokens], expected[tokens])


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
        table = make_table(len(scores), typical=True, **{"temperature": 1.0, **columns})
        batch = make_batch([2], [5], input_ids=ints(0, draft_token))
        targets = run(ints(x, x), scores.repeat(2, 1), table, batch)
        assert targets.tolist() == [draft_token if accepted else x, x], name
    # In a tree, the likeliest child is accepted, unless the target drew one; ties go to the first child, and
    # leaves keep their target.
    ids = ints(0, 1, 4, 2, 3, 1)  # children of the root: 1, 4, 2; of node 2: 3, 1
    batch = make_batch([6], [5], parents=[0, 0, 0, 0, 2, 2], rows=ints(2), input_ids=ids)
    logits = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.3]).log().repeat(6, 1)
    for own, expected in (([0] * 6, [4, 0, 1, 0, 0, 0]), ([1, 0, 3, 0, 0, 0], [1, 0, 3, 0, 0, 0])):
        table = make_table(5, temperature=1.0, typical=True)
        assert run(ints(*own), logits, table, batch).tolist() == expected


def test_log_probs_at_low_temperature() -> None:
    """Dividing before subtracting the maximum would overflow to infinity - infinity = NaN."""
    table = make_table(3, temperature=1e-4)
    log_p = typical.log_probs(torch.tensor([3e38, 3e38, -3e38]), 0, table)
    assert log_p.tolist() == [pytest.approx(-math.log(2)), pytest.approx(-math.log(2)), -math.inf]
