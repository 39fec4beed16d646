"""These tests need a GPU and compiled kernels: run `pytest tests/gpu` separately (`make gpu`).

They are skipped together with tests/kernels, which enables Triton's interpreter for the whole process."""

import os
from collections.abc import Iterator

import pytest
import torch

from bench.check import poisoned


@pytest.fixture(autouse=True)
def gpu() -> Iterator[torch.device]:
    """Return the GPU. Uninitialized memory is filled with NaN or the largest integer."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs compiled kernels: run `pytest tests/gpu` separately")
    torch.manual_seed(0)
    with poisoned():
        yield torch.device("cuda")
