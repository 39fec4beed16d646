"""Between the qkv projection and attention: per-head q/k norm, rotary embedding, cache write.

    qkv           [T, (Hq + 2 Hkv) * D]                   the projection: all q heads, k heads, v heads
    cache         [2, Hkv, num_blocks, block_size, D]     keys, values of one layer
    q (returned)  [T, Hq, D]

Rotary embedding rotates pairs (x[i], x[i + D/2]) by position * theta_i ("rotate half", the layout of
Hugging Face checkpoints). The rotated keys and the values go to the cache at `batch.slots`; a token
with slot -1 writes nothing. Per-head RMSNorm of q and k (Qwen3) comes before the rotation. Even head
dimensions up to 256.

Kernel: one program per token and group of heads, all in float32 between load and store (`naive` rounds
in between). A head's arithmetic involves no other head or token, so neither do its bits.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..dispatch import use_triton
from ..launch import check_cache, next_power_of_2
from . import norm
from .norm import Norm

HEADS = 8  # per program: few enough to fill the machine with one token, many enough for wide accesses

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
def _rope_cache(
    qkv, cos_sin, q, k_cache, v_cache, positions, slots, q_norm, k_norm,
    token_stride, head_stride, num_heads, num_kv_heads, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    is_q = head < num_heads
    is_k = (head >= num_heads) & (head < num_heads + num_kv_heads)
    is_v = (head >= num_heads + num_kv_heads) & (head < num_heads + 2 * num_kv_heads)

    at = qkv + token * token_stride + head[:, None] * HEAD_DIM + i[None, :]
    full = (is_q | is_k | is_v)[:, None] & inside[None, :]
    first = tl.load(at, full, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
    second = tl.load(at + HALF, full, other=0.0).to(tl.float32)
    a, b = first, second
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        for_q = is_q[:, None] & inside[None, :]
        for_k = is_k[:, None] & inside[None, :]
        weight_a = tl.load(q_norm + i[None, :], for_q, other=0.0).to(tl.float32)
        weight_a += tl.load(k_norm + i[None, :], for_k, other=0.0).to(tl.float32)
        weight_b = tl.load(q_norm + HALF + i[None, :], for_q, other=0.0).to(tl.float32)
        weight_b += tl.load(k_norm + HALF + i[None, :], for_k, other=0.0).to(tl.float32)
        a, b = a * scale * weight_a, b * scale * weight_b
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM + i
    cos = tl.load(angle, inside, other=0.0)[None, :]
    sin = tl.load(angle + HALF, inside, other=0.0)[None, :]
    a, b = a * cos - b * sin, b * cos + a * sin

    dtype = q.dtype.element_ty
    to = q + (token * num_heads + head)[:, None] * HEAD_DIM + i[None, :]
    tl.store(to, a.to(dtype), is_q[:, None] & inside[None, :])
    tl.store(to + HALF, b.to(dtype), is_q[:, None] & inside[None, :])
    slot = tl.load(slots + token).to(tl.int64)
    mask = is_k[:, None] & inside[None, :] & (slot >= 0)
    to = k_cache + (head - num_heads).to(tl.int64)[:, None] * head_stride + slot * HEAD_DIM + i[None, :]
    tl.store(to, a.to(dtype), mask)
    tl.store(to + HALF, b.to(dtype), mask)
    mask = is_v[:, None] & inside[None, :] & (slot >= 0)
    kv_head = (head - num_heads - num_kv_heads).to(tl.int64)
    to = v_cache + kv_head[:, None] * head_stride + slot * HEAD_DIM + i[None, :]
    tl.store(to, first.to(dtype), mask)
    tl.store(to + HALF, second.to(dtype), mask)


def launch(qkv: Tensor, cache: Tensor, batch: Batch, angles: Angles, norms: Norms = None) -> Tensor:
    _, num_kv_heads, _, _, head_dim = cache.shape
    T = qkv.shape[0]
    heads, rest = divmod(qkv.shape[1], head_dim)
    num_heads = heads - 2 * num_kv_heads
    if rest or num_heads < 1:
        raise ValueError(f"qkv {list(qkv.shape)} does not fit a cache of {list(cache.shape)}.")
    check_cache(cache, qkv.dtype)
    table = angles.table
    if qkv.stride(1) != 1 or table.dtype != torch.float32 or table.shape[1] != head_dim:
        raise ValueError(f"qkv must have rows without gaps, angles a float32 table [max_len, {head_dim}].")
    (q_norm, eps), (k_norm, k_eps) = norms or ((None, 0.0), (None, 0.0))
    if eps != k_eps:
        raise ValueError(f"The norms of q and k must have the same eps, not {eps} and {k_eps}.")
    q = torch.empty(T, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if T:
        k_cache, v_cache = cache
        _rope_cache[(T, triton.cdiv(heads, HEADS))](
            qkv, table, q, k_cache, v_cache, angles.positions, batch.slots, q_norm, k_norm,
            qkv.stride(0), k_cache.stride(0), num_heads, num_kv_heads, eps,
            NORM=norms is not None, HEADS=HEADS, HEAD_DIM=head_dim,
            BLOCK=next_power_of_2(head_dim // 2), num_warps=2,
        )  # fmt: skip
    return q
