"""Per-head q/k norm, rotary embedding and cache write: the operations between qkv projection and attention.

    qkv           [T, (Hq + 2 Hkv) * D]                   output of the projection: q heads, k heads, v heads
    cache         [2, Hkv, num_blocks, block_size, D]     keys, values of one layer
    angles        [T, D] float32                          cos of the D/2 angles of each token, then sin; rows
                                                          of the table of `cos_sin`
    q (returned)  [T, Hq, D]

Rotary embedding rotates pairs (x[i], x[i + D/2]) by position * theta_i ("rotate half", the layout of
Hugging Face checkpoints). The rotated keys and the values are written to the cache at `batch.slots`; tokens
with slot -1 are not written. A per-head RMSNorm of q and k (Qwen3) is applied before the rotation. Supports
even head dimensions up to 256.

The Triton kernel and the C++ make v finite: NaN becomes 0, infinity the largest finite number. Otherwise
0 * NaN would reach queries that mask the token, such as those before a rejected draft. Queries that attend to
a token with a NaN hidden state still get NaN from its key. `naive` stores v unchanged.

Kernel: one program per token and group of heads, in float32 between load and store (`naive` rounds in
between). The result of a head depends on no other head or token.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..launch import options, release_next, use_triton, wait_for_previous
from .residual import Norm, naive_norm, pairwise_sum

HEADS = tl.constexpr(8)  # per program: fewer give more programs for a single token, more give wider loads

Norms = tuple[Norm, Norm] | None  # of q and of k


def cos_sin(frequencies: Tensor, max_len: int) -> Tensor:
    """Return [max_len, D] float32: cos, then sin, of the D/2 angles of each position, computed in float64.
    `frequencies` [D/2] float64: radians per position."""
    position = torch.arange(max_len, dtype=torch.float64, device=frequencies.device)
    angle = torch.outer(position, frequencies)
    # Not `angle.cos()`: on a CPU, it was less exact in one thread of about one of 100 processes, and changed
    # outputs. `torch.polar` uses scalar functions.
    points = torch.polar(angle.new_ones(()), angle)
    return torch.cat((points.real.float(), points.imag.float()), dim=1)


def rope_cache(qkv: Tensor, cache: Tensor, batch: Batch, angles: Tensor, norms: Norms) -> Tensor:
    """Normalize (if `norms` is set) and rotate q and k, write k and v to the cache, and return q."""
    return (launch if use_triton(qkv) else naive)(qkv, cache, batch, angles, norms)


def naive(qkv: Tensor, cache: Tensor, batch: Batch, angles: Tensor, norms: Norms) -> Tensor:
    _, num_kv_heads, _, _, head_dim = cache.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        qk = torch.cat((naive_norm(q, norms[0]), naive_norm(k, norms[1])), 1)
    (cos, sin), (first, second) = angles.to(qk.dtype)[:, None].chunk(2, -1), qk.chunk(2, -1)
    qk = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    stored = batch.slots >= 0
    for to, new in zip(cache.view(2, num_kv_heads, -1, head_dim), (qk[:, num_heads:], v), strict=True):
        to[:, batch.slots[stored].long()] = new[stored].transpose(0, 1)
    return qk[:, :num_heads]


# The arguments of the kernel. The norms are weights [D] or None.
Rope = namedtuple("Rope", "angles slots q cache q_norm k_norm")

# token_stride: elements between tokens of qkv. head_stride: between heads of the cache. eps: of the norms.
Sizes = namedtuple("Sizes", "token_stride head_stride num_heads num_kv_heads eps")


@triton.jit
def _rope_cache(qkv, rope, sizes, NORM: tl.constexpr, HEAD_DIM: tl.constexpr, PDL: tl.constexpr):
    """Grid: (tokens, groups of HEADS heads of q, then k, then v). A head is processed as two halves."""
    wait_for_previous(PDL)
    release_next(PDL)  # only now, because attention reads before its wait
    HALF: tl.constexpr = HEAD_DIM // 2
    t = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    kv_head = head - sizes.num_heads  # head of the cache: all of k, then all of v
    is_q, is_v = kv_head < 0, kv_head >= sizes.num_kv_heads
    i = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    inside = (kv_head < 2 * sizes.num_kv_heads) & (i < HALF)
    first, second = load_halves(qkv + t * sizes.token_stride + head * HEAD_DIM + i, inside, HALF)
    a, b = first, second
    if NORM:
        scale = tl.rsqrt(pairwise_sum(a * a + b * b) / HEAD_DIM + sizes.eps)[:, None]
        of_q = load_halves(rope.q_norm + i, i < HALF, HALF)
        of_k = load_halves(rope.k_norm + i, i < HALF, HALF)
        a = a * scale * tl.where(is_q, of_q[0], of_k[0])
        b = b * scale * tl.where(is_q, of_q[1], of_k[1])
    cos, sin = load_halves(rope.angles + t * HEAD_DIM + i, i < HALF, HALF)
    a, b = a * cos - b * sin, b * cos + a * sin

    store_halves(rope.q + (t * sizes.num_heads + head) * HEAD_DIM + i, a, b, inside & is_q, HALF)
    slot = tl.load(rope.slots + t).to(tl.int64)
    at = kv_head.to(tl.int64) * sizes.head_stride + slot * HEAD_DIM + i
    dtype: tl.constexpr = rope.cache.dtype.element_ty
    a, b = tl.where(is_v, finite(first, dtype), a), tl.where(is_v, finite(second, dtype), b)
    store_halves(rope.cache + at, a, b, inside & (kv_head >= 0) & (slot >= 0), HALF)


@triton.jit
def load_halves(at, inside, HALF: tl.constexpr):
    """Load elements and those at an offset of HALF, in float32."""
    first, second = tl.load(at, inside, other=0.0), tl.load(at + HALF, inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_halves(at, first, second, inside, HALF: tl.constexpr):
    tl.store(at, first.to(at.dtype.element_ty), inside)
    tl.store(at + HALF, second.to(at.dtype.element_ty), inside)


@triton.jit
def finite(x, dtype: tl.constexpr):
    """Clamp x [...] float32 to the finite numbers of `dtype`; 0 for NaN."""
    LARGEST: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895e38  # the latter is finite in bf16
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST)


def launch(qkv: Tensor, cache: Tensor, batch: Batch, angles: Tensor, norms: Norms) -> Tensor:
    _, num_kv_heads, _, _, head_dim = cache.shape
    (q_norm, eps), (k_norm, _) = norms or ((None, 0.0), (None, 0.0))
    T, num_heads = len(qkv), qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(T, num_heads, head_dim)
    rope = Rope(angles, batch.slots, q, cache, q_norm, k_norm)
    sizes = Sizes(qkv.stride(0), cache.stride(1), num_heads, num_kv_heads, eps)
    _rope_cache[(T, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS.value))](
        qkv, rope, sizes, NORM=norms is not None, HEAD_DIM=head_dim, num_warps=2, **options(qkv, T)
    )
    return q
