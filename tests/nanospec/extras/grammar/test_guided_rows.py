"""Guided rows change a step's proposal and logits; other rows keep theirs."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.extras.grammar.extension import Grammar
from nanospec.extras.grammar.grammar import Draft
from nanospec.kernels import GENERATED, NO_DRAFTER
from nanospec.kernels.batch import Batch
from nanospec.kernels.speculation.proposal import Proposal, lay_out
from nanospec.kernels.table import Table

V, CODE = 40, 2
TABLE = Table.empty(4, 64, 16, V, "cpu")


def line(*tokens: int) -> bytes:
    """Return a mask that allows these tokens."""
    return sum(1 << token for token in tokens).to_bytes(8, "little")


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Fake(SimpleNamespace):
    """A worker that supports weak references, unlike its base."""


@pytest.fixture(params=[None, 12], ids=["packed", "captured"])
def guided(request: pytest.FixtureRequest) -> Iterator[Grammar]:
    """Four rows, of which 1 and 3 have grammars; row 3 has more drafts than a step may verify."""
    graphs = SimpleNamespace(max_tokens=request.param) if request.param else None
    methods = ("ngram", "draft", "grammar")
    rows = Grammar(None)
    worker = Fake(table=TABLE, max_k=5, graphs=graphs, methods=methods)
    rows.attach(worker)
    long = Draft([7, 8, 9, 7, 8], [GENERATED, 1, 2, 3, 4], 64, [line(7), line(8), line(9), *[line(1)] * 3])
    drafts = [(3, long), (1, Draft([], [], 0, [line(0, 35)]))]
    rows.send(drafts, 3)
    yield rows
    del worker  # only a weak reference to it remains


@pytest.mark.parametrize("tree", [False, True])
def test_rows_get_their_grammar_drafts(guided: Grammar, tree: bool) -> None:
    drafts = torch.arange(12, dtype=torch.int32).view(4, 3) + 20
    logits = None if tree else torch.randn(4, 3, V)
    parents = ints([0, 0, 1]).repeat(4, 1) if tree else None
    each = ints(3, 2, 1, 3), drafts - 10, ints(4, 5, 6, 7), ints(1, 0, 1, 0)
    given = Proposal(drafts, *each, parents, logits)
    rows = ints(3, 0, 1, -1)
    result = guided.propose(TABLE, rows, given)
    assert result.drafts.tolist() == [[7, 8, 9], [23, 24, 25], result.drafts[2].tolist(), [29, 30, 31]]
    assert result.num_drafts.tolist() == [3, 2, 0, 3]
    assert result.source.tolist()[:2] == [[GENERATED, 1, 2], [13, 14, 15]]
    assert result.match_len.tolist() == [64, 5, 0, 7]
    assert result.drafter.tolist() == [CODE, 0, NO_DRAFTER, 0]
    others, batch = guided.for_drafters(result, lay_out(TABLE, rows, result))
    assert others.drafter.tolist() == [NO_DRAFTER, 0, NO_DRAFTER, 0]
    assert batch.rows.tolist() == [-1, 0, -1, -1]
    assert result.parents is None or result.parents.tolist()[:2] == [[0, 1, 2], [0, 0, 1]]
    assert result.sampled is None or result.sampled.tolist() == [False, True, False, True]
    assert (result.parents is None, result.sampled is None) == (not tree, tree)
    assert all(t.dtype == torch.int32 for t in result[:5])


def test_disallowed_tokens_are_masked(guided: Grammar) -> None:
    """Row 3 has two tokens and padding, row 0 three, row 1 one; padding has no row."""
    batch = Batch.from_grid(TABLE, ints(3, 0, -1, 1), ints(0, 0, 0, 0), ints(2, 3, 3, 1), 3)
    logits = torch.randn(12, V)
    expected = logits.clone()
    for t, may in ((0, [7]), (1, [8]), (9, [0, 35])):
        kept = expected[t, may]
        expected[t] = -math.inf
        expected[t, may] = kept
    guided.process_logits(logits, batch)
    assert torch.equal(logits, expected)


def test_reassigned_row_has_no_mask(guided: Grammar) -> None:
    guided.admit(3)
    logits = torch.randn(1, V)
    expected = logits.clone()
    guided.process_logits(logits, Batch.from_grid(TABLE, ints(3), ints(0), ints(1), 1))
    assert torch.equal(logits, expected)


def test_grammar_is_imported_lazily() -> None:
    program = "import sys, nanospec.extras.grammar.extension as _; "
    program += "sys.exit('nanospec.extras.grammar.grammar' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
