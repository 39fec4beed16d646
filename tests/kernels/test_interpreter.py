"""The interpreter detects kernels' reads and writes outside their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

SIZE = 8
MEMORY = 3 * SIZE  # the tensor is its middle third, so that errors are harmless


@triton.jit
def _touch(tensor: Any, first: Any, count: Any, HOW: tl.constexpr, SIZE: tl.constexpr) -> None:
    i = first + tl.arange(0, SIZE)
    if HOW == "load":
        tl.load(tensor + i, i < count)
    elif HOW == "store":
        tl.store(tensor + i, i, i < count)
    elif HOW == "add":
        tl.atomic_add(tensor + i, i, i < count)
    else:
        tl.load(tensor + first)


@pytest.mark.parametrize(("how", "step"), [("load", 1), ("store", 2), ("add", 1), ("one", 2)])
def test_out_of_bounds_access_is_detected(how: str, step: int) -> None:
    tensor = torch.zeros(MEMORY, dtype=torch.int32)[SIZE : 2 * SIZE : step]
    end = SIZE - step + 1  # after its last element
    _touch[(1,)](tensor, 0, end, how, SIZE)
    _touch[(1,)](tensor, end - 1, end, how, SIZE)  # the other lanes are masked
    for first, words in ((end, "0 bytes past the end of"), (-1, "before")):
        with pytest.raises(InterpreterError, match=f"4 bytes are read or written {words} a tensor"):
            _touch[(1,)](tensor, first, first + 1, how, SIZE)
