"""The residual stream and RMSNorm: comparison of kernels with `naive`."""

from __future__ import annotations

import pytest
import torch

from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.layer.residual import Norm, naive, naive_norm, residual_add, rms_norm, total
from tests.kernels.products import normed
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float16, 5e-4), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (4, 576), (0, 64), (1, 9000)], ids=str)
def test_norm(shape: tuple[int, int], dtype: torch.dtype, tol: float) -> None:
    x, norm = torch.randn(shape).to(dtype), Norm(torch.randn(shape[-1]).to(dtype), 1e-5)
    x *= torch.arange(1, len(x) + 1)[:, None]
    with forced("triton"):
        out = rms_norm(x, norm)
    assert out.dtype == dtype
    assert_close(out, naive_norm(x.double(), Norm(norm.weight.double(), 1e-5)), tol)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_norm_weights_may_be_float32(backend: Backend) -> None:
    x, weight = torch.randn(5, 100).half(), 1 + torch.randn(100) / 1000  # rounds to 1 in float16
    with forced(backend):
        out = rms_norm(x, Norm(weight, 1e-5))
    assert out.dtype == torch.float16
    expected = naive_norm(x.double(), Norm(weight.double(), 1e-5))
    assert_close(out, expected, 3e-4)
    assert (out == expected.half()).float().mean() > 0.97


def test_norm_is_bitwise_independent_of_other_rows() -> None:
    x, given = torch.randn(7, 300), Norm(torch.randn(300), 1e-6)
    with forced("triton"):
        together = rms_norm(x, given)
        assert_close(together, naive_norm(x, given), 1e-6)
        for row in range(7):
            assert torch.equal(rms_norm(x[row : row + 1], given)[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "T", "H"), [(1, 1, 64), (2, 3, 63), (3, 5, 100), (8, 2, 576)], ids=str)
def test_residual_add_matches_naive(N: int, T: int, H: int, dtype: torch.dtype) -> None:
    parts, x = torch.randn(N, T, H).to(dtype), torch.randn(T, H).to(dtype)
    norm, out_norm = Norm(torch.randn(H).to(dtype), 1e-5), Norm(1 + torch.randn(H), 1e-5)
    for its in (None, out_norm):
        with forced("triton"):
            result = residual_add(parts, x, norm, its)
        expected = naive(parts, x, its)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-3
        assert_close(result.x, expected, tolerance, f"{its}")
        wanted = torch.nn.functional.rms_norm(expected.float(), (H,), norm.weight.float(), 1e-5)
        assert_close(normed(result).float(), wanted, 2e-6 if dtype == torch.float32 else 4e-3, f"{its}")
        with forced("triton"):  # one token alone, and parts added beforehand
            alone = residual_add(parts[:, -1:].contiguous(), x[-1:], norm, its)
            assert torch.equal(alone.x[0], result.x[-1])
            assert torch.equal(residual_add(total(parts)[None], x, norm, its).x, result.x)
        assert torch.equal(expected, naive(total(parts)[None], x, its))


def test_parts_are_added_in_order_and_rounded_once() -> None:
    parts = torch.tensor([2048.0, 1.0, 1.0, -2048.0], dtype=torch.float16).view(
        4, 1, 1
    )  # 2049 is not representable in float16
    assert naive(parts, torch.zeros(1, 1, dtype=torch.float16)).item() == 2.0
    tiny = torch.tensor([1.0, 2.0**-24, 2.0**-24], dtype=torch.float32).view(
        3, 1, 1
    )  # each would be lost in float32
    assert naive(tiny, torch.zeros(1, 1)).item() == 1.0
    with forced("triton"):
        assert residual_add(tiny, torch.zeros(1, 1), Norm(torch.ones(1), 1e-5)).x.item() == 1.0
