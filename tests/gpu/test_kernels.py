"""Layer kernels on a GPU: comparison of bf16 and fp16 with float64, and bitwise independence of other rows.

Shapes are those of real models, to test the configurations used in production. The other kernels are compared
by `bench/gpu.py kernels`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.products import KINDS, Products
from tests.kernels.texts import Texts, divide, random_trees
from tests.util import assert_close

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, FP16: 1e-3}

# (heads, KV heads, head dimension), hidden, intermediate
MODELS = {
    "smollm2-135m": ((9, 3, 64), 576, 1536),
    "qwen3-0.6b": ((16, 8, 128), 1024, 3072),
    "llama-3.2-1b": ((32, 8, 64), 2048, 8192),
    "qwen3-8b": ((32, 8, 128), 4096, 12288),
    "phi-3-mini": ((32, 32, 96), 3072, 8192),
    "stablelm-d80": ((32, 32, 80), 2560, 6912),
    "gemma-mqa-d256": ((8, 1, 256), 2048, 16384),
}
DENSE = ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"]

# (cached tokens, queries) of each row
FEW = [(2000, 5), (0, 1), (63, 2), (7, 0), (511, 5), (130, 8)]
PROMPTS = [(0, 300), (77, 130), (500, 1), (3, 0)]
TREES = [(300, 64), (0, 5), (126, 1), (40, 16)]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", ["few-padded", "few-packed", "prompts", "trees"])
@pytest.mark.parametrize("model", MODELS)
def test_attention(model: str, layout: str, dtype: torch.dtype, gpu: torch.device) -> None:
    shape = {"prompts": PROMPTS, "trees": TREES}.get(layout, FEW)
    trees = random_trees([n for _, n in shape], 1) if layout == "trees" else None
    texts = Texts.random([base + n for base, n in shape], MODELS[model][0], 16, dtype)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    for window in (None, 100):
        out = texts.attend(parts, window, gpu, padded=layout == "few-padded", trees=trees)
        expected = texts.expected(parts, window, padded=layout == "few-padded", trees=trees)
        assert_close(out, expected, TOLERANCE[dtype], f"{model} with window {window}")


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("model", MODELS)
def test_attention_is_bitwise_independent_of_batch(
    model: str, window: int | None, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, with K = 0, when verifying drafts; split by tiles or spans."""
    texts = Texts.random([400, 3000, 75], MODELS[model][0], 16, BF16)

    def attend(*parts: tuple[int, int, int], **layout: object) -> Tensor:
        return texts.attend(parts, window, gpu, **layout)

    verified = attend((1, 2980, 8))
    for i in range(8):
        assert torch.equal(attend((1, 2980 + i, 1))[0], verified[i]), i
    batch = attend((0, 390, 3), (1, 2983, 5), (2, 0, 1))
    assert torch.equal(batch[3:8], verified[3:])
    assert torch.equal(attend((1, 2980, 8), trees=[[-1, 0, 1, 2, 3, 4, 5, 6]]), verified)
    for first, n in ((2970, 25), (2950, 50), (2800, 200)):  # prompt chunks
        assert torch.equal(attend((1, first, n))[2980 - first :][:8], verified), (first, n)
    for division in ((1, 0), (3, 0), (128, 128)):
        divide(monkeypatch, *division)
        assert torch.equal(attend((1, 2980, 8)), verified), division
        assert torch.equal(attend((1, 2800, 200))[180:188], verified), division


def products_of(model: str, kind: str, T: int, dtype: torch.dtype, device: torch.device) -> Products:
    _, hidden, inner = MODELS[model]
    N, K = (hidden, inner) if kind == "linear_add" else (2 * inner, hidden)
    return Products(T, N, K, dtype, device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", DENSE)
def test_linear(model: str, kind: str, gpu: torch.device) -> None:
    """Accurate for any number of rows. With every tiling, rows are bitwise identical, given the instruction's
    order and fixed parts of K."""
    for dtype in (BF16, FP16):
        for T in (1, 5, 17, 63, 100, 320, 1100):
            products = products_of(model, kind, T, dtype, gpu)
            assert_close(products.run(kind), products.expected(kind), TOLERANCE[dtype], f"{kind} of {T} rows")
    products = products_of(model, kind, 1100, BF16, gpu)
    together = products.run(kind)
    some = ((0, 1), (3, 8), (100, 16), (200, 20), (60, 50), (301, 64), (7, 100), (200, 320), (511, 1))
    for first, count in some:
        rows = slice(first, first + count)
        assert torch.equal(products.run(kind, rows), together[rows]), rows
    for _ in range(50):  # a race between the parts of K would change the result
        assert torch.equal(products.run(kind), together)


def test_layer_under_graph_capture(gpu: torch.device) -> None:
    """A step's kernels can be captured and replayed, including split products with their counters."""
    products = {kind: products_of("qwen3-0.6b", kind, 5, BF16, gpu) for kind in KINDS}

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
