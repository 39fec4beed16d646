"""Host writes into rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nanospec.kernels.transfer import write


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int64, [-(2**63), 2**63 - 1]),
        (torch.bool, [0, 1]),
        (torch.float32, [-0.0, 1e-42, math.inf]),
    ],
    ids=str,
)
def test_write_keeps_bits_and_repeats_last_value(dtype: torch.dtype, values: list[Any]) -> None:
    pages = torch.ones(3, 7).to(dtype)
    expected = pages.clone()
    expected[1, : len(values)] = torch.tensor(values, dtype=dtype)
    write(pages, 1, values)
    assert torch.equal(pages, expected)
    expected[1, len(values) : 5] = expected[1, len(values) - 1]
    write(pages, 1, values, end=5)
    assert torch.equal(pages, expected)
    assert dtype != torch.float32 or math.copysign(1, pages[1, 0].item()) == -1
