"""Between the qkv projection and attention: per-head q/k norm, rotary embedding, cache write.

    qkv               [T, (Hq + 2 Hkv) * D]   the projection's output: all q heads, k heads, v heads
    cos_sin           [max_len, D] float32    cos of the D/2 angles, then sin
    k_cache, v_cache  [Hkv, num_blocks, block_size, D]
    q (returned)      [T, Hq, D]

Rotary embedding rotates pairs (x[i], x[i + D/2]) by position * theta_i ("rotate half", the layout of
Hugging Face checkpoints). The rotated keys and the values go to the cache at `rows.slots`; a token
with slot -1 writes nothing. Per-head RMSNorm of q and k (Qwen3) comes before the rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import norm
from .rows import Rows


def rope_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Rows,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotate q and k, write k and v to the cache, return q. See the module docstring for shapes."""
    return naive(qkv, cos_sin, k_cache, v_cache, rows, q_norm, k_norm, eps)


def naive(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Rows,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    num_kv_heads, _, _, head_dim = k_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if q_norm is not None and k_norm is not None:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        qk = torch.cat((norm.naive(q, q_norm, eps), norm.naive(k, k_norm, eps)), 1)
    cos, sin = _angles(cos_sin, rows, qkv.dtype)
    first, second = qk.chunk(2, -1)
    qk = qk * cos + torch.cat((-second, first), -1) * sin
    index, slots = rows.written
    k, v = qk[:, num_heads:], v
    if index is not None:
        k, v = k[index], v[index]
    k_cache.view(num_kv_heads, -1, head_dim).index_copy_(1, slots, k.transpose(0, 1))
    v_cache.view(num_kv_heads, -1, head_dim).index_copy_(1, slots, v.transpose(0, 1))
    return qk[:, :num_heads]


def _angles(cos_sin: Tensor, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [T, 1, D] in `dtype`, computed once per step and kept for all layers."""
    cached: tuple[Tensor, Tensor] | None = rows.__dict__.get("_angles")
    if cached is None:
        cos, sin = cos_sin[rows.positions].to(dtype)[:, None].chunk(2, -1)
        cached = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        rows.__dict__["_angles"] = cached
    return cached
