"""The kernels of a decoder layer at the shapes of real models."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import Built, Call, Case
from nanospec.device.graphs import MAX_STEP_TOKENS
from nanospec.kernels.batch import MAX_QUERIES, Batch
from nanospec.kernels.layer.attention import attention
from nanospec.kernels.layer.linear import make_linear, multiplies_quantized
from nanospec.kernels.layer.quantized import Quantized
from nanospec.kernels.layer.residual import Norm, embed, residual_add, rms_norm
from nanospec.kernels.layer.rope_cache import rope_cache
from nanospec.kernels.speculation.kv_move import kv_move
from nanospec.kernels.speculation.verify import Verdict

BF16 = torch.bfloat16
BLOCK_SIZE = 16
FORMATS = {"int4-g128": (4, 128), "int4-g32": (4, 32), "int8": (8, 64), "fp8": (8, None)}  # bits, group


@dataclass(frozen=True)
class Shape:
    """The properties of a model that its kernels depend on."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool = False
    window: int | None = None
    softcap: float | None = None


SMOLLM2 = Shape("smollm2-135m", 576, 1536, 9, 3, 64, 49152)
QWEN3_SMALL = Shape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936, qk_norm=True)
LLAMA_1B = Shape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256)
QWEN3_8B = Shape("qwen3-8b", 4096, 12288, 32, 8, 128, 151936, qk_norm=True)
MODELS = (SMOLLM2, QWEN3_SMALL, LLAMA_1B, QWEN3_8B)

# Other head dimensions and group sizes.
PHI = Shape("phi-3-mini", 3072, 8192, 32, 32, 96, 32064, window=2047)
STABLE = Shape("stablelm-d80", 2560, 6912, 32, 32, 80, 50304)
GEMMA = Shape("gemma-2b-mqa-d256", 2048, 16384, 8, 1, 256, 256000)

# Models with norms after attention and MLP, GeGLU, float32 norm weights, or logit soft-capping.
GEMMA2 = Shape("gemma-2-2b", 2304, 9216, 8, 4, 256, 256000, window=4096, softcap=50.0)
GEMMA2_LARGE = Shape("gemma-2-27b", 4608, 36864, 32, 16, 128, 256000, softcap=50.0)
GEMMA3 = Shape("gemma-3-4b", 2560, 10240, 8, 4, 256, 262208, qk_norm=True, window=1024)


def cases() -> Iterator[Case]:
    norms_and_attention = norm_cases(), attention_cases()
    products = linear_cases(), quantized_cases()
    return chain(*norms_and_attention, *products, rope_cases(), gemma_cases(), move_cases(), sum_cases())


