"""C++ products of quantized weights: accuracy, bitwise independence of the batch, extreme values."""

from itertools import product

import pytest
import torch
from torch import Tensor

from nanospec.kernels import native
from nanospec.kernels.layer.quantized import GROUP, Quantized, quantize
from nanospec.kernels.native import packed

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C++ compiler: install g++")

BF16 = torch.bfloat16
FORMATS = list(product((8, 4), (False, True)))  # bits, and whether groups have a minimum


def random(bits: int, has_minima: bool, N: int, K: int) -> Quantized:
    """Return random codes with scales from 1.5 down to 5e-8."""
    generator = torch.Generator().manual_seed(N * K + bits)
    codes = torch.randint(1 << bits, (N, K), generator=generator, dtype=torch.uint8)
    sizes = 10.0 ** -torch.arange(N)[:, None].clamp(max=7)
    scale, minimum = (0.5 + torch.rand(2, N, K // GROUP, generator=generator)) * sizes
    return Quantized(codes, scale, -8 * minimum if has_minima else None, bits, torch.float64)


def expected(x: Tensor, weight: Quantized) -> Tensor:
    """Return the product in float64, with x [T, K] quantized to 8 bits in groups."""
    groups = x.double().unflatten(1, (-1, GROUP))
    unit = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / unit).round() * unit).flatten(1) @ weight.dequantize().T


@pytest.mark.parametrize(("bits", "has_minima"), FORMATS)
def test_product_and_rows_match_float64(bits: int, has_minima: bool) -> None:
    for N, K, T in ((1, 32, 8), (33, 96, 3), (70, 1056, 65), (2100, 64, 5)):
        weight = random(bits, has_minima, N, K)
        x, bias = torch.randn(T, K).to(BF16), torch.randn(N).to(BF16)
        strips, exact, wanted = packed.pack_quantized(weight), weight.dequantize(), expected(x, weight)
        most = x.double().norm(dim=1)[:, None] * exact.norm(dim=1) / 200
        assert ((packed.linear(x, strips) - wanted).abs() <= most).all()
        assert ((packed.linear(x, strips, bias) - wanted - bias).abs() <= most + bias.abs() / 100).all()
        error = (packed.rows(strips, torch.arange(N).flip(0)) - exact.flip(0)).abs()
        assert (error <= exact.flip(0).abs().amax(1, keepdim=True) / 100).all()


@pytest.mark.usefixtures("other_library")
def test_product_and_rows_match_float64_on_other_processors() -> None:
    for bits, has_minima in FORMATS:
        test_product_and_rows_match_float64(bits, has_minima)


@pytest.mark.usefixtures("other_library")
@pytest.mark.parametrize(("bits", "has_minima"), FORMATS)
def test_result_is_bitwise_independent_of_batch_on_all_processors(bits: int, has_minima: bool) -> None:
    weight, x = packed.pack_quantized(random(bits, has_minima, 70, 224)), torch.randn(300, 224).to(BF16)
    whole = packed.linear(x, weight)
    for count in (1, 2, 3, 8, 31, 32, 33, 65, 257):
        assert torch.equal(packed.linear(x[:count], weight), whole[:count])
        assert torch.equal(packed.linear(x[-count:], weight), whole[-count:])


@pytest.mark.parametrize(("bits", "has_minima"), FORMATS)
def test_nan_and_infinity_stay_in_their_row(bits: int, has_minima: bool) -> None:
    weight, x = packed.pack_quantized(random(bits, has_minima, 40, 96)), torch.randn(6, 96).to(BF16)
    clean = packed.linear(x, weight)
    x[1, 40], x[3, 95], x[4] = torch.nan, -torch.inf, 0
    out = packed.linear(x, weight)
    assert out[1].isnan().all()
    assert not out[3].isfinite().any()
    assert (out[4] == 0).all()
    assert torch.equal(out[[0, 2, 5]], clean[[0, 2, 5]])


def test_largest_codes_do_not_overflow() -> None:
    for (bits, has_minima), sign in product(FORMATS, (1, -1)):
        weight = random(bits, has_minima, 32, 64)
        weight.codes.fill_((1 << bits) - 1)
        x = torch.full((1, 64), sign * 3.0, dtype=BF16)
        error = packed.linear(x, packed.pack_quantized(weight)) - expected(x, weight)
        assert (
            error.abs() <= 3 * 64 * weight.scale.amax(1)
        ).all()  # overflow of int16: 1,500 times the scale


def test_quantize_rounds_to_nearest() -> None:
    weight = torch.randn(5000, 64) * torch.logspace(-9, 3, 5000)[:, None]
    weight[7] = 0
    groups = weight.unflatten(1, (-1, GROUP))
    spans = {8: 2 * groups.abs().amax(-1) / 254, 4: (groups.amax(-1) - groups.amin(-1)) / 15}
    for bits, step in spans.items():
        error = (quantize(weight, bits)._replace(dtype=torch.float32).dequantize() - weight).abs()
        assert (error.unflatten(1, (-1, GROUP)) <= 0.501 * step[..., None]).all()
    with pytest.raises(ValueError, match="48 columns cannot be quantized in groups of 32"):
        quantize(torch.zeros(2, 48), 8)
