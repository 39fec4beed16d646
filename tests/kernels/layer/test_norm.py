"""RMSNorm against `naive`."""

from __future__ import annotations

import pytest
import torch

from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.layer import norm
from nanospec.kernels.layer.norm import Norm
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float16, 5e-4), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 5, 100), (4, 576), (0, 64), (1, 9000)], ids=str)
def test_norm(shape: tuple[int, ...], dtype: torch.dtype, tol: float) -> None:
    x = (torch.randn(shape) * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    with forced("triton"):
        out = norm.rms_norm(x, Norm(weight, 1e-5))
    assert out.dtype == dtype
    assert_close(out, norm.naive(x.double(), Norm(weight.double(), 1e-5)), tol)


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_weights_may_be_in_float32(backend: Backend) -> None:
    x, weight = torch.randn(5, 100).half(), 1 + torch.randn(100) / 1000  # which float16 cannot tell from 1
    with forced(backend):
        out = norm.rms_norm(x, Norm(weight, 1e-5))
    assert out.dtype == torch.float16
    expected = norm.naive(x.double(), Norm(weight.double(), 1e-5))
    assert_close(out, expected, 3e-4)
    assert (out == expected.half()).float().mean() > 0.97


def test_bits_of_a_row_with_gaps_do_not_depend_on_other_rows() -> None:
    x, given = torch.randn(7, 500)[:, :300], Norm(torch.randn(300), 1e-6)
    with forced("triton"):
        together = norm.rms_norm(x, given)
        assert_close(together, norm.naive(x, given), 1e-6)
        for row in range(7):
            assert torch.equal(norm.rms_norm(x[row : row + 1], given)[0], together[row])
