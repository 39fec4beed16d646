"""Attention over the paged KV cache.

    q                 [T, Hq, D]
    k_cache, v_cache  [Hkv, num_blocks, block_size, D]     one layer; Hq is a multiple of Hkv
    out               [T, Hq, D]

One operation serves decoding (one query per row), verification (K+1 queries per row, chain or tree)
and chunked prefill: what a query sees is stated by `Batch` alone. The queries of all heads that share
a KV head are treated together, so K/V are read once for all of them. A sliding window of w lets a
query see itself and the w - 1 positions before it; in a tree, the step's own tokens are taken to lie
inside the window. Head dimensions up to 256; bf16, fp16 or fp32.

Decoding and verification (`split_kv.py`) split the cache over programs at fixed absolute places;
pieces of prompts (`prefill.py`) are walked tile by tile. Either way a query's bits depend neither on
the batch nor on the number of drafts or the size of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..batch import Batch
from ..dispatch import use_triton
from . import prefill, split_kv

SPLIT_ROWS = 8  # from so many rows on, `naive` computes those with one query apart from the others
TILE = 128  # queries of a prompt that `naive` computes at once


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Batch, scale: float, window: int | None = None
) -> Tensor:
    """Softmax(q k^T * scale) v for every query over the cache positions it may see.

    The keys and values of the step's own tokens must already be in the cache. Padding tokens get
    unspecified output.
    """
    if not use_triton(q):
        return naive(q, k_cache, v_cache, rows, scale, window)
    launch = prefill.launch if rows.prefill else split_kv.launch
    return launch(q, k_cache, v_cache, rows, scale, window)


def naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Batch, scale: float, window: int | None = None
) -> Tensor:
    """The specification in plain PyTorch; also the CPU path.

    Prompts are computed tile by tile, each as a few queries of a row are: so prefill has the bits of
    decoding, in chunks of any size.
    """
    if "_parts" not in rows.__dict__:
        rows.__dict__["_parts"] = list(_tiles(rows)) if rows.prefill else _parts(rows)
    parts: list[tuple[Tensor | slice, Batch]] = rows.__dict__["_parts"]
    if not parts:
        return _naive(q, k_cache, v_cache, rows, scale, window)
    out = torch.empty_like(q)
    for tokens, part in parts:
        out[tokens] = _naive(q[tokens], k_cache, v_cache, part, scale, window)
    return out


def _parts(rows: Batch) -> list[tuple[Tensor | slice, Batch]]:
    """The rows with one query and those with several as batches of their own, with their flat tokens, so
    that one row's drafts do not pad all others; empty where that would not pay."""
    if rows.uniform or rows.num_rows < SPLIT_ROWS or rows.ancestors is not None:
        return []
    single = rows.q_len == 1
    owner = torch.repeat_interleave(rows.q_len)  # packed: the row of each flat token
    parts: list[tuple[Tensor | slice, Batch]] = []
    for chosen in (single, ~single & (rows.q_len > 0)):
        index, tokens = chosen.nonzero().squeeze(1), chosen[owner].nonzero().squeeze(1)
        if len(index):
            q_len, base_len = rows.q_len[index], rows.base_len[index]
            part = Batch(
                positions=rows.positions[tokens],
                slots=rows.slots[tokens],
                block_table=rows.block_table[index],
                q_start=(q_len.cumsum(0) - q_len).int(),
                q_len=q_len,
                base_len=base_len,
                max_q_len=int(q_len.max()),
                max_kv_len=int((base_len + q_len).max()),
            )
            parts.append((tokens, part))
    return parts


def _tiles(rows: Batch) -> Iterator[tuple[slice, Batch]]:
    """The tiles of long chains as batches of their own, with their flat tokens."""
    lengths = zip(rows.q_start.tolist(), rows.q_len.tolist(), rows.base_len.tolist(), strict=True)
    for b, (start, n, base) in enumerate(lengths):
        for first in range(0, n, TILE):
            size = min(TILE, n - first)
            tokens = slice(start + first, start + first + size)
            yield tokens, Batch(
                positions=rows.positions[tokens],
                slots=rows.slots[tokens],
                block_table=rows.block_table[b : b + 1],
                q_start=torch.zeros_like(rows.q_start[:1]),
                q_len=torch.full_like(rows.q_len[:1], size),
                base_len=rows.base_len[b : b + 1] + first,
                max_q_len=size,
                max_kv_len=base + first + size,
            )


def _naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Batch, scale: float, window: int | None
) -> Tensor:
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
    rows: Batch, num_kv_heads: int, group: int, width: int, dtype: torch.dtype, window: int | None
) -> Tensor:
    """[Hkv*B, group*Q, width] of 0 and -inf (or [1, ...] for one row: it broadcasts over the heads), made
    once per step and kept for all layers."""
    key = f"_mask_{window}"
    if key not in rows.__dict__:
        visible = rows.visible if window is None else rows.visible & _in_window(rows, window)
        B, Q, length = visible.shape
        mask = torch.full((B, 1, Q, width), float("-inf"), dtype=dtype, device=visible.device)
        mask[..., :length].masked_fill_(visible[:, None], 0.0)
        heads = 1 if B == 1 else num_kv_heads
        rows.__dict__[key] = mask.expand(heads, B, group, Q, width).reshape(heads * B, group * Q, width)
    mask = rows.__dict__[key]
    return mask


def _in_window(rows: Batch, window: int) -> Tensor:
    """[B, Q, kv] bool: cache index j is less than `window` positions before the query."""
    position = rows.positions[rows.grid][..., None]  # [B, Q, 1]
    j = torch.arange(rows.max_kv_len, device=position.device)
    if rows.ancestors is None:
        return j > position - window
    return (j > position - window) | (j >= rows.base_len[:, None, None])
