"""Layer kernels on a GPU: comparison of bf16 and fp16 with float64, and bitwise independence of other rows.

Shapes are those of real models, to test the configurations used in production.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import forced
from nanospec.kernels.layer.residual import Norm, rms_norm
from nanospec.kernels.layer.rope_cache import rope_cache
from nanospec.kernels.speculation import kv_move
from nanospec.kernels.speculation.verify import Verdict
from tests.kernels.products import KINDS, Products
from tests.kernels.texts import Texts, divide, random_trees, tokens_at
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


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", ["few-padded", "few-packed", "prompts"])
@pytest.mark.parametrize("model", MODELS)
def test_attention(
    model: str, layout: str, dtype: torch.dtype, window: int | None, gpu: torch.device
) -> None:
    shape, padded = PROMPTS if layout == "prompts" else FEW, layout == "few-padded"
    texts = Texts.random([base + n for base, n in shape], MODELS[model][0], 16, dtype)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    out = texts.attend(parts, window, gpu, padded=padded)
    assert_close(out, texts.expected(parts, window, padded=padded), TOLERANCE[dtype], model)


@pytest.mark.parametrize("nodes", [5, 16, 64])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b", "phi-3-mini"])
def test_tree_attention(model: str, nodes: int, gpu: torch.device) -> None:
    parts = [(0, 300, nodes), (1, 0, nodes // 2), (2, 126, 1)]
    texts = Texts.random([base + n for _, base, n in parts], MODELS[model][0], 16, BF16)
    trees = random_trees([n for _, _, n in parts], nodes)
    out = texts.attend(parts, device=gpu, trees=trees)
    assert_close(out, texts.expected(parts, trees=trees), TOLERANCE[BF16])


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
    assert torch.equal(attend((1, 2970, 25))[10:18], verified)
    assert torch.equal(attend((1, 2980, 8), trees=[[-1, 0, 1, 2, 3, 4, 5, 6]]), verified)
    for first, n in ((2970, 30), (2950, 50), (2800, 200)):  # prompt chunks
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
    for dtype in (BF16, FP16):
        for T in (1, 5, 17, 63, 100, 320, 1100):
            products = products_of(model, kind, T, dtype, gpu)
            what = f"{kind} of {T} rows"
            assert_close(products.run(kind), products.expected(kind), TOLERANCE[dtype], what)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", DENSE)
def test_linear_is_bitwise_independent_of_batch(model: str, kind: str, gpu: torch.device) -> None:
    """Every tiling gives bitwise identical rows, given the instruction's order and fixed parts of K."""
    products = products_of(model, kind, 1100, BF16, gpu)
    together = products.run(kind)
    some = ((0, 1), (3, 8), (100, 16), (200, 20), (60, 50), (301, 64), (7, 100), (200, 320), (511, 1))
    for first, count in some:
        rows = slice(first, first + count)
        assert torch.equal(products.run(kind, rows), together[rows]), rows
    for _ in range(50):  # a race between the parts of K would change the result
        assert torch.equal(products.run(kind), together)


def test_norm(gpu: torch.device) -> None:
    for width in (100, 576, 4096, 8192):
        x, weight = torch.randn(33, width, device=gpu).to(BF16), torch.randn(width, device=gpu).to(BF16)
        out = rms_norm(x, Norm(weight, 1e-6))
        with forced("naive"):
            assert_close(out, rms_norm(x.double(), Norm(weight.double(), 1e-6)), 4e-3)
        assert torch.equal(rms_norm(x[5:6], Norm(weight, 1e-6))[0], out[5])


@pytest.mark.parametrize("model", MODELS)
def test_rope_cache(model: str, gpu: torch.device) -> None:
    heads, kv_heads, head_dim = MODELS[model][0]
    T = 37
    qkv = torch.randn(T, (heads + 2 * kv_heads) * head_dim, device=gpu).to(BF16)
    turns = torch.randn(100, head_dim // 2, device=gpu)
    weights = torch.randn(2, head_dim, device=gpu).to(BF16)
    slots = torch.randperm(160, device=gpu)[:T].int()
    slots[::5] = -1
    batch = tokens_at(torch.randint(0, 100, (T,), dtype=torch.int32, device=gpu), slots)

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cache = torch.full((2, kv_heads, 10, 16, head_dim), float("nan"), device=gpu, dtype=dtype)
        angles = torch.cat((turns.cos(), turns.sin()), 1)[batch.positions]
        q_norm, k_norm = (Norm(weight, 1e-6) for weight in weights.to(dtype))
        return rope_cache(qkv.to(dtype), cache, batch, angles, (q_norm, k_norm)), cache

    q, cache = run(BF16)
    with forced("naive"):
        expected_q, expected_cache = run(torch.float64)
    assert_close(q, expected_q, 4e-3, "q")
    assert torch.equal(cache.isnan(), expected_cache.isnan())
    assert_close(cache.nan_to_num(), expected_cache.nan_to_num(), 4e-3, "cache")


def test_kv_move(gpu: torch.device) -> None:
    B, width = 9, 8
    table = torch.randperm(B * 4, device=gpu).int().view(B, 4)
    base = torch.randint(0, 40, (B,), dtype=torch.int32, device=gpu)
    batch = replace(tokens_at(base, base), block_table=table, base_len=base, max_q_len=width)
    nodes = torch.rand(B, 23, device=gpu).argsort(1)[:, : width - 1].sort(1)[0] + 1
    path = torch.cat((torch.zeros_like(nodes[:, :1]), nodes), 1).int()
    count = torch.randint(0, width + 1, (B,), dtype=torch.int32, device=gpu)
    verdict = Verdict(report=path, num_emitted=count, path=path)
    cache = torch.randn(3, 2, 4, B * 4, 16, 96, device=gpu).to(BF16)
    expected = cache.clone()
    kv_move.naive(expected, verdict, batch)
    kv_move.kv_move(cache, verdict, batch)
    assert torch.equal(cache, expected)


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
