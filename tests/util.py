"""Comparison of tensors, and waiting for a condition, for all tests."""

import time
from collections.abc import Callable

import torch
from torch import Tensor


def eventually(true: Callable[[], object], seconds: float = 10) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.01)


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    """Return the RMS of the difference divided by that of `expected`, in float64."""
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).square().mean().sqrt().item()
    scale = expected.square().mean().sqrt().item()
    return difference / max(scale, 1e-30)


def assert_close(actual: Tensor, expected: Tensor, tol: float, what: str = "tensors") -> float:
    """Fail unless shapes agree, both are finite and `error_ratio` is at most `tol`.

    Return the largest absolute difference, for tests that also bound it."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if actual.numel() == 0:
        return 0.0
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    for name, tensor in (("actual", actual), ("expected", expected)):
        bad = int((~torch.isfinite(tensor)).sum())
        assert bad == 0, f"{what}: {bad} of {tensor.numel()} values of {name} are not finite"
    difference = (actual.double() - expected.double()).abs()
    largest = difference.max().item()
    where = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
    ratio = error_ratio(actual, expected)
    assert ratio <= tol, (
        f"{what}: error ratio {ratio:.3g} exceeds {tol:.3g}; the largest difference is "
        f"{largest:.3g} at {where}"
    )
    return largest
