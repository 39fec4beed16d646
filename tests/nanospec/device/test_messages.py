"""Writing a request's row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanospec.config import GREEDY_BELOW, SamplingParams, SpecConfig
from nanospec.device.messages import Admission, write_row
from nanospec.kernels import EXACT, MAX_STOP_IDS, RULES
from nanospec.kernels.table import Table

BRANCHING = SpecConfig(num_speculative_tokens=4, tree_width=3, acceptance="rejection")


def row_of(constrained: bool = False, **params: Any) -> Table:
    """Return a table of one row, initially junk: a request with two prompt tokens and three output tokens."""
    table, given = Table.empty(1, 32, 16, 16, "cpu"), SamplingParams(**params)
    for column in table[:-5]:
        column.fill_(1)
    write_row(
        table, Admission(0, [5, 6, 7, 7, 8], 2, 20, [0], 0, 99, (3, 4), given, 4, constrained), BRANCHING
    )
    return table


def test_write_row() -> None:
    for column, fields, expected in (
        ("num_tokens", {}, 5),
        ("max_len", {}, 20),
        ("finished", {}, 0),
        ("seed", {}, 99),
        ("max_k", {}, 4),
        ("max_k", {"constrained": True}, 0),
        ("min_n", {}, BRANCHING.prompt_lookup_min),
        ("max_n", {}, BRANCHING.prompt_lookup_max),
        ("tree_width", {}, 3),
        ("tree_width", {"tree_width": 2}, 2),
        ("tree_width", {"tree_width": 5}, 3),
        ("rule", {}, RULES.index("rejection")),
        ("rule", {"acceptance": "typical"}, RULES.index("typical")),
        ("rule", {"constrained": True}, EXACT),
        ("temperature", {"temperature": GREEDY_BELOW / 2}, 0),
        ("temperature", {"temperature": GREEDY_BELOW}, pytest.approx(GREEDY_BELOW)),
        ("top_k", {"top_k": 7}, 7),
        ("top_k", {"top_k": -1}, 0),
        ("top_p", {"top_p": 0.5}, 0.5),
        ("min_p", {"min_p": 0.25}, 0.25),
        ("min_len", {"min_tokens": 4}, 6),
        ("min_len", {"min_tokens": 99, "max_tokens": None}, 20),
        ("penalized", {}, False),
        ("penalized", {"frequency_penalty": 0.5}, True),
        ("repetition", {"repetition_penalty": 1.5}, 1.5),
        ("presence", {"presence_penalty": -0.5}, -0.5),
        ("frequency", {"frequency_penalty": 0.5}, 0.5),
    ):
        assert getattr(row_of(**fields), column).item() == expected, (column, fields)


def test_write_row_tokens_and_counts() -> None:
    table = row_of(logit_bias={2: 1.5})
    assert table.tokens[0, :5].tolist() == [5, 6, 7, 7, 8]
    assert table.stop_ids[0].tolist() == [3, 4] + [-1] * (MAX_STOP_IDS - 2)
    assert table.in_prompt[0].nonzero().flatten().tolist() == [5, 6]
    assert table.output_counts[0].tolist() == [0] * 7 + [2, 1] + [0] * 7
    assert torch.equal(table.bias[0], 1.5 * (torch.arange(16) == 2))
