"""Check that a kernel computes what `naive` computes, for any case of `bench/cases`.

A case is built twice with the same seed, and run by the kernel with its outputs poisoned and by `naive`. What
both return, and the tensors that their calls hold and may have changed, are compared.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.cases import Built
from nanospec.kernels.launch import Backend, forced

LIMIT = 2e-2  # of the error of bf16 results
TIES = ("sample", "accept")  # probabilities within rounding of each other: see tests/gpu
FEW = 0.25  # share of their results that may differ, as there may be five in all
PARTIAL = ("layout",)  # kernels that leave unwritten what is not read: pages behind a text's end


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN, or the largest integer, until it is written."""
    settings: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
        settings.fill_uninitialized_memory = filled


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors of a result, or of what a function holds, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, types.FunctionType):
        return [t for cell in value.__closure__ or () for t in tensors(cell.cell_contents)]
    if isinstance(value, dict):
        return tensors(list(value.values()))
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors(part)]
    return tensors(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else []


def difference(actual: Tensor, expected: Tensor, partial: bool = False) -> float:
    """Return the relative error of floats by norm, or the share of other values that differ.

    `partial`: integers that were not written do not count."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.is_floating_point():
        wrong = actual != expected
        if partial and actual.dtype == torch.int32:
            wrong &= actual != torch.iinfo(torch.int32).max
        return wrong.double().mean().item() if actual.numel() else 0.0
    error = torch.linalg.vector_norm((actual.float() - expected.float()).flatten())
    return (error / torch.linalg.vector_norm(expected.float().flatten()).clamp(min=1e-20)).item()


def compare(
    build: Callable[[str], Built], device: str, kernel: str = "", how: Backend = "triton"
) -> dict[str, float]:
    """Return the largest `error` of floats and the largest share of other values that are `differing`."""
    found = []
    ways: tuple[tuple[Backend, Any], ...] = ((how, poisoned), ("naive", torch.no_grad))
    for backend, memory in ways:
        torch.manual_seed(0)
        run = build(device).run
        with forced(backend), memory():
            found.append(tensors(run()) + tensors(run))
    worst = {"error": 0.0, "differing": 0.0}
    for actual, expected in zip(*found, strict=True):
        which = "error" if expected.is_floating_point() else "differing"
        value = difference(actual, expected, kernel in PARTIAL)
        worst[which] = value if value != value or value > worst[which] else worst[which]
    return worst


def is_wrong(found: dict[str, float], kernel: str) -> bool:
    """Return whether a difference is too large, or NaN."""
    few = FEW if kernel in TIES else 0.0
    return not (found["error"] <= LIMIT and found["differing"] <= few)
