"""Laying out steps and the passes of draft models: comparison with `naive`, and examples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import forced
from nanospec.kernels.speculation import layout
from nanospec.kernels.speculation.layout import naive
from nanospec.kernels.speculation.proposal import Proposal, merge, parents_of
from tests.kernels.batches import compiled, ints, make_table

pytestmark = pytest.mark.usefixtures("poison")


def random_ints(*shape: int, high: int = 1000) -> Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32)


def random_parents(B: int, k: int) -> Tensor:
    return torch.stack([random_ints(B, high=place) for place in range(1, k + 1)], 1)


def assert_same(batch: Batch, expected: Batch, block_size: int = 16) -> None:
    """Compare batches. Of block tables, compare only the entries that the step reads."""
    for name, own, other in zip(batch.tensors._fields, batch.tensors, expected.tensors):
        if name == "block_table":
            for b, pages in enumerate((-(-(batch.base_len + batch.q_len) // block_size)).tolist()):
                assert torch.equal(own[b, :pages], other[b, :pages])
        elif isinstance(own, Tensor):
            assert torch.equal(own[: len(other)], other), name
            assert own.dtype == other.dtype == (torch.int64 if name == "ancestors" else torch.int32)


@pytest.mark.parametrize("kind", ["text", "chain", "tree"])
@pytest.mark.parametrize(("B", "k", "size"), [(1, 1, 16), (6, 7, 32), (2, 63, 16)])
def test_lay_out_matches_naive(B: int, k: int, size: int, kind: str) -> None:
    """The kernel has room for all drafts, and marks unused tokens; the others have the size of the tokens."""
    torch.manual_seed(B + k)
    S, length = 7, 130 + k
    # Lengths around block boundaries, the shortest and the longest
    lengths = torch.tensor([1, size, size + 1, max(size - k // 2, 1), 129, 65, 128])
    pages = random_ints(S, -(-length // size))
    texts: dict[str, Any] = {"tokens": random_ints(S, length), "num_tokens": lengths, "block_table": pages}
    table = make_table(1000, block_size=size, **texts)
    rows, q_len = torch.randperm(S)[:B].int(), random_ints(B, high=k + 1) + 1
    first = table.num_tokens[rows] - 1
    if kind == "text":
        first = (first - k).clamp(min=0)
    if B == 6:
        rows[1], q_len[1], q_len[3], q_len[5] = -1, 0, 0, k + 1
    given = table, rows, first, q_len
    drafts = None if kind == "text" else random_ints(B, k)
    parents = random_parents(B, k) if kind == "tree" else None
    with forced("naive"):
        expected = layout.lay_out(*given, k + 1, drafts, parents)
    assert expected.num_tokens == int(q_len.sum())
    assert expected.row_of_token.tolist() == torch.repeat_interleave(q_len).tolist()
    assert (expected.max_q_len, expected.max_kv_len) == (int(q_len.max()), int((first + q_len).max()))
    for function in compiled(native=layout.native).values():
        assert_same(own := function(*given, drafts, parents), expected, size)
        assert (own.max_q_len, own.max_kv_len) == (expected.max_q_len, expected.max_kv_len)
    batch, T = layout.launch(*given, k + 1, drafts, parents), expected.num_tokens
    assert_same(batch, expected, size)
    assert (batch.max_q_len, batch.max_kv_len, batch.num_tokens) == (k + 1, length, B * (k + 1))
    assert batch.num_used is not None
    assert batch.num_used.tolist() == [T]
    unused = batch.input_ids[T:], batch.positions[T:], batch.slots[T:] + 1
    assert not any(tensor.any() for tensor in unused)


def test_block_table_longer_than_one_program_copies() -> None:
    length, tokens, pages_of = 16 * 1024 + 3, random_ints(2, 16 * 1100), random_ints(2, 1100)
    table = make_table(1000, tokens=tokens, num_tokens=[length, 5], max_len=length + 5, block_table=pages_of)
    batch = layout.launch(table, ints(0, 1), ints(length - 1, 4), ints(5, 5), 5, random_ints(2, 4))
    assert torch.equal(batch.block_table[0, :1025], table.block_table[0, :1025])
    assert torch.equal(batch.block_table[1, :1], table.block_table[1, :1])


def test_text_is_followed_by_drafts() -> None:
    table = make_table(100, tokens=[[5, 6, 7, 0, 0]] * 2, num_tokens=[3, 2], block_table=[[1], [2]])
    batch = naive(table, ints(0, 1), ints(1, 3), ints(4, 1), ints(8, 9, 4, 8, 9, 4).view(2, 3), None)
    assert batch.input_ids.tolist() == [6, 7, 8, 9, 9]
    assert (batch.positions.tolist(), batch.slots.tolist()) == ([1, 2, 3, 4, 3], [17, 18, 19, 20, 35])
    assert (batch.q_start.tolist(), batch.base_len.tolist()) == ([0, 4], [1, 3])
    assert batch.last_tokens().tolist() == [3, 4]


def test_merge_keeps_rows_of_chains_and_trees() -> None:
    def random_proposal(parents: Tensor | None) -> Proposal:
        return Proposal(random_ints(2, 3), random_ints(2), random_ints(2, 3),
                        random_ints(2), random_ints(2), parents)  # fmt: skip

    chain, tree = random_proposal(None), random_proposal(random_parents(2, 3))
    merged = merge(ints(1, 0).bool(), chain, tree)
    assert merged.drafts.tolist() == [chain.drafts[0].tolist(), tree.drafts[1].tolist()]
    assert parents_of(merged).tolist() == [[0, 1, 2], parents_of(tree)[1].tolist()]
    assert merge(ints(1, 0).bool(), chain, chain).parents is None
