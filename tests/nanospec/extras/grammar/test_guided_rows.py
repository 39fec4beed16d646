"""Guided rows change a step's proposal and logits; other rows keep theirs."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.extras.grammar.extension import Grammar, mask
from nanospec.extras.grammar.grammar import Draft
from nanospec.kernels import GENERATED, NO_DRAFTER
from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.native import library
from nanospec.kernels.speculation.layout import lay_out
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from tests.kernels.batches import ints

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NON_FINITE = torch.tensor([math.nan, math.inf, -math.inf])  # kept bitwise where allowed
V, CODE = 40, 2
TABLE = Table.empty(4, 64, 16, V, "cpu")


WORKER: Any = type(
    "Worker", (), {"table": TABLE, "max_k": 5, "drafter_names": ("ngram", "draft", "grammar")}
)()


def line(*tokens: int) -> bytes:
    """Return a mask that allows these tokens."""
    return sum(1 << token for token in tokens).to_bytes(8, "little")


@pytest.fixture(params=[None, SimpleNamespace(max_tokens=12)], ids=["packed", "captured"])
def guided(request: pytest.FixtureRequest) -> Grammar:
    """Return an extension with grammars in rows 1 and 3; row 3 has more drafts than a step may verify."""
    WORKER.graphs = request.param
    rows = Grammar(None)
    rows.attach(WORKER)
    long = Draft([7, 8, 9, 7, 8], [GENERATED, 1, 2, 3, 4], 64, [line(7), line(8), line(9), *[line(1)] * 3])
    rows.send([(2, Draft([5], [1], 1, [line(5), line(6)]))], 3)
    before = rows.allowed
    rows.send([(3, long), (1, Draft([], [], 0, [line(0, 35)]))], 3)
    assert (before.data_ptr() == rows.allowed.data_ptr()) == (request.param is not None)
    rows.admit(2)
    return rows


@pytest.mark.parametrize("tree", [False, True])
def test_rows_get_their_grammar_drafts(guided: Grammar, tree: bool) -> None:
    drafts = torch.arange(12, dtype=torch.int32).view(4, 3) + 20
    parents = ints(0, 0, 1).repeat(4, 1) if tree else None
    each = ints(3, 2, 1, 3), drafts - 10, ints(4, 5, 6, 7), ints(1, 0, 1, 0)
    given = Proposal(drafts, *each, parents)
    rows = ints(3, 0, 1, -1)
    result = guided.propose(TABLE, rows, given)
    assert result.drafts.tolist() == [[7, 8, 9], [23, 24, 25], result.drafts[2].tolist(), [29, 30, 31]]
    assert result.num_drafts.tolist() == [3, 2, 0, 3]
    assert result.source.tolist()[:2] == [[GENERATED, 1, 2], [13, 14, 15]]
    assert result.match_len.tolist() == [64, 5, 0, 7]
    assert result.drafter.tolist() == [CODE, 0, NO_DRAFTER, 0]
    assert result.parents is None or result.parents.tolist()[:2] == [[0, 1, 2], [0, 0, 1]]
    assert (result.parents is None) == (not tree)
    assert all(t.dtype == torch.int32 for t in result[:5])


def _batch(rows: Tensor, q_len: Tensor) -> Batch:
    return lay_out(TABLE, rows, torch.zeros_like(rows), q_len, 4)


def test_disallowed_tokens_are_masked(guided: Grammar) -> None:
    """Row 3 has two tokens, row 0 three, row 1 one; row 2 is new; the last token is unused."""
    batch = _batch(ints(3, 0, -1, 1, 2), ints(2, 3, 0, 1, 1))
    logits = torch.randn(8, V)
    expected = logits.clone()
    for t, may in ((0, [7]), (1, [8]), (5, [0, 35])):
        kept = expected[t, may]
        expected[t] = -math.inf
        expected[t, may] = kept
    guided.process_logits(logits, batch)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("backend", ["naive", *["native"] * (library() is not None)])
@settings(max_examples=40)
@given(st.integers(1, 5000), st.integers(0, 3), st.integers(-2, 2), st.integers(0, 2), st.integers(0, 10**6))
def test_mask_matches_loop(backend: Backend, V: int, T: int, more: int, kind: int, seed: int) -> None:
    """Masks may have fewer or more bits than the vocabulary; rows need not be contiguous."""
    words = max(-(-V // 32) + more, 1)
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.randint(-(2**31), 2**31, (3, words + 2), generator=generator).int()[:, :words]
    allowed[0, ::2], allowed[1, ::3] = -1, 0
    at = torch.randint(-1, 3, (T,), generator=generator).int()
    logits = torch.randn(T, V + 7, generator=generator).to(DTYPES[kind])[:, :V]
    logits[:, : len(NON_FINITE)] = NON_FINITE[:V]
    expected = logits.clone()
    for t, m in enumerate(at.tolist()):
        for i in range(V) if m >= 0 else ():
            if i // 32 >= words or not int(allowed[m, i // 32]) >> (i % 32) & 1:
                expected[t, i] = -math.inf
    with forced(backend):
        mask(logits, allowed, at)
    assert torch.equal(logits.nan_to_num(7.5), expected.nan_to_num(7.5))
