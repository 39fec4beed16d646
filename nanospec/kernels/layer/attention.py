"""Attention over the paged KV cache.

    q      [T, Hq, D]
    cache  [2, Hkv, num_blocks, block_size, D]     keys, values of one layer; Hq is a multiple of Hkv
    out    [T, Hq, D]

One operation covers decoding (one query per row), verification (K + 1 queries per row, chain or tree) and
chunked prefill. The batch and the sliding window (in positions, not cache indices) determine the attention
mask. The query heads that share a KV head are processed together, so K/V are read once for all of them.
Supports head dimensions up to 256 in bf16, fp16 or fp32.

On a GPU, the output of a query is bitwise independent of the batch, the number of drafts and the chunk size,
and the same for a tree node as for a chain (`paged.py`, `paged_tree.py`). In `naive`, a tree is a mask, and
its nodes equal chains up to rounding.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import MAX_QUERIES, Batch
from ..launch import use_triton

MIN_MULTIPLY_ADDS = 16**3  # per product; PyTorch sums smaller bf16 and fp16 products in another order
SPLIT_ROWS = 8  # minimum batch size to process rows with one query separately
TILE = 128  # queries of a prompt chunk processed at once


class Part(NamedTuple):
    """B rows of a batch, or a tile of one row, that `naive` processes at once."""

    tokens: Tensor | slice  # indices of its flat tokens in the whole batch
    batch: Batch  # of these tokens only
    blocks: Tensor  # [B * n], the first n cache blocks of each row
    # [Hkv * B, G * Q, n * block_size], or [1, ...] if B is 1: 0 where a query attends to an entry, else -inf
    mask: Tensor


class AttentionMetadata:
    """Attention inputs of a step that are shared by all layers with the same sliding window: a query attends
    to its own position and the `window - 1` before it, or to all before it."""

    def __init__(self, batch: Batch, window: int | None = None) -> None:
        self.batch, self.window = batch, window
        self._parts: list[Part] | None = None

    def parts(self, q: Tensor, cache: Tensor) -> list[Part]:
        """Split the tokens except padding into the parts that `naive` processes. Cached for all layers."""
        if self._parts is None:
            self._parts = [self._part(tokens, b, q, cache) for tokens, b in _split(self.batch)]
        return self._parts

    def _part(self, tokens: Tensor | slice, batch: Batch, q: Tensor, cache: Tensor) -> Part:
        _, num_kv_heads, _, block_size, _ = cache.shape
        # Whole blocks, so that the length of every sum is a multiple of the block size. With plain batched
        # products, this makes bf16 rows bitwise independent of the rest of the batch.
        blocks = batch.block_table[:, : -(-batch.max_kv_len // block_size)]
        visible = _visible(batch, blocks.shape[1] * block_size, self.window)
        B, Q, width = visible.shape
        mask = torch.zeros(B, 1, Q, width, dtype=cache.dtype, device=visible.device)
        mask.masked_fill_(~visible[:, None], float("-inf"))
        heads, group = (1 if B == 1 else num_kv_heads), q.shape[1] // num_kv_heads
        mask = mask.expand(heads, B, group, Q, width).reshape(heads * B, group * Q, width)
        return Part(tokens, batch, blocks.flatten(), mask)


def attention(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, softcap: float | None = None
) -> Tensor:
    """Return softmax(q k^T * scale) v for each query over the cache entries it attends to. With a `softcap`
    c, the scores are c * tanh(q k^T * scale / c).

    The cache must already contain the keys and values of this step. The output of padding tokens is
    unspecified.
    """
    if use_triton(q):
        from .paged_tree import launch  # not needed on a CPU

        return launch(q, cache, metadata.batch, metadata.window, scale, softcap)
    return naive(q, cache, metadata, scale, softcap)


def naive(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scale: float, softcap: float | None = None
) -> Tensor:
    out, (_, num_kv_heads, _, _, head_dim) = torch.empty_like(q), cache.shape
    for part in metadata.parts(q, cache):
        batch, mask, queries = part.batch, part.mask, q[part.tokens]
        B, Q, G = batch.num_rows, batch.max_q_len, q.shape[1] // num_kv_heads
        # The G query heads of a KV head become rows of one matrix.
        queries = (queries if batch.padded else queries[batch.grid]).view(B, Q, num_kv_heads, G, head_dim)
        queries = queries.permute(2, 0, 3, 1, 4).reshape(num_kv_heads * B, G * Q, head_dim)
        kv = cache.flatten(0, 1).index_select(1, part.blocks)
        k, v = kv.view(2, num_kv_heads * B, -1, head_dim)  # [Hkv * B, n * block_size, D]
        times = MIN_MULTIPLY_ADDS // max(queries.numel() * mask.shape[2], 1) + 1
        if times > 1:  # for example one query with a short context in a narrow model
            queries, mask = queries.repeat(1, times, 1), mask.repeat(1, times, 1)
        if softcap is None:
            scores = torch.baddbmm(mask, queries, k.transpose(1, 2), alpha=scale)
        else:
            scores = torch.bmm(queries, k.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap)
            scores = scores + mask  # [Hkv * B, G * Q, n * block_size]
        values = torch.bmm(scores.softmax(-1), v)[:, : G * Q].view(num_kv_heads, B, G, Q, head_dim)
        values = values.permute(1, 3, 0, 2, 4).reshape(B * Q, -1, head_dim)  # [B * Q, Hq, D]
        out[part.tokens] = values if batch.padded else values[batch.grid_index]
    return out


def _visible(batch: Batch, width: int, window: int | None) -> Tensor:
    """Return a mask [B, Q, width] bool of the first `width` cache entries that each query attends to."""
    j = torch.arange(width, device=batch.q_start.device)
    index = (j - batch.base_len[:, None])[:, None]  # [B, 1, width]: query that wrote the entry, < 0: cached
    if batch.ancestors is None:
        visible = index <= torch.arange(batch.max_q_len, device=j.device)[:, None]
    else:
        masks = batch.ancestors[batch.grid][..., None]  # [B, Q, 1]
        bit = (masks >> index.clamp(0, MAX_QUERIES - 1)) & 1
        visible = (index < 0) | ((bit == 1) & (index < MAX_QUERIES))
    if window is not None:
        positions = batch.positions[batch.grid]  # [B, Q]
        at = j.expand(len(positions), 1, -1)  # [B, 1, width]: position of each entry
        if batch.ancestors is not None:
            node = index.clamp(0, batch.max_q_len - 1)
            at = torch.where(index < 0, at, positions[:, None].gather(2, node).to(at.dtype))
        visible = visible & (at > positions[..., None] - window)
    return visible


def _split(batch: Batch) -> Iterator[tuple[Tensor | slice, Batch]]:
    """Yield the parts of a batch. A prompt chunk is split into tiles that are computed like decoding rows, so
    that prefill in chunks of any size is bitwise identical to decoding. Packed chains are split into rows
    with one query and longer ones, to save padding. Other batches are a single part."""
    if batch.prefill:
        for b, (start, n) in enumerate(zip(batch.q_start.tolist(), batch.q_len.tolist(), strict=True)):
            for first in range(0, n, TILE):
                tile = slice(start + first, start + min(first + TILE, n))
                q_len = torch.full_like(batch.q_len[:1], tile.stop - tile.start)
                yield tile, batch.select(tile, slice(b, b + 1), q_len, batch.base_len[b : b + 1] + first)
    elif batch.padded or batch.num_rows < SPLIT_ROWS or batch.ancestors is not None:
        yield slice(None), batch
    else:
        owner = torch.repeat_interleave(batch.q_len)  # row of each flat token (packed)
        for chosen in (batch.q_len == 1, batch.q_len > 1):
            if chosen.any():
                tokens, index = chosen[owner].nonzero().squeeze(1), chosen.nonzero().squeeze(1)
                yield tokens, batch.select(tokens, index, batch.q_len[index], batch.base_len[index])
