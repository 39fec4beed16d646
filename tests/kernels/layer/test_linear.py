"""The products of a layer: against float64, and that a row's bits do not depend on the others."""

from __future__ import annotations

import pytest
import torch

from nanospec.kernels.dispatch import forced
from nanospec.kernels.layer import gemm, linear
from nanospec.kernels.layer.norm import Norm
from tests.kernels.products import KINDS, Products
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("T", "N", "K"),
    [(1, 64, 64), (5, 100, 576), (17, 198, 1000), (63, 66, 100), (130, 64, 256), (3, 64, 1536)],
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("kind", KINDS)
def test_linear(kind: str, T: int, N: int, K: int, dtype: torch.dtype) -> None:
    products = Products(T, N, K, dtype)
    out = products.run(kind)
    assert out.dtype == dtype
    assert torch.equal(out, products.run(kind))  # the tickets are back at zero
    assert_close(out, products.expected(kind), TOLERANCE[dtype], kind)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_other_rows(kind: str, dtype: torch.dtype) -> None:
    """One row, a verification's rows, every width of the tile, several tiles."""
    products = Products(150, 128, 512, dtype)
    together = products.run(kind)
    for rows in (slice(0, 1), slice(3, 11), slice(0, 20), slice(60, 110), slice(149, 150)):
        assert torch.equal(products.run(kind, rows), together[rows]), rows


def test_empty_input() -> None:
    with forced("triton"):
        assert linear.linear(torch.empty(0, 64), torch.randn(32, 64)).shape == (0, 32)


def test_many_rows_take_the_vendors_product() -> None:
    products = Products(linear.MAX_ROWS + 1, 32, 64, torch.float32)
    assert_close(products.run("norm_linear"), products.expected("norm_linear"), 1e-6)


@pytest.mark.parametrize(
    ("N", "K"), [(1024, 2048), (4096, 1024), (576, 576), (151936, 1024), (24576, 4096), (960, 576), (8, 16)]
)
def test_split_covers_k_in_whole_steps(N: int, K: int) -> None:
    splits, part = gemm.split_k(N, K)
    assert part % (128 if K % 128 == 0 else 64) == 0
    assert (splits - 1) * part < K <= splits * part


def test_bad_arguments_are_refused() -> None:
    x, weight = torch.randn(2, 64), torch.randn(32, 64)
    with forced("triton"):
        for call, message in (
            (lambda: linear.linear(x, weight.T.contiguous()), "does not fit"),
            (lambda: linear.linear(x, weight.T), "contiguous"),
            (lambda: linear.linear(x, weight, torch.randn(31)), r"bias must be contiguous \[32\]"),
            (lambda: linear.linear_add(x, weight, torch.randn(2, 31)), "residual must be"),
            (lambda: linear.norm_linear(x, Norm(torch.randn(63), 1e-6), weight), "norm weight must be"),
        ):
            with pytest.raises(ValueError, match=message):
                call()


def test_packed_weights_are_refused() -> None:
    weight = linear.pack(torch.randn(32, 64))
    if not weight.is_mkldnn:
        pytest.skip("needs oneDNN")
    with forced("triton"), pytest.raises(ValueError, match="packed"):
        linear.linear(torch.randn(2, 64), weight)
