"""Does a kernel compute what `naive` computes in float32? Asked of any case of `bench/cases`, as it stands.

The call of a case is a closure. It is copied twice with all that it holds: as it is, to run the kernel with
its outputs poisoned, and with 16-bit floats as float32, to run `naive`. What both return, and what they
changed in their arguments, is compared.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.cases import Call
from nanospec.kernels.dispatch import forced

HALF = (torch.bfloat16, torch.float16)
LIMIT = 2e-2  # of the error of bf16 results
TIES = ("sample", "accept", "logprobs")  # probabilities within rounding of each other: see tests/gpu
FEW = 0.25  # of their results may differ, as there may be five in all
PARTIAL = ("layout",)  # kernels that leave unwritten what nobody reads: pages behind a text's end


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


def duplicate(value: Any, wide: bool, done: dict[int, Any]) -> Any:
    """A copy of a value and of all tensors within; `wide`: 16-bit floats become float32."""
    if id(value) in done:
        return done[id(value)]
    made: Any = value
    if isinstance(value, Tensor):
        made = value.float() if wide and value.dtype in HALF else value.clone()
    elif isinstance(value, torch.dtype):
        return torch.float32 if wide and value in HALF else value
    elif isinstance(value, tuple):
        parts = [duplicate(part, wide, done) for part in value]
        made = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    elif isinstance(value, list):
        made = [duplicate(part, wide, done) for part in value]
    elif isinstance(value, dict):
        made = {key: duplicate(part, wide, done) for key, part in value.items()}
    elif isinstance(value, types.FunctionType):
        if not value.__closure__:
            return value
        cells = tuple(types.CellType(duplicate(cell.cell_contents, wide, done)) for cell in value.__closure__)
        made = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        made.__kwdefaults__ = value.__kwdefaults__
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        made = copy.copy(value)
        for name, part in vars(value).items():
            object.__setattr__(made, name, duplicate(part, wide, done))
    done[id(value)] = made
    done[-id(value)] = value  # keeps it alive, so that its id stays its own
    return made


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors(part)]
    if hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType):
        return tensors(list(vars(value).values()))
    return []


def difference(actual: Tensor, expected: Tensor, partial: bool = False) -> float:
    """Of floats the norm of the error over that of the result, of all else the share that differs; `partial`:
    of what was written."""
    if actual.shape != expected.shape:
        return float("inf")
    if not actual.is_floating_point():
        wrong = actual != expected
        if partial and actual.dtype == torch.int32:
            wrong &= actual != torch.iinfo(torch.int32).max
        return wrong.double().mean().item() if actual.numel() else 0.0
    error = torch.linalg.vector_norm((actual.float() - expected.float()).flatten())
    return (error / torch.linalg.vector_norm(expected.float().flatten()).clamp(min=1e-20)).item()


def compare(run: Call, kernel: str = "") -> dict[str, float]:
    """The largest difference of floats and of integers between a case's kernel and `naive`."""
    narrow: dict[int, Any] = {}
    wide: dict[int, Any] = {}
    ours, theirs = duplicate(run, False, narrow), duplicate(run, True, wide)
    with poisoned(), forced("triton" if _on_gpu(narrow) else "naive"):
        actual = tensors(ours())
    with forced("naive"):
        expected = tensors(theirs())
    pairs = list(zip(actual, expected, strict=True))
    for key, made in narrow.items():  # what the call changed in its arguments
        if key > 0 and isinstance(made, Tensor):
            pairs.append((made, wide[key]))
    worst = {"error": 0.0, "differing": 0.0}
    for a, b in pairs:
        kind = "error" if a.is_floating_point() else "differing"
        found = difference(a, b, kernel in PARTIAL)
        worst[kind] = found if found != found or found > worst[kind] else worst[kind]
    return worst


def _on_gpu(done: dict[int, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_cuda for value in done.values())


def is_wrong(found: dict[str, float], kernel: str) -> bool:
    """NaN is wrong, too."""
    few = FEW if kernel in TIES else 0.0
    return not (found["error"] <= LIMIT and found["differing"] <= few)
