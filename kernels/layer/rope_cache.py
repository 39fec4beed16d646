"""Between the qkv projection and attention: per-head q/k norm, rotary embedding, cache write.

    qkv           [T, (Hq + 2 Hkv) * D]                   the projection: all q heads, k heads, v heads
    cache         [2, Hkv, num_blocks, block_size, D]     keys, values of one layer
    q (returned)  [T, Hq, D]

Rotary embedding rotates pairs (x[i], x[i + D/2]) by position * theta_i ("rotate half", the layout of
Hugging Face checkpoints). The rotated keys and the values go to the cache at `batch.slots`; a token
with slot -1 writes nothing. Per-head RMSNorm of q and k (Qwen3) comes before the rotation. Even head
dimensions up to 256.

A value that is not finite never gets to the cache: 0 * NaN would reach queries that do not see its token, as
those before a rejected draft. NaN becomes 0 and infinity the largest number. Where x is not finite, a query
that sees the token still gets NaN, from its key, since the norm makes all of q, k and v NaN; where v alone is
not (an overflow in fp16, NaN in its weights), the query gets the finite number. Only the kernels and the C++
for CPUs promise this: `naive` leaves values as they are and its attention adds its mask and multiplies by 0,
so that there a draft whose token is NaN in the embedding reaches the query before it.

Kernel: one program per token and group of heads, all in float32 between load and store (`naive` rounds
in between). A head's arithmetic involves no other head or token, so neither do its bits.
"""

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..launch import options, release_next, use_triton, wait_for_previous
from . import norm
from .norm import Norm
from .stream import tree_sum

HEADS = tl.constexpr(8)  # per program: few fill the machine with one token, many make wide accesses

Norms = tuple[Norm, Norm] | None  # of q and of k


@dataclass(frozen=True, eq=False)
class Angles:
    """The rotary angles of the tokens of a step, for all layers.

    Attributes:
        table: [max_len, D] float32, cos of the D/2 angles of each position, then sin.
        positions: [T] int32.
        dtype: what `naive` computes in.
    """

    table: Tensor
    positions: Tensor
    dtype: torch.dtype

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """For `naive`; the kernel reads the table itself. Each [T, 1, D], the D/2 angles twice over."""
        cos, sin = self.table[self.positions].to(self.dtype)[:, None].chunk(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def rope_cache(qkv: Tensor, cache: Tensor, batch: Batch, angles: Angles, norms: Norms = None) -> Tensor:
    """Rotate q and k, after their `norms` if there are any, write k and v to the cache, return q."""
    return (launch if use_triton(qkv) else naive)(qkv, cache, batch, angles, norms)


def naive(qkv: Tensor, cache: Tensor, batch: Batch, angles: Angles, norms: Norms = None) -> Tensor:
    _, num_kv_heads, _, _, head_dim = cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        qk = torch.cat((norm.naive(q, norms[0]), norm.naive(k, norms[1])), 1)
    cos, sin = angles.cos_sin
    first, second = qk.chunk(2, -1)
    qk = qk * cos + torch.cat((-second, first), -1) * sin
    k = qk[:, num_heads:]
    index, slots = batch.written
    if index is not None:
        k, v = k[index], v[index]
    for to, new in zip(cache.view(2, num_kv_heads, -1, head_dim), (k, v), strict=True):
        to.index_copy_(1, slots, new.transpose(0, 1))
    return qk[:, :num_heads]


@triton.jit
def finite(x, dtype: tl.constexpr):
    """x [...] float32 as the nearest finite number of `dtype`, 0 for NaN."""
    LARGEST: tl.constexpr = 65504.0 if dtype == tl.float16 else 3.3895e38  # the latter fits bf16
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST)


# cos_sin is `Angles.table`; q_norm and k_norm are the weights of the norms, or None.
Rope = namedtuple("Rope", "cos_sin positions slots q k_cache v_cache q_norm k_norm")

