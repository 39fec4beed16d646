"""Kernels run in Triton's interpreter here, which must be selected before triton is imported.

Compilation (`test_compile.py`) needs the real compiler and runs in a subprocess."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill new memory with NaN, to detect elements a kernel does not write."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate `tl.dot` on tensor cores: add onto the accumulator in ascending k for any tile width.

    The interpreter uses numpy, whose summation order depends on the tile. tests/gpu checks that real
    instructions keep their order for wider tiles."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        out = d.data.copy()
        for k in range(left.shape[1]):
            out += left[:, k : k + 1] * right[k : k + 1]
        return TensorHandle(out, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
