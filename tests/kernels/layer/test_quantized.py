"""Quantized weights: their arithmetic, their layout for the kernel, and products with the kernel."""

import pytest
import torch
from torch import Tensor

from nanospec.config import SamplingParams
from nanospec.kernels.launch import GPUS, forced
from nanospec.kernels.layer.dequantize import pack_codes
from nanospec.kernels.layer.linear import TritonLinear, make_linear
from nanospec.kernels.layer.quantized import Quantized, as_integers, concatenate, quantize
from nanospec.models.decoder import Model
from tests.drive import Job, make_engine, run
from tests.kernels.products import Products
from tests.random_weights import random_quantized, random_weights
from tests.tiny import tiny_config
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")

FP16, FP32 = torch.float16, torch.float32
FORMS = ("int4", "int4-min", "int8", "int8-min", "fp8")
# Form, kind, (T, N, K), columns per group, dtype, GPU. K is a multiple of 128, 64 or only 32; with 1,536
# columns it has several parts, of which a program computes one or all. Groups of 96 are stored as 32.
CASES = [
    ("int4", "linear_bias", (1, 66, 96), 32, FP32, "sm_90"),
    ("int4-min", "linear_add", (3, 72, 1536), 128, FP16, "sm_86"),
    ("int4-min", "geglu", (33, 72, 192), 96, FP32, "sm_80"),
    ("int4", "norm_swiglu", (17, 100, 576), 576, FP16, "gfx942"),
    ("int8", "norm_linear", (5, 33, 384), 32, FP16, "sm_100"),
    ("int8-min", "linear_add", (70, 65, 224), 32, FP32, "sm_120"),
    ("int8", "linear", (260, 64, 1536), 64, FP16, "sm_89"),
    ("int8-min", "norm_swiglu", (2, 66, 320), 320, FP32, "sm_90"),
    ("fp8", "linear_add", (4, 64, 1536), 1536, FP32, "sm_90"),
    ("fp8", "norm_swiglu", (33, 66, 160), 32, FP16, "sm_86"),
    ("fp8", "linear", (6, 50, 256), 128, FP16, "gfx942"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "kind", "shape", "group", "dtype", "target"), CASES, ids=str)
def test_product_matches_dequantized_weight(
    form: str, kind: str, shape: tuple[int, int, int], group: int, dtype: torch.dtype, target: str
) -> None:
    products = Products(*shape, dtype).of(random_quantized(form, *shape[1:], group, 2.0**-4))
    with forced(gpu=GPUS[target]):
        out = products.run(kind)
    assert out.dtype == dtype
    rounded = dtype == FP16 or form == "int8-min"  # whose shifts have 16 bits
    assert_close(out, products.expected(kind), 1e-3 if rounded else 1e-6, kind)