# Of the cache, `head_stride` numbers to a KV head; of the norms, eps.
HeadSizes = namedtuple("HeadSizes", "head_stride num_heads num_kv_heads eps")

# Heads [HEADS] of tokens t [WIDTH], and columns i [BLOCK] of their halves.
Part = namedtuple("Part", "head i t t_in")


@triton.jit
def rotate_and_write(first, second, part, rope, sizes, NORM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Finish heads of tokens, given as their halves [HEADS, BLOCK, WIDTH] in float32: norm, rotation, to q or
    the cache."""
    HALF: tl.constexpr = HEAD_DIM // 2
    inside = part.i < HALF
    is_q, is_k, is_v = kinds_of(part.head, sizes)
    a, b = first, second
    if NORM:
        a, b = head_norm(a, b, part, rope, sizes, HEAD_DIM)
    t, i = part.t, part.i
    angle = tl.load(rope.positions + t, part.t_in, other=0).to(tl.int64)[None, :] * HEAD_DIM + i[:, None]
    known = inside[:, None] & part.t_in[None, :]
    cos = tl.load(rope.cos_sin + angle, known, other=0.0)[None, :, :]
    sin = tl.load(rope.cos_sin + angle + HALF, known, other=0.0)[None, :, :]
    a, b = a * cos - b * sin, b * cos + a * sin

    dtype: tl.constexpr = rope.q.dtype.element_ty
    known = known[None, :, :]
    row = t.to(tl.int64)[None, :] * sizes.num_heads + part.head[:, None]
    at = row[:, None, :] * HEAD_DIM + i[None, :, None]
    mask = is_q[:, None, None] & known
    tl.store(rope.q + at, a.to(dtype), mask)
    tl.store(rope.q + at + HALF, b.to(dtype), mask)
    slot = tl.load(rope.slots + t, part.t_in, other=-1).to(tl.int64)
    known &= (slot >= 0)[None, None, :]
    kv_head = (part.head - sizes.num_heads - tl.where(is_v, sizes.num_kv_heads, 0)).to(tl.int64)
    at = kv_head[:, None, None] * sizes.head_stride + slot[None, None, :] * HEAD_DIM + i[None, :, None]
    mask = is_k[:, None, None] & known
    tl.store(rope.k_cache + at, a.to(dtype), mask)
    tl.store(rope.k_cache + at + HALF, b.to(dtype), mask)
    mask = is_v[:, None, None] & known
    tl.store(rope.v_cache + at, finite(first, dtype).to(dtype), mask)
    tl.store(rope.v_cache + at + HALF, finite(second, dtype).to(dtype), mask)


@triton.jit
def kinds_of(head, sizes):
    """Return which heads [HEADS] are of q, of k and of v."""
    num_heads, num_kv_heads = sizes.num_heads, sizes.num_kv_heads
    is_q = head < num_heads
    is_k = (head >= num_heads) & (head < num_heads + num_kv_heads)
    is_v = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads)
    return is_q, is_k, is_v


@triton.jit
def head_norm(a, b, part, rope, sizes, HEAD_DIM: tl.constexpr):
    """Return the halves of heads after the norms of q and k; those of v come to 0."""
    HEADS: tl.constexpr = a.shape[0]
    BLOCK: tl.constexpr = a.shape[1]
    WIDTH: tl.constexpr = a.shape[2]
    HALF: tl.constexpr = HEAD_DIM // 2
    squares = tl.reshape(tl.permute(a * a + b * b, [0, 2, 1]), [HEADS * WIDTH, BLOCK])
    squares = tl.reshape(tree_sum(squares), [HEADS, 1, WIDTH])
    scale = tl.rsqrt(squares / HEAD_DIM + sizes.eps)
    is_q, is_k, _ = kinds_of(part.head, sizes)
    inside = (part.i < HALF)[None, :]
    for_q, for_k = is_q[:, None] & inside, is_k[:, None] & inside
    i = part.i[None, :]
    weight_a = tl.load(rope.q_norm + i, for_q, other=0.0).to(tl.float32)
    weight_a += tl.load(rope.k_norm + i, for_k, other=0.0).to(tl.float32)
    weight_b = tl.load(rope.q_norm + HALF + i, for_q, other=0.0).to(tl.float32)
    weight_b += tl.load(rope.k_norm + HALF + i, for_k, other=0.0).to(tl.float32)
    return a * scale * weight_a[:, :, None], b * scale * weight_b[:, :, None]


@triton.jit
def _rope_cache(
    qkv, rope, token_stride, sizes, NORM: tl.constexpr, HEAD_DIM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_previous(PDL)
    release_next(PDL)  # only now, since attention reads before its wait
    t = tl.program_id(0) + tl.arange(0, 1)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, triton.next_power_of_2(HEAD_DIM // 2))
    at = t.to(tl.int64)[None, None, :] * token_stride + head[:, None, None] * HEAD_DIM + i[None, :, None]
    there = head < sizes.num_heads + 2 * sizes.num_kv_heads
    inside = there[:, None, None] & (i < HEAD_DIM // 2)[None, :, None]
    first = tl.load(qkv + at, inside, other=0.0).to(tl.float32)  # [HEADS, BLOCK, 1]
    second = tl.load(qkv + at + HEAD_DIM // 2, inside, other=0.0).to(tl.float32)
    rotate_and_write(first, second, Part(head, i, t, t >= 0), rope, sizes, NORM, HEAD_DIM)


def launch(qkv: Tensor, cache: Tensor, batch: Batch, angles: Angles, norms: Norms = None) -> Tensor:
    if qkv.stride(1) != 1:
        raise ValueError("qkv must have rows without gaps.")
    rope, sizes = operands(len(qkv), qkv.shape[1], qkv, cache, batch, angles, norms)
    if T := len(qkv):
        _rope_cache[(T, triton.cdiv(sizes.num_heads + 2 * sizes.num_kv_heads, HEADS.value))](
            qkv, rope, qkv.stride(0), sizes, NORM=norms is not None, HEAD_DIM=cache.shape[-1], num_warps=2,
            **options(qkv),
        )  # fmt: skip
    return rope.q


def check_cache(cache: Tensor) -> None:
    """Refuse heads that the kernels cannot take, and a cache whose heads are too large."""
    block_size, head_dim = cache.shape[3:]
    assert cache.stride()[2:] == (block_size * head_dim, head_dim, 1)  # the pages of a head are contiguous
    if head_dim > 256 or head_dim % 2:
        raise ValueError(f"The head dimension must be even and at most 256, not {head_dim}.")
    if cache.stride(1) >= 1 << 31:
        raise ValueError(f"A KV head has {cache.stride(1)} numbers of keys; attention counts below 2^31.")


def operands(
    T: int, width: int, like: Tensor, cache: Tensor, batch: Batch, angles: Angles, norms: Norms
) -> tuple[Rope, HeadSizes]:
    """Return what a kernel needs to finish qkv [T, width], with room for q in the dtype of `like`; refuse
    what does not fit together."""
    _, num_kv_heads, _, _, head_dim = cache.shape
    heads, rest = divmod(width, head_dim)
    num_heads = heads - 2 * num_kv_heads
    if rest or num_heads < 1:
        raise ValueError(f"qkv of width {width} does not fit a cache of {list(cache.shape)}.")
    check_cache(cache)
    if angles.table.dtype != torch.float32 or angles.table.shape[1] != head_dim:
        raise ValueError(f"The angles must be a float32 table [max_len, {head_dim}].")
    (q_norm, eps), (k_norm, k_eps) = norms or ((None, 0.0), (None, 0.0))
    if eps != k_eps:
        raise ValueError(f"The norms of q and k must have the same eps, not {eps} and {k_eps}.")
    k, v = cache
    q = like.new_empty(T, num_heads, head_dim)
    rope = Rope(angles.table, angles.positions, batch.slots, q, k, v, q_norm, k_norm)
    return rope, HeadSizes(k.stride(0), num_heads, num_kv_heads, eps)
