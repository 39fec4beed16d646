"""Attention over the paged KV cache.

    q                 [T, Hq, D]
    k_cache, v_cache  [Hkv, num_blocks, block_size, D]     one layer; Hq is a multiple of Hkv
    out               [T, Hq, D]

One operation serves decoding (one query per row), verification (K+1 queries per row, chain or tree)
and chunked prefill: what a query sees is stated by `Rows` alone. The queries of all heads that share
a KV head are treated together, so K/V are read once for all of them. A sliding window of w lets a
query see itself and the w - 1 positions before it; in a tree, the step's own tokens are taken to lie
inside the window. Head dimensions up to 256; bf16, fp16 or fp32; more than `LONG_QUERY` queries per
row go to `prefill`.

The kernel (`split_kv.py`) serves decoding and verification: it splits the cache over programs at fixed
absolute places, so that a query's bits depend neither on the batch nor on the number of drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import prefill, split_kv
from .dispatch import use_triton
from .rows import MAX_TREE_NODES, Rows

LONG_QUERY = MAX_TREE_NODES  # rows with more queries than this are prefill


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    """Softmax(q k^T * scale) v for every query over the cache positions it may see.

    The keys and values of the step's own tokens must already be in the cache. Padding tokens get
    unspecified output.
    """
    if not use_triton(q):
        return naive(q, k_cache, v_cache, rows, scale, window)
    launch = prefill.launch if rows.max_q_len > LONG_QUERY else split_kv.launch
    return launch(q, k_cache, v_cache, rows, scale, window)


def naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    """The specification in plain PyTorch; also the CPU path."""
    if rows.max_q_len > LONG_QUERY:
        return prefill.naive(q, k_cache, v_cache, rows, scale, window)
    num_kv_heads, _, block_size, head_dim = k_cache.shape
    B, Q, G = rows.num_rows, rows.max_q_len, q.shape[1] // num_kv_heads
    # Whole pages, so that the length of every sum is a multiple of the page size: with that, and
    # plain batched products, a bf16 row has the same bits whatever is computed beside it.
    blocks = rows.block_table[:, : -(-rows.max_kv_len // block_size)].flatten()
    k = k_cache.index_select(1, blocks).view(num_kv_heads * B, -1, head_dim)
    v = v_cache.index_select(1, blocks).view(num_kv_heads * B, -1, head_dim)
    # The G query heads of a KV head become rows of one matrix: [Hkv*B, G*Q, D]
    grid = q if rows.uniform else q[rows.grid]
    grouped = grid.view(B, Q, num_kv_heads, G, head_dim).permute(2, 0, 3, 1, 4)
    grouped = grouped.reshape(num_kv_heads * B, G * Q, head_dim)
    mask = _mask(rows, num_kv_heads, G, k.shape[1], q.dtype, window)
    scores = torch.baddbmm(mask, grouped, k.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), v).view(num_kv_heads, B, G, Q, head_dim)
    out = out.permute(1, 3, 0, 2, 4).reshape(B * Q, -1, head_dim)
    return out if rows.uniform else out[rows.in_row]


def _mask(
    rows: Rows, num_kv_heads: int, group: int, width: int, dtype: torch.dtype, window: int | None
) -> Tensor:
    """[Hkv*B, group*Q, width] of 0 and -inf, made once per step and kept for all layers."""
    key = f"_mask_{window}"
    if key not in rows.__dict__:
        visible = rows.visible if window is None else rows.visible & _in_window(rows, window)
        B, Q, length = visible.shape
        mask = torch.full((B, 1, Q, width), float("-inf"), dtype=dtype, device=visible.device)
        mask[..., :length].masked_fill_(visible[:, None], 0.0)
        mask = mask.expand(num_kv_heads, B, group, Q, width)
        rows.__dict__[key] = mask.reshape(num_kv_heads * B, group * Q, width)
    mask = rows.__dict__[key]
    return mask


def _in_window(rows: Rows, window: int) -> Tensor:
    """[B, Q, kv] bool: cache index j is less than `window` positions before the query."""
    position = rows.positions[rows.grid][..., None]  # [B, Q, 1]
    j = torch.arange(rows.max_kv_len, device=position.device)
    if rows.ancestors is None:
        return j > position - window
    return (j > position - window) | (j >= rows.base_len[:, None, None])
