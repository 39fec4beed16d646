"""C++ products of quantized weights: accuracy, bitwise independence of the batch, extreme values."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from nanospec.kernels import native
from nanospec.kernels.layer.quantized import GROUP, Quantized, as_integers, quantize
from nanospec.kernels.native import packed
from tests.random_weights import random_quantized

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler: install g++")

BF16 = torch.bfloat16
FORMS = ("int4", "int4-min", "int8", "int8-min")


def random(form: str, N: int, K: int, group: int = GROUP) -> Quantized:
    """Return a weight with rows of magnitudes from 16 down to 1e-6."""
    sizes = 16 * 8.0 ** -torch.arange(N)[:, None].clamp(max=8)
    return random_quantized(form, N, K, group, sizes, torch.float64)


def expected(x: Tensor, weight: Quantized) -> Tensor:
    """Return the product in float64, with x [T, K] quantized to 8 bits in groups of at most 64."""
    groups = x.double().unflatten(1, (-1, math.gcd(weight.group, packed.MAX_GROUP)))
    unit = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / unit).round() * unit).flatten(1) @ weight.dequantize().T


@pytest.mark.parametrize("form", [*FORMS, "fp8"])
def test_product_and_rows_match_float64(form: str) -> None:
    for N, K, T in ((1, 64, 8), (33, 96, 3), (70, 1088, 65), (2100, 32, 5)):
        weight = random(form, N, K, GROUP if N % 2 else K)
        x, bias = torch.randn(T, K).to(BF16), torch.randn(N).to(BF16)
        strips, weight = packed.pack_quantized(weight), as_integers(weight)
        exact, wanted = weight.dequantize(), expected(x, weight)
        most = x.double().norm(dim=1)[:, None] * exact.norm(dim=1) / 200
        assert ((packed.linear(x, strips) - wanted).abs() <= most).all()
        assert ((packed.linear(x, strips, bias) - wanted - bias).abs() <= most + bias.abs() / 100).all()
        error = (strips.rows(torch.arange(N).flip(0)) - exact.flip(0)).abs()
        assert (error <= exact.flip(0).abs().amax(1, keepdim=True) / 100).all()


@pytest.mark.usefixtures("other_library")
def test_product_and_rows_match_float64_on_other_processors() -> None:
    for form in FORMS:
        test_product_and_rows_match_float64(form)


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize("form", FORMS)
def test_result_is_bitwise_independent_of_batch_on_all_processors(form: str) -> None:
    for group in (32, 64):
        weight, x = packed.pack_quantized(random(form, 70, 192, group)), torch.randn(300, 192).to(BF16)
        whole = packed.linear(x, weight)
        for count in (1, 2, 3, 8, 31, 32, 33, 65, 257):
            assert torch.equal(packed.linear(x[:count], weight), whole[:count])
            assert torch.equal(packed.linear(x[-count:], weight), whole[-count:])


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_stay_in_their_row(form: str) -> None:
    weight, x = packed.pack_quantized(random(form, 40, 96)), torch.randn(6, 96).to(BF16)
    clean = packed.linear(x, weight)
    x[1, 40], x[3, 95], x[4] = torch.nan, -torch.inf, 0
    out = packed.linear(x, weight)
    assert out[1].isnan().all()
    assert not out[3].isfinite().any()
    assert (out[4] == 0).all()
    assert torch.equal(out[[0, 2, 5]], clean[[0, 2, 5]])


def test_smallest_weights_and_activations_do_not_overflow() -> None:
    weight, x = quantize(torch.full((32, 64), 1e-39).to(BF16), 8), torch.full((4, 64), 1.0, dtype=BF16)
    assert packed.linear(x, packed.pack_quantized(weight)).abs().max() < 1e-36
    large, x = quantize(torch.full((32, 64), 1e30), 8), torch.zeros(4, 64, dtype=BF16)
    x[:, 5] = torch.tensor([1e-30, 1e-36, 3e-37, 1e-40])  # the inverse of the last two overflows
    out = packed.linear(x, packed.pack_quantized(large))
    assert torch.allclose(out[:2], (x[:2, 5:6] * 1e30).expand(2, 32), rtol=0.02)
    assert (out[2:] == 0).all()


def test_largest_codes_do_not_overflow() -> None:
    for form, sign in product(FORMS, (1, -1)):
        weight = random(form, 32, 64)
        weight.codes.fill_((1 << weight.bits) - 1)
        for table in weight.tables:
            table[0] = 1.9999  # rounds up to a power of two in float16
        x = torch.full((1, 64), sign * 3.0, dtype=BF16)
        error = packed.linear(x, packed.pack_quantized(weight)) - expected(x, weight)
        most = 3 * 64 * weight.scale.amax(1)  # overflow of int16: 1,500 times the scale
        assert (error.abs() <= most).all()
