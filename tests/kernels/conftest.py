"""The kernels run in Triton's interpreter here, which must be chosen before triton is imported.

Compilation (`test_compile.py`) needs the real compiler and runs in a process of its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory holds NaN, so that whatever a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.dot` as tensor cores chain it: onto the addend, in ascending k, whatever the tile's width.

    The interpreter's own goes through numpy, whose order of summation depends on the tile. That real
    instructions keep theirs when the tile becomes wider is checked in tests/gpu.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        out = d.data.copy()
        for k in range(left.shape[1]):
            out += left[:, k : k + 1] * right[k : k + 1]
        return TensorHandle(out, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
