"""Laying a padded step out, and reporting it, against `naive`."""

from __future__ import annotations

import pytest
import torch

from nanospec.kernels import dispatch
from nanospec.kernels.speculation import layout
from nanospec.kernels.speculation.commit import RUNNING, STOPPED
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.verify import Verdict

pytestmark = pytest.mark.usefixtures("poison")


def random_ints(*shape: int, high: int = 1000) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32)


def random_proposal(B: int, k: int, tree: bool = False) -> Proposal:
    parents = None
    if tree:
        parents = torch.stack([random_ints(B, high=place) for place in range(1, k + 1)], 1)
    count, source = random_ints(B, high=k + 1), random_ints(B, k)
    return Proposal(random_ints(B, k), count, source, random_ints(B), random_ints(B), parents)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("B", "k", "block_size"), [(1, 1, 16), (3, 4, 16), (6, 7, 32), (2, 63, 16)])
def test_lay_out_equals_naive(B: int, k: int, block_size: int, tree: bool) -> None:
    torch.manual_seed(B + k)
    S, length, num_blocks = 7, 130 + k, 20
    rows = torch.randperm(S)[:B].int()
    finished = torch.full((S,), RUNNING, dtype=torch.int8)
    if B > 2:
        rows[1], finished[rows[0]] = -1, STOPPED
    proposal = random_proposal(B, k, tree)
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
    if tree:
        assert torch.equal(batch.ancestors, expected[2].ancestors)  # type: ignore[arg-type]
        assert torch.equal(batch.parents, expected[2].parents)  # type: ignore[arg-type]
    for b in range(B):  # of the pages only those that the step reads are copied
        used = -(-int(batch.base_len[b] + batch.q_len[b]) // block_size)
        assert torch.equal(batch.block_table[b, :used], expected[2].block_table[b, :used])


def test_rows_that_take_no_part_have_no_tokens_and_no_slots() -> None:
    proposal = random_proposal(3, 2)
    finished = torch.tensor([RUNNING, STOPPED], dtype=torch.int8)
    tables = (random_ints(2, 40), torch.tensor([5, 9], dtype=torch.int32), finished, random_ints(2, 3))
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    running, _, batch = layout.naive(rows, proposal, *tables, 16, 2)
    assert running.tolist() == [-1, -1, 0]
    assert batch.q_len.tolist()[:2] == [0, 0]
    assert batch.slots[:6].tolist() == [-1] * 6
    assert int(batch.q_len[2]) == int(proposal.num_drafts[2]) + 1


@pytest.mark.parametrize(("B", "Q", "wider"), [(1, 1, 0), (5, 4, 0), (2, 64, 0), (3, 4, 5), (2, 1, 3)])
def test_report_equals_naive(B: int, Q: int, wider: int) -> None:
    torch.manual_seed(Q)
    rows = torch.arange(B, dtype=torch.int32) - 1
    q_len, kept = random_ints(B, high=Q + 1), random_ints(B, high=Q + 1)
    proposal = random_proposal(B, Q - 1 + wider)
    path = torch.stack([torch.randperm(Q).sort().values for _ in range(B)]).int()
    verdict = Verdict(random_ints(B, Q), random_ints(B, high=Q + 1), path)
    finished = torch.randint(0, 4, (B,), dtype=torch.int8)
    expected = layout.report_naive(rows, q_len, proposal, verdict, kept, finished)
    with dispatch.forced("triton"):
        actual = layout.report(rows, q_len, proposal, verdict, kept, finished)
    assert actual.dtype == torch.int32
    assert torch.equal(actual, expected)


def test_a_tree_is_laid_out_by_depth_and_packed_without_its_padding() -> None:
    parents = torch.tensor([[0, 1, 0, 3], [0, 0, 0, 0]], dtype=torch.int32)
    count = torch.tensor([4, 1], dtype=torch.int32)
    drafts = torch.tensor([[11, 12, 13, 14], [21, 0, 0, 0]], dtype=torch.int32)
    proposal = Proposal(drafts, count, drafts, count, count, parents)
    tokens = torch.arange(80, dtype=torch.int32).view(2, 40)
    table = torch.tensor([[3, 5, 7], [2, 4, 6]], dtype=torch.int32)
    tables = (tokens, torch.tensor([15, 9], dtype=torch.int32), torch.zeros(2, dtype=torch.int8), table)
    _, ids, batch = layout.naive(torch.tensor([0, 1], dtype=torch.int32), proposal, *tables, 16, 4)
    ids, batch = layout.pack(ids, batch, 40)
    assert ids.tolist() == [14, 11, 12, 13, 14, 48, 21]
    assert batch.positions.tolist() == [14, 15, 16, 15, 16, 8, 9]
    assert batch.slots.tolist() == [48 + 14, 48 + 15, 80, 81, 82, 32 + 8, 32 + 9]
    assert batch.ancestors is not None
    assert batch.parents is not None
    assert batch.ancestors.tolist() == [0b1, 0b11, 0b111, 0b1001, 0b11001, 0b1, 0b11]
    assert batch.parents.tolist() == [0, 0, 1, 0, 3, 0, 0]
    assert batch.q_start.tolist() == [0, 5]
    assert (batch.max_q_len, batch.max_kv_len, batch.uniform) == (5, 40, False)


def test_the_source_of_a_token_is_that_of_the_draft_on_the_path() -> None:
    source = torch.tensor([[70, 80, 90, 60]], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    verdict = Verdict(torch.tensor([[5, 6, 7]]).int(), one * 3, torch.tensor([[0, 3, 4]]).int())
    proposal = Proposal(source, one, source, one, one)
    running = torch.zeros(1, dtype=torch.int8)
    table = layout.report_naive(one * 0, one * 5, proposal, verdict, one * 3, running)
    assert table[0, layout.NUM_COLUMNS :].tolist() == [5, 6, 7, 90, 60, -1]
