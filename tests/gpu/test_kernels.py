"""The kernels of a layer on a GPU: bf16 and fp16 against float64, and bits that depend on the row alone.

Shapes are those of real models, so that the configurations that production uses are what is tested.
"""

from __future__ import annotations

import copy
import random
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.layer import attention, linear, norm, rope_cache, split_kv
from nanospec.kernels.speculation import kv_move
from tests.kernels.texts import Texts, scored
from tests.util import assert_close

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 8e-3, FP16: 1e-3}

# heads, KV heads, head dimension, hidden, intermediate
MODELS = {
    "smollm2-135m": (9, 3, 64, 576, 1536),
    "qwen3-0.6b": (16, 8, 128, 1024, 3072),
    "llama-3.2-1b": (32, 8, 64, 2048, 8192),
    "qwen3-8b": (32, 8, 128, 4096, 12288),
    "phi-3-mini": (32, 32, 96, 3072, 8192),
    "stablelm-d80": (32, 32, 80, 2560, 6912),
    "gemma-mqa-d256": (8, 1, 256, 2048, 16384),
}


Tensors = TypeVar("Tensors", Texts, Batch)


def to(thing: Tensors, device: torch.device) -> Tensors:
    """A copy with all tensors on `device`."""
    moved = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, Tensor):
            setattr(moved, name, value.to(device))
    return moved


def attend(
    texts: Texts, parts: list, device: torch.device, window: int | None = None, **layout: object
) -> Tensor:
    """The kernel's output for the scored tokens, on the CPU."""
    rows, q = texts.rows(parts, **layout)  # type: ignore[arg-type]
    on_gpu, cache = to(rows, device), to(texts, device)
    out = attention.attention(q.to(device), cache.k_cache, cache.v_cache, on_gpu, 0.1, window)
    return scored(rows, out.cpu())


def reference(texts: Texts, parts: list, window: int | None = None, **layout: object) -> Tensor:
    texts = texts.clean()
    rows, q = texts.rows(parts, **layout)  # type: ignore[arg-type]
    return scored(rows, attention.naive(q.nan_to_num(), texts.k_cache, texts.v_cache, rows, 0.1, window))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_attention(model: str, dtype: torch.dtype, window: int | None, gpu: torch.device) -> None:
    heads, kv_heads, head_dim, _, _ = MODELS[model]
    shape = [(2000, 5), (0, 1), (63, 2), (7, 0), (511, 5), (130, 8)]
    texts = Texts.random([base + n for base, n in shape], heads, kv_heads, head_dim, 16, dtype)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    for padded in (True, False):
        out = attend(texts, parts, gpu, window, padded=padded)
        assert_close(out, reference(texts, parts, window, padded=padded), TOLERANCE[dtype], model)


