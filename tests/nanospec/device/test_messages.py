"""Writing a request's row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nanospec.config import GREEDY_BELOW, SamplingParams, SpecConfig
from nanospec.device.messages import Admission
from nanospec.device.rows import write_row
from nanospec.kernels import MAX_STOP_IDS
from nanospec.kernels.table import Table

BRANCHING = SpecConfig(num_speculative_tokens=4, tree_width=3, acceptance="typical")


def row_of(constrained: bool = False, reference: Sequence[int] = (), **params: Any) -> Table:
    """Return a table of one row, initially ones, with two prompt tokens and three output tokens."""
    table, given = Table.empty(1, 32, 16, 16, "cpu"), SamplingParams(**params)
    for column in table[:-5]:
        column.fill_(1)
    texts = [5, 6, 7, 7, 8], 2, np.array(reference, np.int32)
    request = Admission(0, *texts, 20, [0], 0, 99, (3, 4), given, 4, constrained)
    write_row(table, request, BRANCHING)
    return table


def test_write_row_sets_columns_from_params() -> None:
    usual: dict[str, Any] = {"top_p": 0.5, "min_p": 0.25}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"num_tokens": 5, "max_len": 20, "finished": 0, "seed": 99, "max_k": 4, "tree_width": 3}),
        ({}, {"min_n": BRANCHING.prompt_lookup_min, "max_n": BRANCHING.prompt_lookup_max}),
        ({}, {"typical": 1, "penalized": 0}),
        ({"constrained": True}, {"max_k": 0, "typical": 0}),
        ({"acceptance": "exact", "top_k": 7, **usual}, {"typical": 0, "top_k": 7, **usual}),
        ({"tree_width": 2, "temperature": GREEDY_BELOW / 2}, {"tree_width": 2, "temperature": 0}),
        ({"tree_width": 5, "top_k": -1}, {"tree_width": 3, "top_k": 0}),
        ({"temperature": GREEDY_BELOW}, {"temperature": pytest.approx(GREEDY_BELOW)}),
        ({"min_tokens": 4, "frequency_penalty": 0.5}, {"min_len": 6, "frequency": 0.5, "penalized": 1}),
        ({"min_tokens": 99, "max_tokens": None}, {"min_len": 20}),
        ({"repetition_penalty": 1.5, "presence_penalty": -0.5}, {"repetition": 1.5, "presence": -0.5}),
    ]
    for params, expected in cases:
        table = row_of(**params)
        assert {name: getattr(table, name).item() for name in expected} == expected, params
    for reference in [], [7, -1, 8]:
        table = row_of(reference=reference)
        assert table.reference[0, : table.num_reference].tolist() == reference
    table = row_of(logit_bias={2: 1.5})
    assert table.tokens[0, :5].tolist() == [5, 6, 7, 7, 8]
    assert table.stop_ids[0].tolist() == [3, 4] + [-1] * (MAX_STOP_IDS - 2)
    assert table.in_prompt[0].nonzero().flatten().tolist() == [5, 6]
    assert table.output_counts[0].tolist() == [0] * 7 + [2, 1] + [0] * 7
    assert torch.equal(table.bias[0], 1.5 * (torch.arange(16) == 2))