@pytest.mark.parametrize("form", FORMS)
def test_packed_rows_are_the_weight(form: str) -> None:
    """Values of 2^-40 would underflow in float16."""
    for K, group, words in ((96, 96, 1), (192, 96, 6), (256, 128, 2)):
        weight = random_quantized(form, 7, K, group, 2.0**-40)
        packed, ids = pack_codes(weight), torch.tensor([6, 0, 0, 3], dtype=torch.int32)
        exact = 0 if form != "int8-min" else 1e-3  # whose shifts are rounded to 16 bits
        assert_close(packed.rows(ids), weight.dequantize()[ids.long()], exact)
        assert packed.shape == weight.shape
        assert packed.words.shape == (words, 7)
        with forced("triton"):
            linear = make_linear(weight, torch.zeros(7))
        assert isinstance(linear, TritonLinear)
        assert linear.unpacked_weight is None
        stored = -(-K // 64) * 64  # 96 columns take the memory of 128
        assert linear.nbytes == 7 * (stored * weight.bits // 8 + 4 * words)
        weight.tables[-1][0] = 1.9999 * 2.0**-40  # rounds up to a power of two in float16
        assert_close(pack_codes(weight).rows(torch.arange(7)), weight.dequantize(), 1e-3)


@pytest.mark.parametrize(("bits", "levels"), [(8, 254), (4, 15)])
def test_quantize_rounds_to_nearest(bits: int, levels: int) -> None:
    """Test more rows than are quantized at once."""
    exact = torch.randn(5000, 3, 32) * torch.logspace(-9, 3, 5000)[:, None, None] + 1e-9
    exact[0, 0], exact[1, 1] = 0, 1e-30
    weight = quantize(exact.flatten(1), bits)
    span = exact.amax(-1) - exact.amin(-1) if bits == 4 else 2 * exact.abs().amax(-1)
    error = (weight.dequantize().view_as(exact) - exact).abs().amax(-1)
    assert weight.dtype == FP32
    assert (weight.minimum is None) == (bits == 8)
    assert [quantize(torch.randn(2, K), bits).group for K in (128, 96)] == [64 if bits == 8 else 32, 32]
    assert (error <= span / levels * 0.501 + 1e-6 * exact.abs().amax(-1)).all()
    assert error.max() > span.max() / levels * 0.3  # no finer than its bits
    with pytest.raises(ValueError, match="100 columns, not a multiple of 32"):
        quantize(torch.ones(2, 100), bits)


def test_concatenated_weights_keep_their_values() -> None:
    """Rows with other bits, groups, or minima, as in files with mixed formats."""
    parts = [random_quantized(form, 3, 192, group) for form, group in zip(FORMS[:4], (64, 32, 192, 96))]
    both = concatenate(parts)
    assert (both.bits, both.group, both.shape) == (8, 32, (12, 192))
    assert torch.equal(both.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(both.rows(slice(3, 9)).dequantize(), both.dequantize()[3:9])
    symmetric = concatenate([parts[0], parts[0].regrouped(32), random_quantized("int4", 3, 192, 96)])
    assert (symmetric.minimum, symmetric.group) == (None, 32)
    assert torch.equal(symmetric.dequantize()[:6], parts[0].dequantize().repeat(2, 1))
    odd = concatenate([parts[0], parts[3]])  # groups of 64 and 96
    assert isinstance(odd, Quantized)
    assert torch.equal(odd.dequantize()[3:], parts[3].dequantize())
    float8 = random_quantized("fp8", 3, 192, 64)
    mixed, limit = concatenate([float8, parts[2]]), as_integers(float8).regrouped(1).scale
    assert isinstance(mixed, Quantized)
    assert ((mixed.dequantize()[:3] - float8.dequantize()).abs() <= 0.501 * limit).all()
    assert torch.equal(mixed.dequantize()[3:], parts[2].dequantize())
    dense = concatenate([parts[1], torch.ones(1, 192)])
    assert torch.equal(dense, torch.cat([parts[1].dequantize(), torch.ones(1, 192)]))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_outputs_with_and_without_guessing_are_those_of_the_dequantized_model(bits: int) -> None:
    """In the interpreter, with tied embeddings in 8 bits."""
    config = tiny_config(tie_word_embeddings=True, num_layers=1)

    def model(dense: bool) -> Model:
        get = random_weights(config, FP32, "cpu", seed=3)

        def quantized(name: str) -> Tensor | Quantized:
            if (weight := get(name)).dim() == 1:
                return weight
            stored = quantize(weight, 8 if "embed" in name else bits)
            stored = stored._replace(scale=stored.scale.bfloat16().float())  # exact in float16
            return stored.dequantize() if dense else stored

        return Model(config, FP32, "cpu", quantized)

    greedy, seeded = (SamplingParams(temperature=t, seed=4, max_tokens=6) for t in (0, 1))
    jobs = [Job([5, 9, 33, 5, 9, 33, 5, 9], greedy), Job([40, 41, 7], seeded)]
    expected = [request.output_ids for request in run(make_engine(model(dense=True), None), jobs)]
    with forced("triton"):
        for k in (None, 3):
            requests = run(make_engine(model(dense=False), k), jobs)
            assert [request.output_ids for request in requests] == expected
        assert sum(request.stats.num_drafted for request in requests) > 0
