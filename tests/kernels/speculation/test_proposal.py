"""Laying out steps: comparison with `naive`, and examples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels import STOPPED
from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import forced
from nanospec.kernels.speculation import proposal as module
from nanospec.kernels.speculation.proposal import Proposal, lay_out_text, merge, naive, parents_of
from tests.kernels.batches import compiled, ints, make_table

pytestmark = pytest.mark.usefixtures("poison")

LEAST, MOST = -(2**31), 2**31 - 1
IMPLEMENTATIONS = {"naive": naive, **compiled(native=module.native), "kernel": module.launch}


def random_ints(*shape: int, high: int = 1000) -> Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32)


def random_proposal(B: int, k: int, tree: bool = False) -> Proposal:
    parents = None
    if tree:
        parents = torch.stack([random_ints(B, high=place) for place in range(1, k + 1)], 1)
    count, source = random_ints(B, high=k + 1), random_ints(B, k)
    return Proposal(random_ints(B, k), count, source, random_ints(B), random_ints(B), parents)


def assert_same(actual: Batch, expected: Batch, block_size: int = 16) -> None:
    """Compare batches. Of block tables, compare only the entries that the step reads."""
    assert (actual.max_q_len, actual.max_kv_len) == (expected.max_q_len, expected.max_kv_len)
    for name, own, other in zip(actual.tensors._fields, actual.tensors, expected.tensors):
        if name == "block_table":
            for b, pages in enumerate((-(-(actual.base_len + actual.q_len) // block_size)).tolist()):
                assert torch.equal(own[b, :pages], other[b, :pages])
        elif isinstance(own, Tensor):
            assert torch.equal(own, other), name
            assert own.dtype == other.dtype == (torch.int64 if name == "ancestors" else torch.int32)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS][1:])
@pytest.mark.parametrize(("B", "k", "size", "tree"), [(1, 1, 16, False), (6, 7, 32, True), (2, 63, 16, True)])
def test_lay_out_matches_naive(B: int, k: int, size: int, tree: bool, implementation: str) -> None:
    torch.manual_seed(B + k)
    S, length = 7, 130 + k
    # Lengths around block boundaries, the shortest and the longest
    lengths = torch.tensor([1, size, size + 1, max(size - k // 2, 1), 129, 65, 128])
    pages = random_ints(S, -(-length // size))
    texts: dict[str, Any] = {"tokens": random_ints(S, length), "num_tokens": lengths, "block_table": pages}
    table = make_table(1000, block_size=size, **texts)
    rows, proposal = torch.randperm(S)[:B].int(), random_proposal(B, k, tree)
    if B == 6:
        rows[1], table.finished[rows[0]] = -1, STOPPED
        table.max_len[rows[3]] = table.num_tokens[rows[3]] + 3
        proposal.num_drafts[2:] = ints(-5, k, 1000, k)  # as from a faulty custom drafter
        proposal.drafts[4, 2], proposal.drafts[5, 4] = 1000, -1
    expected = naive(table, rows, proposal)
    batch = IMPLEMENTATIONS[implementation](table, rows, proposal)
    assert (batch.max_q_len, batch.max_kv_len) == (k + 1, length)
    assert_same(batch, expected, size)
    if implementation == "native":
        assert_same(module.native(table, rows, proposal, packed=True), expected.to_packed(), size)
    assert (batch.parents is not None) == (batch.ancestors is not None) == tree


def test_block_table_longer_than_one_program_copies() -> None:
    length, tokens, pages_of = 16 * 1024 + 3, random_ints(2, 16 * 1100), random_ints(2, 1100)
    table = make_table(1000, tokens=tokens, num_tokens=[length, 5], max_len=length + 5, block_table=pages_of)
    proposal = random_proposal(2, 4)._replace(num_drafts=ints(4, 4))
    batch = module.launch(table, ints(0, 1), proposal)
    assert torch.equal(batch.block_table[0, :1025], table.block_table[0, :1025])
    assert torch.equal(batch.block_table[1, :1], table.block_table[1, :1])


@pytest.mark.parametrize(("B", "width", "bound"), [(1, 1, None), (5, 3, 131), (3, 66, None)])
def test_lay_out_text_matches_from_grid(B: int, width: int, bound: int | None) -> None:
    torch.manual_seed(B + width)
    S, length = 7, 132
    table = make_table(1000, tokens=random_ints(S, length), block_table=random_ints(S, -(-length // 16)))
    rows, first = torch.randperm(S)[:B].int(), random_ints(B, high=length - width)
    count = random_ints(B, high=width + 1)
    if B > 2:
        rows[1], count[0], count[2] = -1, 0, width
    given = table, rows, first, count, width, bound
    with forced("triton"):
        batch = lay_out_text(*given)
    assert (batch.max_q_len, batch.max_kv_len) == (width, bound or length)
    assert_same(batch, Batch.from_grid(*given))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_invalid_drafts_are_dropped(implementation: str, tree: bool) -> None:
    """A custom drafter may return any integers, which must not become addresses."""
    table = make_table(100, tokens=random_ints(12, 40, high=100), block_table=random_ints(12, 3, high=9))
    table.num_tokens[:], table.max_len[:] = 5, 40
    table.max_len[:3] = ints(5, 6, 8)  # full, only the target's token fits, two drafts fit
    drafts, parents = torch.full((12, 4), 99, dtype=torch.int32), ints(0, 1, 2, 3).repeat(12, 1)
    drafts[:, 1] = 0
    drafts[3, 2], drafts[4, 0], drafts[5, 3] = 100, -1, MOST
    for row, (place, parent) in enumerate([(0, 1), (1, 2), (2, -5), (3, MOST), (1, LEAST), (2, 10**6)], 6):
        parents[row, place] = parent
    count, tree_parents = torch.full((12,), 4, dtype=torch.int32), parents if tree else None
    given = Proposal(drafts, count, drafts, count, count, tree_parents)
    batch = IMPLEMENTATIONS[implementation](table, torch.arange(12, dtype=torch.int32), given)
    assert batch.q_len.tolist() == [1, 1, 3, 3, 1, 4, *((1, 2, 3, 4, 2, 3) if tree else [5] * 6)]
    assert int(batch.input_ids.max()) < 100
    assert int(batch.input_ids.min()) >= 0
    if batch.parents is not None:
        assert (int(batch.parents.min()), int(batch.parents.max())) == (0, 2)


def test_merge_of_chain_and_tree() -> None:
    chain, tree = random_proposal(2, 3), random_proposal(2, 3, tree=True)
    merged = merge(ints(1, 0).bool(), chain, tree)
    assert merged.drafts.tolist() == [chain.drafts[0].tolist(), tree.drafts[1].tolist()]
    assert parents_of(merged).tolist() == [[0, 1, 2], parents_of(tree)[1].tolist()]
