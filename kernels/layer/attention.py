"""Attention over the paged KV cache.

    q      [T, Hq, D]
    cache  [2, Hkv, num_blocks, block_size, D]     keys, values of one layer; Hq is a multiple of Hkv
    out    [T, Hq, D]

One operation serves decoding (one query per row), verification (K+1 queries per row, chain or tree)
and chunked prefill: what a query sees is stated by `Plan` alone, that is by the batch and the sliding
window, which counts positions. The queries of all heads that share a KV head are treated together, so K/V
are read once for all of them. Head dimensions up to 256; bf16, fp16 or fp32.

On a GPU one kernel (`paged.py`) serves all of them, so that a query's bits depend neither on the batch nor
on the number of drafts or the size of the chunk, nor on whether it is a node of a tree. For `naive` a tree is
a mask, and its nodes equal chains up to rounding: keys and values in order of each node's path would have to
be gathered once for each node.
"""

import torch
from torch import Tensor

from ..dispatch import use_triton
from . import paged
from .plan import Part, Plan

FEW = 16**3  # multiply-adds of a product for which PyTorch has another sum of bf16 and fp16


def attention(q: Tensor, cache: Tensor, plan: Plan, scale: float, softcap: float | None = None) -> Tensor:
    """Softmax(q k^T * scale) v for every query over the cache positions it may see; with a `softcap` c, of
    c * tanh(q k^T * scale / c).

    The keys and values of the step's own tokens must already be in the cache. Padding tokens get
    unspecified output.
    """
    if not use_triton(q):
        return naive(q, cache, plan, scale, softcap)
    return paged.launch(q, cache, plan, scale, softcap)


def naive(q: Tensor, cache: Tensor, plan: Plan, scale: float, softcap: float | None = None) -> Tensor:
    parts = plan.parts
    if parts and parts[0].tokens is None:
        return _naive(q, cache, parts[0], scale, softcap)
    out = torch.empty_like(q)
    for part in parts:
        out[part.tokens] = _naive(q[part.tokens], cache, part, scale, softcap)
    return out


def _naive(q: Tensor, cache: Tensor, part: Part, scale: float, softcap: float | None) -> Tensor:
    _, num_kv_heads, _, _, head_dim = cache.shape
    batch = part.batch
    B, Q, G = batch.num_rows, batch.max_q_len, q.shape[1] // num_kv_heads
    k, v = cache.flatten(0, 1).index_select(1, part.blocks).view(2, num_kv_heads * B, -1, head_dim)
    # The G query heads of a KV head become rows of one matrix: [Hkv*B, G*Q, D]
    grid = q if batch.padded else q[batch.grid]
    grouped = grid.view(B, Q, num_kv_heads, G, head_dim).permute(2, 0, 3, 1, 4)
    grouped = grouped.reshape(num_kv_heads * B, G * Q, head_dim)
    grouped, mask = _enough(grouped, part.mask)
    if softcap is None:
        scores = torch.baddbmm(mask, grouped, k.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap)
        scores = scores + mask
    out = torch.bmm(scores.softmax(-1), v)[:, : G * Q].view(num_kv_heads, B, G, Q, head_dim)
    out = out.permute(1, 3, 0, 2, 4).reshape(B * Q, -1, head_dim)
    return out if batch.padded else out[batch.in_row]


def _enough(queries: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """queries [N, M, D] and mask [N or 1, M, width], repeated until their product is not one of `FEW`: of one
    query with a short text in a narrow model it would be, and of several beside it not."""
    products = queries.numel() * mask.shape[2]
    if queries.dtype == torch.float32 or products == 0 or products > FEW:
        return queries, mask
    times = FEW // products + 1
    return queries.repeat(1, times, 1), mask.repeat(1, times, 1)
