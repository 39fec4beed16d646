"""The interpreter notices what a kernel reads or writes outside of the tensors that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

SIZE = 8
MEMORY = 3 * SIZE  # the tensor is the middle of it, so that nothing is harmed


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


@pytest.mark.parametrize("step", [1, 2], ids=["dense", "strided"])
@pytest.mark.parametrize("how", ["load", "store", "add", "one"])
def test_what_lies_outside_of_a_tensor_is_refused(how: str, step: int) -> None:
    tensor = torch.zeros(MEMORY, dtype=torch.int32)[SIZE : 2 * SIZE : step]
    end = SIZE - step + 1  # behind its last element
    _touch[(1,)](tensor, 0, end, how, SIZE)
    _touch[(1,)](tensor, end - 1, end, how, SIZE)  # the other lanes lie behind, and are masked
    for first, words in ((end, "0 bytes behind the end of"), (-1, "before")):
        with pytest.raises(InterpreterError, match=f"4 bytes are read or written {words} a tensor"):
            _touch[(1,)](tensor, first, first + 1, how, SIZE)