@pytest.mark.parametrize("nodes", [5, 16, 64])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b", "phi-3-mini"])
def test_tree_attention(model: str, nodes: int, gpu: torch.device) -> None:
    heads, kv_heads, head_dim, _, _ = MODELS[model]
    rng = random.Random(nodes)
    shape = [(300, nodes), (0, nodes // 2), (126, 1)]
    texts = Texts.random([base + n for base, n in shape], heads, kv_heads, head_dim, 16, BF16)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    trees = [[-1] + [rng.randrange(i) for i in range(1, n)] for _, n in shape]
    out = attend(texts, parts, gpu, trees=trees)
    assert_close(out, reference(texts, parts, trees=trees), TOLERANCE[BF16])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_prefill(model: str, dtype: torch.dtype, window: int | None, gpu: torch.device) -> None:
    heads, kv_heads, head_dim, _, _ = MODELS[model]
    shape = [(0, 300), (77, 130), (500, 1), (3, 0)]
    texts = Texts.random([base + n for base, n in shape], heads, kv_heads, head_dim, 16, dtype)
    parts = [(b, base, n) for b, (base, n) in enumerate(shape)]
    out = attend(texts, parts, gpu, window, padded=False)
    assert_close(out, reference(texts, parts, window, padded=False), TOLERANCE[dtype], model)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("model", MODELS)
def test_attention_bits(
    model: str, window: int | None, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, with K = 0, as a row of a verification; on tiles or on spans."""
    heads, kv_heads, head_dim, _, _ = MODELS[model]
    texts = Texts.random([400, 3000, 75], heads, kv_heads, head_dim, 16, BF16)
    verified = attend(texts, [(1, 2980, 8)], gpu, window)
    for i in range(8):
        assert torch.equal(attend(texts, [(1, 2980 + i, 1)], gpu, window)[0], verified[i]), i
    batch = attend(texts, [(0, 390, 3), (1, 2983, 5), (2, 0, 1)], gpu, window)
    assert torch.equal(batch[3:8], verified[3:])
    many = attend(texts, [(1, 2970, 25)], gpu, window)
    assert torch.equal(many[10:18], verified)
    tree = attend(texts, [(1, 2980, 8)], gpu, window, trees=[[-1, 0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(tree, verified)
    for programs in (1, 3, 8192):
        monkeypatch.setattr(split_kv, "PROGRAMS", programs)
        assert torch.equal(attend(texts, [(1, 2980, 8)], gpu, window), verified), programs


class Products:
    """The four products of a layer and one with a bias, with random weights on the GPU."""

    KINDS = ("linear_bias", "linear_add", "norm_linear", "norm_swiglu")

    def __init__(self, hidden: int, inner: int, T: int, dtype: torch.dtype, device: torch.device) -> None:
        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=device).to(dtype)

        self.x = (normal(T, hidden) * torch.linspace(0.1, 3, T, device=device)[:, None]).to(dtype)
        self.wide, self.residual, self.scale = normal(T, inner), normal(T, hidden), normal(hidden)
        self.up = normal(2 * inner, hidden) / hidden**0.5
        self.down = normal(hidden, inner) / inner**0.5
        self.bias = normal(2 * inner)

    def run(self, kind: str, rows: slice = slice(None), exact: bool = False) -> Tensor:
        def t(tensor: Tensor) -> Tensor:
            return tensor.double() if exact else tensor

        x, scale = t(self.x[rows]), t(self.scale)
        if exact:
            normed = norm.naive(x, scale, 1e-6)
            if kind == "linear_bias":
                return linear.naive(x, t(self.up), t(self.bias))
            if kind == "linear_add":
                return linear.naive_add(t(self.wide[rows]), t(self.down), t(self.residual[rows]))
            if kind == "norm_linear":
                return linear.naive(normed, t(self.up))
            return linear.naive_swiglu(normed, t(self.up))
        if kind == "linear_bias":
            return linear.linear(x, self.up, self.bias)
        if kind == "linear_add":
            return linear.linear_add(self.wide[rows], self.down, self.residual[rows])
        if kind == "norm_linear":
            return linear.norm_linear(x, scale, 1e-6, self.up)
        return linear.norm_swiglu(x, scale, 1e-6, self.up)


@pytest.mark.parametrize("kind", Products.KINDS)
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"])
def test_linear(model: str, kind: str, gpu: torch.device) -> None:
    _, _, _, hidden, inner = MODELS[model]
    for dtype in (BF16, FP16):
        for T in (1, 5, 17, 63, 100, 320, 1100):
            products = Products(hidden, inner, T, dtype, gpu)
            out = products.run(kind)
            assert_close(out, products.run(kind, exact=True), TOLERANCE[dtype], f"{kind} of {T} rows")


@pytest.mark.parametrize("kind", Products.KINDS)
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"])
def test_linear_bits(model: str, kind: str, gpu: torch.device) -> None:
    """Every width of the tile of tokens gives a row the same bits: the instruction's promise."""
    _, _, _, hidden, inner = MODELS[model]
    products = Products(hidden, inner, linear.MAX_ROWS, BF16, gpu)
    together = products.run(kind)
    for first, count in ((0, 1), (3, 8), (100, 16), (200, 20), (60, 50), (301, 64), (7, 100), (511, 1)):
        rows = slice(first, first + count)
        assert torch.equal(products.run(kind, rows), together[rows]), rows
    for _ in range(50):  # a race between the parts of K would show as a moving result
        assert torch.equal(products.run(kind), together)


def test_norm(gpu: torch.device) -> None:
    for width in (100, 576, 4096, 8192):
        x, weight = torch.randn(33, width, device=gpu).to(BF16), torch.randn(width, device=gpu).to(BF16)
        out = norm.rms_norm(x, weight, 1e-6)
        assert_close(out, norm.naive(x.double(), weight.double(), 1e-6), 4e-3)
        assert torch.equal(norm.rms_norm(x[5:6], weight, 1e-6)[0], out[5])


@pytest.mark.parametrize("model", MODELS)
def test_rope_cache(model: str, gpu: torch.device) -> None:
    heads, kv_heads, head_dim, _, _ = MODELS[model]
    T = 37
    qkv = torch.randn(T, (heads + 2 * kv_heads) * head_dim, device=gpu).to(BF16)
    angles = torch.randn(100, head_dim // 2, device=gpu)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    norms = torch.randn(2, head_dim, device=gpu).to(BF16)
    empty = torch.zeros(1, dtype=torch.int32, device=gpu)
    slots = torch.randperm(160, device=gpu)[:T].int()
    slots[::5] = -1
    rows = Batch(
        torch.randint(0, 100, (T,), dtype=torch.int32, device=gpu),
        slots,
        empty[None],
        empty,
        empty,
        empty,
        T,
        T,
    )
    cache = torch.full((2, kv_heads, 10, 16, head_dim), float("nan"), device=gpu, dtype=BF16)
    q = rope_cache.rope_cache(qkv, cos_sin, cache[0], cache[1], rows, *norms)
    expected_cache = torch.full(cache.shape, float("nan"), device=gpu, dtype=torch.float64)
    expected_q = rope_cache.naive(
        qkv.double(), cos_sin, expected_cache[0], expected_cache[1], rows, *norms.double()
    )
    assert_close(q, expected_q, 4e-3, "q")
    assert torch.equal(cache.isnan(), expected_cache.isnan())
    assert_close(cache.nan_to_num(), expected_cache.nan_to_num(), 4e-3, "cache")


def test_kv_move(gpu: torch.device) -> None:
    B, width = 9, 8
    table = torch.randperm(B * 4, device=gpu).int().view(B, 4)
    base = torch.randint(0, 40, (B,), dtype=torch.int32, device=gpu)
    rows = Batch(base, base, table, base, base, base, width, 64)
    nodes = torch.rand(B, 23, device=gpu).argsort(1)[:, : width - 1].sort(1)[0] + 1
    path = torch.cat((torch.zeros_like(nodes[:, :1]), nodes), 1).int()
    count = torch.randint(0, width + 1, (B,), dtype=torch.int32, device=gpu)
    cache = torch.randn(3, 2, 4, B * 4, 16, 96, device=gpu).to(BF16)
    expected = cache.clone()
    kv_move.naive(expected, path, count, rows)
    kv_move.kv_move(cache, path, count, rows)
    assert torch.equal(cache, expected)


def test_layer_under_graph_capture(gpu: torch.device) -> None:
    """What a step launches can be captured and replayed, split products with their tickets included."""
    _, _, _, hidden, inner = MODELS["qwen3-0.6b"]
    products = Products(hidden, inner, 5, BF16, gpu)

    def layer() -> Tensor:
        return torch.cat([products.run(kind).flatten() for kind in Products.KINDS])

    expected = layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
