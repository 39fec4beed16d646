"""The residual stream and RMSNorm: comparison of kernels with `naive`."""

import pytest
import torch

from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.layer.residual import Norm, naive, naive_norm, residual_add, rms_norm, total
from tests.kernels.products import normed
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

FP16, FP32 = torch.float16, torch.float32


@pytest.mark.parametrize("backend", ["triton", "naive"])
@pytest.mark.parametrize(
    ("T", "H", "dtype", "weight_dtype"),
    [(1, 1, FP32, FP32), (5, 100, FP16, FP32), (0, 64, FP32, FP32), (3, 9001, FP16, FP16)],
    ids=str,
)
def test_norm_matches_float64_in_any_batch(
    T: int, H: int, dtype: torch.dtype, weight_dtype: torch.dtype, backend: Backend
) -> None:
    x = torch.randn(T, H) * torch.arange(1, T + 1)[:, None]
    x[1::3] *= 1e-2  # eps matters for small squares
    x = x.to(dtype)
    norm = Norm(1 + (torch.randn(H) / 1000).to(weight_dtype), 1e-5)  # rounds to 1 in float16
    with forced(backend):
        out = rms_norm(x, norm)
        for row in range(T):  # bitwise independent of other rows
            assert torch.equal(rms_norm(x[row : row + 1], norm)[0], out[row])
    assert out.dtype == dtype
    expected = naive_norm(x.double(), Norm(norm.weight.double(), 1e-5))
    assert_close(out, expected, 5e-4 if dtype == FP16 else 1e-6)
    if weight_dtype != dtype:
        assert (out == expected.half()).float().mean() > 0.97


@pytest.mark.parametrize(("N", "T", "H", "dtype"), [(1, 1, 64, FP16), (3, 5, 100, FP16), (8, 2, 576, FP32)])
def test_residual_add_matches_naive(N: int, T: int, H: int, dtype: torch.dtype) -> None:
    parts, x = torch.randn(N, T, H).to(dtype), torch.randn(T, H).to(dtype)
    norm = Norm(torch.randn(H).to(dtype), 1e-5)
    for next_norm in (None, Norm(1 + torch.randn(H), 1e-5)):
        with forced("triton"):
            result = residual_add(parts, x, norm, next_norm)
        expected = naive(parts, x, next_norm)
        assert_close(result.x, expected, 1e-6 if dtype == FP32 else 2e-3, f"{next_norm}")
        wanted = torch.nn.functional.rms_norm(expected.float(), (H,), norm.weight.float(), 1e-5)
        assert_close(normed(result).float(), wanted, 2e-6 if dtype == FP32 else 4e-3, f"{next_norm}")
        with forced("triton"):  # one token alone, and parts added beforehand
            alone = residual_add(parts[:, -1:].contiguous(), x[-1:], norm, next_norm)
            assert torch.equal(alone.x[0], result.x[-1])
            assert torch.equal(residual_add(total(parts)[None], x, norm, next_norm).x, result.x)
        assert torch.equal(expected, naive(total(parts)[None], x, next_norm))


def test_parts_are_added_in_order_and_rounded_once() -> None:
    halves = torch.tensor([2048.0, 1.0, 1.0, -2048.0]).half().view(4, 1, 1)  # 2049 is not representable
    assert naive(halves, torch.zeros(1, 1).half()).item() == 2.0
    tiny = torch.tensor([1.0, 2.0**-24, 2.0**-24]).view(3, 1, 1)  # each would be lost in float32
    assert naive(tiny, torch.zeros(1, 1)).item() == 1.0
    with forced("triton"):
        assert residual_add(tiny, torch.zeros(1, 1), Norm(torch.ones(1), 1e-5)).x.item() == 1.0
