"""Writing a request's row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanospec.config import GREEDY_BELOW, SamplingParams, SpecConfig
from nanospec.device.messages import Admission, write_row
from nanospec.kernels import EXACT, MAX_STOP_IDS, RULES
from nanospec.kernels.table import Table

VOCABULARY = 16
BRANCHING = SpecConfig(num_speculative_tokens=4, tree_width=3, acceptance="rejection")


def row_of(params: SamplingParams, constrained: bool = False) -> Table:
    """Return a table of one row, initially junk: a request with two prompt tokens and three output tokens."""
    table = Table.empty(1, 32, 16, VOCABULARY, "cpu")
    for column in table[:-5]:
        column.fill_(1)
    request = Admission(0, [5, 6, 7, 7, 8], 2, 20, [0], 0, 99, (3, 4), params, 4, constrained)
    write_row(table, request, BRANCHING)
    return table


@pytest.mark.parametrize(
    ("column", "fields", "expected"),
    [
        ("num_tokens", {}, 5),
        ("max_len", {}, 20),
        ("max_k", {}, 4),
        ("max_k", {"constrained": True}, 0),
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
        ("min_len", {"min_tokens": 4}, 6),
        ("min_len", {"min_tokens": 99, "max_tokens": None}, 20),
        ("penalized", {}, False),
        ("penalized", {"frequency_penalty": 0.5}, True),
    ],
)
def test_write_row_params(column: str, fields: dict[str, Any], expected: Any) -> None:
    constrained = fields.get("constrained", False)
    params = SamplingParams(**{name: v for name, v in fields.items() if name != "constrained"})
    assert getattr(row_of(params, constrained), column).item() == expected


def test_write_row_tokens_and_counts() -> None:
    table = row_of(SamplingParams(logit_bias={2: 1.5}))
    assert table.tokens[0, :5].tolist() == [5, 6, 7, 7, 8]
    assert table.stop_ids[0].tolist() == [3, 4] + [-1] * (MAX_STOP_IDS - 2)
    assert table.in_prompt[0].nonzero().flatten().tolist() == [5, 6]
    assert table.output_counts[0].tolist() == [0] * 7 + [2, 1] + [0] * (VOCABULARY - 9)
    assert torch.equal(table.bias[0], 1.5 * (torch.arange(VOCABULARY) == 2))