def normal(device: str, *size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(size, device=device, dtype=dtype)


def norm_cases() -> Iterator[Case]:
    for width, rows in product((576, 1024, 2048, 4096, 8192), (1, 320)):

        def build(device: str, width: int = width, rows: int = rows) -> Built:
            x, norm = normal(device, rows, width), make_norm(device, width)
            return Built(lambda: rms_norm(x, norm))

        yield Case("rms_norm", f"H{width}-T{rows}", build, bytes=(2 * rows + 1) * width * 2)

        def embedding(device: str, width: int = width, rows: int = rows) -> Built:
            table, norm = normal(device, rows, width), make_norm(device, width)
            ids, used = torch.arange(rows, device=device), in_use(device, rows)
            return Built(lambda: embed(ids, table, norm, num_used=used))

        yield Case("embed", f"H{width}-T{rows}", embedding, bytes=(3 * rows + 1) * width * 2)


def make_norm(device: str, width: int) -> Norm:
    return Norm(normal(device, width), 1e-6)


def make_batch(device: str, B: int, Q: int, length: int, tree: bool = False) -> Batch:
    """Return a batch of B rows with Q queries after `length - Q` cached tokens, in blocks of random order."""
    blocks = -(-length // BLOCK_SIZE)
    table = torch.randperm(B * blocks, device=device).int().view(B, blocks)
    start = torch.arange(B, device=device, dtype=torch.int32) * Q
    place = torch.arange(Q, device=device, dtype=torch.int32)
    positions = (length - Q + place).repeat(B)
    slots = table[:, positions[:Q].long() // BLOCK_SIZE] * BLOCK_SIZE + positions[:Q] % BLOCK_SIZE
    ancestors = None
    if tree:  # a chain in the format of a tree
        ancestors = ((torch.ones_like(place, dtype=torch.int64) << (place + 1)) - 1).repeat(B)
    rows, q_len = torch.arange(B, device=device, dtype=torch.int32), torch.full_like(start, Q)
    return Batch(
        rows=rows, input_ids=torch.zeros_like(positions), positions=positions, slots=slots.flatten(),
        block_table=table, q_start=start, q_len=q_len, base_len=torch.full_like(start, length - Q),
        max_q_len=Q, max_kv_len=length, ancestors=ancestors, prefill=Q > MAX_QUERIES,
    )  # fmt: skip


def make_cache(device: str, shape: Shape, batch: Batch, *layers: int) -> Tensor:
    """Return a random KV cache [*layers, 2, Hkv, num_blocks, block_size, D]."""
    size = (2, shape.kv_heads, batch.block_table.numel(), BLOCK_SIZE, shape.head_dim)
    return normal(device, *layers, *size)


def attention_cases() -> Iterator[Case]:
    for shape, B, length, Q in product((QWEN3_SMALL, QWEN3_8B), (1, 4, 16, 64), (1024, 4096, 16384), (1, 5)):
        yield attention_case(shape, B, Q, length)
    for shape in (SMOLLM2, LLAMA_1B, PHI, STABLE, GEMMA):
        yield attention_case(shape, 8, 5, 4096)
    yield attention_case(QWEN3_8B, 8, 16, 4096, tree=True)
    yield attention_case(PHI, 8, 16, 4096, tree=True)
    yield attention_case(QWEN3_8B, 64, 9, 4096)  # a larger K: wider tiles
    yield attention_case(QWEN3_8B, 64, 1, 16384, rest=512)  # one long row
    yield attention_case(QWEN3_8B, 1, 100, 4096)  # a short prompt chunk: split KV
    for shape in (*MODELS, PHI, GEMMA):  # prefill: the second half of a prompt
        yield attention_case(shape, 1, 2048, 4096)


def attention_case(
    shape: Shape, B: int, Q: int, length: int, tree: bool = False, rest: int | None = None
) -> Case:
    """Return attention of `Q` queries per row over `length` tokens, or `rest` in all rows but the first."""
    scale = shape.head_dim**-0.5
    has_peer = not (tree or rest or shape.window or shape.softcap)

    def build(device: str) -> Built:
        batch = make_batch(device, B, Q, length, tree)
        if rest is not None:
            batch.base_len[1:] = rest - Q
            batch.positions[Q:] += rest - length
        cache = make_cache(device, shape, batch)
        q = normal(device, B * Q, shape.heads, shape.head_dim)
        peers = sdpa(q, cache, batch, scale) if has_peer and device != "meta" else {}
        return Built(lambda: attention(q, cache, batch, shape.window, scale, shape.softcap), peers)

    seen = min(length, (shape.window or length) + Q)
    cached = seen + (B - 1) * (rest or seen)  # tokens of all rows
    kv = cached * shape.kv_heads * shape.head_dim * 2 * 2
    qo = 2 * B * Q * shape.heads * shape.head_dim * 2
    pairs = Q * (cached - B * (Q // 2))  # (query, key) pairs of a head
    label = f"{shape.name}-B{B}-q{Q}-L{length}{'-tree' * tree}{f'-L{rest}' if rest else ''}"
    flops = 4 * pairs * shape.heads * shape.head_dim
    return Case("attention", label, build, bytes=kv + qo, flops=flops, dots=True)


def sdpa(q: Tensor, cache: Tensor, batch: Batch, scale: float) -> dict[str, Call]:
    """Return torch's attention on contiguous keys and values, which are gathered outside of the timing.

    `sdpa` computes the same result. `sdpa_unmasked` uses no mask, so that torch can use its fastest kernel.
    """
    B, Q, length = batch.num_rows, batch.max_q_len, batch.max_kv_len
    _, kv_heads, _, _, head_dim = cache.shape
    blocks = cache.index_select(2, batch.block_table.flatten()).view(2, kv_heads, B, -1, head_dim)
    k, v = blocks.transpose(1, 2)[:, :, :, :length].contiguous()
    queries = q.view(B, Q, -1, head_dim).transpose(1, 2)
    i = torch.arange(Q, device=q.device)[:, None] + length - Q
    mask = torch.arange(length, device=q.device) <= i

    def call(attn_mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(queries, k, v, attn_mask, scale=scale, enable_gqa=True)

    if Q == 1:
        return {"sdpa": lambda: call(None)}
    return {"sdpa": lambda: call(mask), "sdpa_unmasked": lambda: call(None)}


def in_use(device: str, T: int) -> Tensor | None:
    """Return `num_used` of T tokens: steps know it on the device, prefill on the host."""
    return torch.full((1,), T, dtype=torch.int32, device=device) if T <= MAX_STEP_TOKENS else None


def linear_cases() -> Iterator[Case]:
    for shape, T in product((*MODELS, GEMMA), (1, 5, 20, 64, 320, 2048)):
        yield from layer_linears(shape, T)


def layer_linears(shape: Shape, T: int) -> Iterator[Case]:
    """Yield the four linear layers of a decoder layer and the output head, for T tokens."""
    H, inner = shape.hidden, shape.intermediate
    q_width = shape.heads * shape.head_dim
    qkv_width = q_width + 2 * shape.kv_heads * shape.head_dim

    for name, part, N, K, out in (
        ("norm_linear", "qkv", qkv_width, H, qkv_width),
        ("linear_add", "o", H, q_width, 3 * H),  # reads one x, writes x and x * norm_weight
        ("norm_swiglu", "gate_up", 2 * inner, H, inner),
        ("linear_add", "down", H, inner, 3 * H),
        ("linear", "head", shape.vocab, H, shape.vocab),
    ):

        def build(device: str, name: str = name, N: int = N, K: int = K) -> Built:
            h, w = normal(device, T, K), normal(device, N, K)
            bias = normal(device, N) if name == "norm_linear" and shape is QWEN3_SMALL else None
            used = in_use(device, T)
            x = embed(torch.arange(T, device=device), normal(device, T, H), make_norm(device, H), 1, used)
            linear = cache(lambda: make_linear(w, bias))  # on the backend of the first call
            calls: dict[str, Call] = {
                "norm_linear": lambda: linear().after_norm(x),
                "linear_add": lambda: linear().add_to(x, h, x.norm),
                "norm_swiglu": lambda: linear().gated(x),
                "linear": lambda: linear()(h, num_used=used),
            }
            return Built(calls[name], {"cublas": lambda: h @ w.T})

        moved = 2 * (N * K + T * K + T * out)
        label = f"{shape.name}-{part}-T{T}"
        yield Case(name, label, build, bytes=moved, flops=2 * T * N * K, dots=True)


def quantized_cases() -> Iterator[Case]:
    few = (QWEN3_8B, 1, False), (QWEN3_8B, 1, True), (QWEN3_8B, 320, True)
    yield from (quantized_case(*how, form) for how in few for form in FORMATS)
    yield from (quantized_case(QWEN3_8B, 2048, False, form) for form in ("int4-g128", "int4-g32"))
    yield from (quantized_case(QWEN3_SMALL, 2048, True, form) for form in ("int4-g32", "fp8"))


def quantized_case(shape: Shape, T: int, gated: bool, form: str) -> Case:
    """Return a layer with a random weight in one of `FORMATS`: gate and up, or one of the hidden size."""
    (bits, group), K = FORMATS[form], shape.hidden
    N, groups, out = (2 * shape.intermediate if gated else K), K // (group or K), shape.intermediate

    def build(device: str) -> Built:
        codes = torch.randint(0, 1 << bits, (N, K), device=device, dtype=torch.uint8)
        if form == "fp8":
            codes = torch.randn(N, K, device=device).to(torch.float8_e4m3fn)
        scale, norm = torch.rand(N, groups, device=device), make_norm(device, K)
        weight = Quantized(codes, scale, -7 * scale if form == "int4-g32" else None, bits)
        x = embed(torch.arange(T, device=device), normal(device, T, K), norm, 1, in_use(device, T))

        linear = cache(  # on the backend of the first call
            lambda: make_linear(weight if multiplies_quantized(device, BF16) else weight.dequantize())
        )
        return Built(lambda: linear().gated(x) if gated else linear().add_to(x, x.x, norm))

    moved = N * K * bits // 8 + 4 * N * groups + 2 * T * (K + (out if gated else 3 * K))
    label = f"{shape.name}-{'gate_up' if gated else 'o'}-{form}-T{T}"
    return Case("quantized", label, build, bytes=moved, flops=2 * T * N * K, dots=True)


def rope_cases() -> Iterator[Case]:
    for shape, (B, Q) in product((*MODELS, PHI, STABLE, GEMMA), ((1, 1), (64, 5))):
        yield rope_case(shape, B, Q)


def rope_case(shape: Shape, B: int, Q: int) -> Case:
    length = 1024
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def build(device: str) -> Built:
        batch = make_batch(device, B, Q, length)
        cache = make_cache(device, shape, batch)
        qkv = normal(device, B * Q, width)
        angles = torch.randn(B * Q, shape.head_dim, device=device)
        norm = make_norm(device, shape.head_dim)
        norms = (norm, norm) if shape.qk_norm else None
        return Built(lambda: rope_cache(qkv, cache, batch, angles, norms))

    moved = B * Q * (2 * width * 2 + shape.head_dim * 4)
    return Case("rope_cache", f"{shape.name}-B{B}-q{Q}", build, bytes=moved)


def gemma_cases() -> Iterator[Case]:
    for shape, (B, Q) in product((GEMMA2, GEMMA2_LARGE), ((1, 1), (8, 5), (1, 2048))):
        yield attention_case(shape, B, Q, 4096)
    for T, what in product((1, 5, 64, 2048), ("rope_cache", "norm_swiglu", "residual_add", "embed")):
        yield gemma_case(GEMMA3, what, T)
    yield gemma_case(GEMMA2_LARGE, "residual_add", 1)


def gemma_case(shape: Shape, what: str, T: int) -> Case:
    """Return a kernel in a variant that only Gemma needs."""
    H, inner, D = shape.hidden, shape.intermediate, shape.head_dim
    width = (shape.heads + 2 * shape.kv_heads) * D
    moved, flops = {
        "rope_cache": (2 * T * width, 0),
        "norm_swiglu": (2 * inner * H + T * (H + inner), 4 * T * inner * H),
        "residual_add": (4 * T * H, 0),
        "embed": (3 * T * H, 0),
    }[what]

    def build(device: str) -> Built:
        norm, head_norm = (Norm(normal(device, n, dtype=torch.float32), 1e-6) for n in (H, D))
        ids, table, h = torch.arange(T, device=device), normal(device, T, H), normal(device, T, H)
        used = in_use(device, T)
        x = embed(ids, table, norm, 50.5, used)
        batch = make_batch(device, 1, T, T + 100)
        kv_cache, gate_up = make_cache(device, shape, batch), normal(device, 2 * inner, H)
        gate = cache(lambda: make_linear(gate_up))
        qkv, angles = normal(device, T, width), normal(device, T, D, dtype=torch.float32)
        calls: dict[str, Call] = {
            "rope_cache": lambda: rope_cache(qkv, kv_cache, batch, angles, (head_norm, head_norm)),
            "norm_swiglu": lambda: gate().gated(x, "gelu"),
            "residual_add": lambda: residual_add(h[None], x.x, norm, norm, used),
            "embed": lambda: embed(ids, table, norm, 50.5, used),
        }
        return Built(calls[what])

    return Case(what, f"{shape.name}-T{T}", build, bytes=2 * moved, flops=flops, dots=flops > 0)


def move_cases() -> Iterator[Case]:
    for (shape, layers), B in product(((QWEN3_SMALL, 28), (LLAMA_1B, 16), (PHI, 32)), (1, 64)):
        yield move_case(shape, layers, B)


def move_case(shape: Shape, layers: int, B: int) -> Case:
    """Return a case where every row accepts 4 nodes of a tree of 16, and 3 of them must be moved."""
    nodes, kept, length = 16, 4, 256

    def build(device: str) -> Built:
        batch = make_batch(device, B, nodes, length)
        cache = make_cache(device, shape, batch, layers)
        path = torch.arange(nodes, device=device, dtype=torch.int32).repeat(B, 1)
        path[:, 1:kept] *= 4
        count = torch.full((B,), kept, device=device, dtype=torch.int32)
        verdict = Verdict(report=path, num_emitted=count, path=path)
        return Built(lambda: kv_move(cache, verdict, batch))

    moved = B * (kept - 1) * layers * 2 * shape.kv_heads * shape.head_dim * 2 * 2
    return Case("kv_move", f"{shape.name}-B{B}", build, bytes=moved)


def sum_cases() -> Iterator[Case]:
    """Yield the reductions of tensor parallelism: partial sums of all ranks, added to the residual stream."""
    models = ("llama-3.2-1b", 2048), ("qwen3-8b", 4096), ("llama-3.3-70b", 8192)
    for ranks, (name, hidden), T in product((2, 4, 8), models, (1, 64)):

        def build(device: str, ranks: int = ranks, hidden: int = hidden, T: int = T) -> Built:
            parts = normal(device, ranks, T, hidden)
            norm, used = Norm(torch.randn(hidden, device=device), 1e-6), in_use(device, T)
            return Built(lambda: residual_add(parts, parts[0], norm, num_used=used))

        yield Case("residual_add", f"{name}-R{ranks}-T{T}", build, bytes=2 * T * hidden * (ranks + 3))
