"""The report of a step, against `naive`, by hand, and there and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanospec.kernels.codes import NOBODY, OWN, RUNNING, STOPPED
from nanospec.kernels.speculation import report
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.report import RowReport
from nanospec.kernels.speculation.verify import Verdict
from tests.kernels.batches import ints, make_batch, make_table

pytestmark = pytest.mark.usefixtures("poison")
IMPLEMENTATIONS = {"naive": report.naive, "kernel": report.launch}


def random_ints(*shape: int, high: int = 1000) -> Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32)


@pytest.mark.parametrize(("B", "Q", "wider"), [(1, 1, 0), (5, 4, 0), (2, 64, 0), (3, 4, 5), (2, 1, 3)])
def test_kernel_equals_naive(B: int, Q: int, wider: int) -> None:
    torch.manual_seed(Q)
    k = Q - 1 + wider
    table = make_table(9, num_rows=B, finished=random_ints(B, high=4))
    q_len = [Q, *random_ints(B - 1, high=Q + 1).tolist()]
    batch = make_batch(q_len, rows=torch.arange(B, dtype=torch.int32) - 1)
    proposal = Proposal(random_ints(B, k), random_ints(B), random_ints(B, k), random_ints(B), random_ints(B))
    path = torch.stack([torch.randperm(Q).sort().values for _ in range(B)]).int()
    verdict = Verdict(random_ints(B, Q), random_ints(B, high=Q + 1), path, random_ints(B, high=Q + 1))
    expected, actual = (run(batch, proposal, verdict, table) for run in IMPLEMENTATIONS.values())
    assert actual.dtype == torch.int32
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_gives_back_what_was_reported(implementation: str) -> None:
    """Two rows with trees of 4 drafts, of which 2 were accepted on the path 0, 3, 4, the last token of one
    being cut; one that drafted nothing; one that took no part."""
    batch = make_batch([5, 5, 1, 0], rows=ints(1, 2, 0, -1))
    source = torch.tensor([[70, 80, 90, 60]] * 2 + [[-1] * 4] * 2).int()
    proposal = Proposal(source, ints(4, 4, 0, 0), source, ints(3, 2, 0, 0), ints(1, 0, NOBODY, NOBODY))
    emitted = torch.tensor([[5, 6, 7, -1, -1]] * 2 + [[8, -1, -1, -1, -1], [-1] * 5]).int()
    path = torch.tensor([[0, 3, 4, 0, 0]] * 2 + [[0] * 5] * 2).int()
    verdict = Verdict(emitted, ints(3, 3, 1, 0), path, ints(3, 2, 1, 0))
    table = make_table(9, num_rows=3, finished=[RUNNING, RUNNING, STOPPED])
    lines = IMPLEMENTATIONS[implementation](batch, proposal, verdict, table).tolist()
    # The token drawn at one place of the path was drafted as the next.
    assert report.decode(lines) == [
        RowReport([5, 6, 7], 4, 2, 1, 3, RUNNING, [90, 60, OWN]),
        RowReport([5, 6], 4, 2, 0, 2, STOPPED, [90, 60]),
        RowReport([8], 0, 0, NOBODY, 0, RUNNING, [OWN]),
        RowReport([], 0, 0, NOBODY, 0, RUNNING, []),
    ]
