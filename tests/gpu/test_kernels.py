"""Layer kernels on a GPU: bitwise independence of other rows, and comparison with float64.

`bench/gpu.py kernels` compares all kernels with `naive` for the shapes of real models."""

import pytest
import torch
from torch import Tensor

from nanospec.kernels.layer.linear import make_linear
from tests.kernels.layer.test_attention import CASES, check_independence, compare_with_naive
from tests.kernels.products import KINDS, Products
from tests.kernels.texts import Texts
from tests.random_weights import random_quantized
from tests.util import assert_close

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, FP16: 1e-3}

# (heads, KV heads, head dimension) of Qwen3-0.6B, Qwen3-8B, Phi-3-mini, StableLM and Gemma
HEADS = [(16, 8, 128), (32, 8, 128), (32, 32, 96), (32, 32, 80), (8, 1, 256)]
# (hidden, intermediate) of SmolLM2-135M, Qwen3-0.6B, Llama-3.2-1B and Qwen3-8B
WIDTHS = [(576, 1536), (1024, 3072), (2048, 8192), (4096, 12288)]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_matches_float64(name: str, dtype: torch.dtype, gpu: torch.device) -> None:
    compare_with_naive(CASES[name]._replace(dtype=dtype), TOLERANCE[dtype], gpu)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_bitwise_independent_of_the_batch(
    heads: tuple[int, int, int], window: int | None, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts.random([400, 3000, 75], heads, 16, BF16)
    check_independence(texts, 2980, window, monkeypatch, gpu, cached_before=(10, 30, 180))


def products_of(sizes: tuple[int, int], kind: str, T: int, dtype: torch.dtype, gpu: torch.device) -> Products:
    hidden, inner = sizes
    N, K = (hidden, inner) if kind == "linear_add" else (2 * inner, hidden)
    return Products(T, N, K, dtype, gpu)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_linear_matches_float64(widths: tuple[int, int], kind: str, gpu: torch.device) -> None:
    """The result is accurate for any number of rows. Rows are bitwise identical with every tiling: the order
    of sums in the instructions and the parts of K are fixed."""
    for dtype in (BF16, FP16):
        for T in (1, 5, 17, 63, 100, 320, 1100):
            products = products_of(widths, kind, T, dtype, gpu)
            assert_close(products.run(kind), products.expected(kind), TOLERANCE[dtype], f"{kind} of {T} rows")
    products = products_of(widths, kind, 1100, BF16, gpu)
    together = products.run(kind)
    some = ((0, 1), (3, 8), (100, 16), (200, 20), (60, 50), (301, 64), (7, 100), (200, 320), (511, 1))
    for first, count in some:
        rows = slice(first, first + count)
        assert torch.equal(products.run(kind, rows), together[rows]), rows
    for _ in range(50):  # a race between the parts of K would change the result
        assert torch.equal(products.run(kind), together)


def test_layers_run_on_two_streams_at_once(gpu: torch.device) -> None:
    """The layers of two engines have counters of their own, so neither adds up parts of K too early."""
    streams, layers = [torch.cuda.Stream(gpu) for _ in range(2)], []
    for seed in range(2):
        torch.manual_seed(seed)
        x, weight = (torch.randn(n, 12288, device=gpu, dtype=BF16) for n in (5, 1024))
        layers.append((make_linear(weight), x))
    expected = [layer(x) for layer, x in layers]
    torch.cuda.synchronize(gpu)
    outs: list[list[Tensor]] = [[], []]
    for _ in range(200):
        for stream, (layer, x), out in zip(streams, layers, outs, strict=True):
            with torch.cuda.stream(stream):
                out.append(layer(x))
    torch.cuda.synchronize(gpu)
    for want, found in zip(expected, outs, strict=True):
        assert all(torch.equal(one, want) for one in found)


@pytest.mark.parametrize("group", [32, 128, 2048])
@pytest.mark.parametrize("form", ["int4", "int4-min", "int8", "int8-min", "fp8"])
def test_quantized_linear_matches_float64(form: str, group: int, gpu: torch.device) -> None:
    """The order of columns in storage is that of the instructions, and no tiling changes a result."""
    for kind, dtype in (("norm_swiglu", BF16), ("linear_add", FP16)):
        weight = random_quantized(form, 1028, 2048, group, 2.0**-4, dtype).to(gpu, dtype)
        products = Products(1100, 1028, 2048, dtype, gpu).of(weight)
        together = products.run(kind)
        assert_close(together, products.expected(kind), TOLERANCE[dtype], kind)
        for first, count in ((0, 1), (3, 8), (200, 20), (301, 64), (7, 100), (200, 320)):
            rows = slice(first, first + count)
            assert torch.equal(products.run(kind, rows), together[rows]), rows


def test_layer_under_graph_capture(gpu: torch.device) -> None:
    """A step's kernels can be captured and replayed, including split products with their counters."""
    products = {kind: products_of(WIDTHS[1], kind, 5, BF16, gpu) for kind in KINDS}

    def layer() -> Tensor:
        return torch.cat([product.run(kind).flatten() for kind, product in products.items()])

    expected = layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
