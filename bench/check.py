"""Compare a kernel with its `naive` reference, for any case of `bench/cases`.

A case is built twice with the same seed, and run by the kernel, with poisoned outputs, and by `naive`. The
values that `naive` returns are compared, and the tensors in the closures, which a call may modify in place.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.cases import Built
from nanospec.kernels.launch import Backend, forced

LIMIT = 2e-2  # maximum relative error of bf16 results
TIES = ("sample", "typical")  # may return another token where probabilities tie within rounding
FEW = 0.25  # maximum fraction of their results that may differ; a case may have only five
PARTIAL = ("layout",)  # kernels that leave unused outputs unwritten, such as blocks after a row's end


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill newly allocated memory with NaN, or with the maximum integer, in the context."""
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
    """Return all tensors in a result or in the closure of a function, in order."""
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
    """Return the relative error (by norm) of floats, or the fraction of other values that differ.

    If `partial`, unwritten integers are ignored."""
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
    """Return the maximum relative `error` of floats and the maximum fraction of `differing` other values."""
    found = []
    ways: tuple[tuple[Backend, Any], ...] = ((how, poisoned), ("naive", torch.no_grad))
    for backend, memory in ways:
        torch.manual_seed(0)
        run = build(device).run
        with forced(backend), memory():
            found.append((tensors(run), tensors(run())))  # in this order, as a call may cache tensors
    worst = {"error": 0.0, "differing": 0.0}
    (actual_own, actual_result), (own, result) = found
    for actual, expected in zip(actual_own + actual_result[: len(result)], own + result, strict=True):
        which = "error" if expected.is_floating_point() else "differing"
        value = difference(actual, expected, kernel in PARTIAL)
        worst[which] = value if value != value or value > worst[which] else worst[which]
    return worst


def is_wrong(found: dict[str, float], kernel: str) -> bool:
    """Return whether a difference is NaN or above the limit."""
    few = FEW if kernel in TIES else 0.0
    return not (found["error"] <= LIMIT and found["differing"] <= few)
