"""Laying a padded step out, and reporting it, against `naive`."""

from __future__ import annotations

import pytest
import torch

from nanospec.kernels import dispatch, layout
from nanospec.kernels.commit import RUNNING, STOPPED
from nanospec.kernels.ngram import Proposal
from nanospec.kernels.verify import Verdict

pytestmark = pytest.mark.usefixtures("poison")


def random_ints(*shape: int, high: int = 1000) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32)


@pytest.mark.parametrize(("B", "k", "block_size"), [(1, 0, 16), (3, 4, 16), (6, 7, 32), (2, 63, 16)])
def test_lay_out_equals_naive(B: int, k: int, block_size: int) -> None:
    torch.manual_seed(B + k)
    S, length, num_blocks = 7, 130 + k, 20
    rows = torch.randperm(S)[:B].int()
    finished = torch.full((S,), RUNNING, dtype=torch.int8)
    if B > 2:
        rows[1], finished[rows[0]] = -1, STOPPED
    proposal = Proposal(random_ints(B, k), random_ints(B, high=k + 1), random_ints(B), random_ints(B))
    # Lengths around page boundaries, the shortest and the longest
    num_tokens = torch.tensor([1, block_size, block_size + 1, block_size - k // 2, 129, 65, 128])
    args = (random_ints(S, length), num_tokens.clamp(min=1).int(), finished, random_ints(S, num_blocks))
    expected = layout.naive(rows, proposal, *args, block_size, k)
    with dispatch.forced("triton"):
        running, input_ids, batch = layout.lay_out(rows, proposal, *args, block_size, k)
    assert torch.equal(running, expected[0])
    assert torch.equal(input_ids, expected[1])
    assert (batch.max_q_len, batch.max_kv_len) == (k + 1, length)
    for name in ("positions", "slots", "q_start", "q_len", "base_len"):
        assert torch.equal(getattr(batch, name), getattr(expected[2], name)), name
        assert getattr(batch, name).dtype == torch.int32
    for b in range(B):  # of the pages only those that the step reads are copied
        used = -(-int(batch.base_len[b] + batch.q_len[b]) // block_size)
        assert torch.equal(batch.block_table[b, :used], expected[2].block_table[b, :used])


def test_rows_that_take_no_part_have_no_tokens_and_no_slots() -> None:
    proposal = Proposal(random_ints(3, 2), random_ints(3, high=3), random_ints(3), random_ints(3))
    finished = torch.tensor([RUNNING, STOPPED], dtype=torch.int8)
    tables = (random_ints(2, 40), torch.tensor([5, 9], dtype=torch.int32), finished, random_ints(2, 3))
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    running, _, batch = layout.naive(rows, proposal, *tables, 16, 2)
    assert running.tolist() == [-1, -1, 0]
    assert batch.q_len.tolist()[:2] == [0, 0]
    assert batch.slots[:6].tolist() == [-1] * 6
    assert int(batch.q_len[2]) == int(proposal.num_drafts[2]) + 1


@pytest.mark.parametrize(("B", "Q"), [(1, 1), (5, 4), (2, 64)])
def test_report_equals_naive(B: int, Q: int) -> None:
    torch.manual_seed(Q)
    rows = torch.arange(B, dtype=torch.int32) - 1
    q_len, kept = random_ints(B, high=Q + 1), random_ints(B, high=Q + 1)
    proposal = Proposal(random_ints(B, Q - 1), q_len, random_ints(B), random_ints(B))
    verdict = Verdict(random_ints(B, Q), random_ints(B, high=Q + 1), random_ints(B, Q))
    finished = torch.randint(0, 4, (B,), dtype=torch.int8)
    expected = layout.report_naive(rows, q_len, proposal, verdict, kept, finished)
    with dispatch.forced("triton"):
        actual = layout.report(rows, q_len, proposal, verdict, kept, finished)
    assert actual.dtype == torch.int32
    assert torch.equal(actual, expected)
