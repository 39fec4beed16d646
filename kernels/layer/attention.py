"""Attention over the paged KV cache.

    q      [T, Hq, D]
    cache  [2, Hkv, num_blocks, block_size, D]     keys, values of one layer; Hq is a multiple of Hkv
    out    [T, Hq, D]

One operation serves decoding (one query per row), verification (K+1 queries per row, chain or tree) and
chunked prefill: what a query sees follows from the batch and the sliding window, which counts positions. The
queries of all heads that share a KV head are treated together, so K/V are read once for all of them. Head
dimensions up to 256; bf16, fp16 or fp32.

On a GPU a query's bits depend neither on the batch nor on the number of drafts or the size of the chunk, nor
on whether it is a node of a tree (`paged.py`, `paged_tree.py`). For `naive` a tree is a mask, and its nodes
equal chains up to rounding.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import MAX_QUERIES, Batch
from ..launch import use_triton

FEW = 16**3  # multiply-adds of a product; for fewer PyTorch sums bf16 and fp16 in another order
SPLIT_ROWS = 8  # from so many rows on, those with one query are computed apart from the others
TILE = 128  # queries of a prompt that are computed at once


class Part(NamedTuple):
    """B rows of a batch, or a tile of one of them, that `naive` computes at once.

    Attributes:
        tokens: which flat tokens of the batch they are.
        batch: they alone.
        blocks: [B * n], the n pages that each row sees.
        mask: [Hkv * B, G * Q, n * block_size], 0 where a query sees a cache entry and else -inf; the first
            dimension may be 1 for one row.
    """

    tokens: Tensor | slice
    batch: Batch
    blocks: Tensor
    mask: Tensor


class AttentionMetadata:
    """What attention needs to know of a step, for all layers with the same sliding window.

    Attributes:
        batch: the queries.
        window: a query sees itself and the `window - 1` positions before it; None for all of them.
    """

    def __init__(self, batch: Batch, window: int | None = None) -> None:
        self.batch, self.window = batch, window
        self._parts: list[Part] | None = None

    def parts(self, q: Tensor, cache: Tensor) -> list[Part]:
        """Split all tokens but padding into what `naive` computes at once. Derived once for all layers."""
        if self._parts is None:
            self._parts = [self._part(tokens, b, q, cache) for tokens, b in _split(self.batch)]
        return self._parts

    def _part(self, tokens: Tensor | slice, batch: Batch, q: Tensor, cache: Tensor) -> Part:
        _, num_kv_heads, _, block_size, _ = cache.shape
        # Whole pages, so that the length of every sum is a multiple of the page size: with that, and
        # plain batched products, a bf16 row has the same bits whatever is computed beside it.
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
    """Return softmax(q k^T * scale) v for every query over the cache positions it may see; with a `softcap`
    c, the scores are c * tanh(q k^T * scale / c).

    The keys and values of the step's own tokens must already be in the cache. Padding tokens get unspecified
    output.
    """
    if use_triton(q):
        from .paged_tree import launch  # which a CPU does not load

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
        pages = cache.flatten(0, 1).index_select(1, part.blocks)
        k, v = pages.view(2, num_kv_heads * B, -1, head_dim)  # [Hkv * B, n * block_size, D]
        times = FEW // max(queries.numel() * mask.shape[2], 1) + 1
        if times > 1:  # one query on a short text in a narrow model, say
            queries, mask = queries.repeat(1, times, 1), mask.repeat(1, times, 1)
        if softcap is None:
            scores = torch.baddbmm(mask, queries, k.transpose(1, 2), alpha=scale)
        else:
            scores = torch.bmm(queries, k.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap)
            scores = scores + mask  # [Hkv * B, G * Q, n * block_size]
        values = torch.bmm(scores.softmax(-1), v)[:, : G * Q].view(num_kv_heads, B, G, Q, head_dim)
        values = values.permute(1, 3, 0, 2, 4).reshape(B * Q, -1, head_dim)  # [B * Q, Hq, D]
        out[part.tokens] = values if batch.padded else values[batch.in_row]
    return out


def _visible(batch: Batch, width: int, window: int | None) -> Tensor:
    """Return which of the first `width` cache entries of its row each query sees: [B, Q, width] bool."""
    j = torch.arange(width, device=batch.q_start.device)
    index = (j - batch.base_len[:, None])[:, None]  # [B, 1, width]: index in the step, < 0 if cached
    if batch.ancestors is None:
        visible = index <= torch.arange(batch.max_q_len, device=j.device)[:, None]
    else:
        masks = batch.ancestors[batch.grid][..., None]  # [B, Q, 1]
        bit = (masks >> index.clamp(0, MAX_QUERIES - 1)) & 1
        visible = (index < 0) | ((bit == 1) & (index < MAX_QUERIES))
    if window is not None:
        positions = batch.positions[batch.grid]  # [B, Q]
        at = j.expand(len(positions), 1, -1)  # [B, 1, width]: the position of each entry
        if batch.ancestors is not None:
            node = index.clamp(0, batch.max_q_len - 1)
            at = torch.where(index < 0, at, positions[:, None].gather(2, node).to(at.dtype))
        visible = visible & (at > positions[..., None] - window)
    return visible


def _split(batch: Batch) -> Iterator[tuple[Tensor | slice, Batch]]:
    """Chunks of prompts tile by tile, each computed as a decoding row: so prefill has the bits of decoding,
    in chunks of any size. Of packed chains, rows with one query and rows with several apart, so that drafts
    of a row do not pad all others. Anything else whole."""
    if batch.prefill:
        for b, (start, n) in enumerate(zip(batch.q_start.tolist(), batch.q_len.tolist(), strict=True)):
            for first in range(0, n, TILE):
                tile = slice(start + first, start + min(first + TILE, n))
                q_len = torch.full_like(batch.q_len[:1], tile.stop - tile.start)
                yield tile, batch.part(tile, slice(b, b + 1), q_len, batch.base_len[b : b + 1] + first)
    elif batch.padded or batch.num_rows < SPLIT_ROWS or batch.ancestors is not None:
        yield slice(None), batch
    else:
        owner = torch.repeat_interleave(batch.q_len)  # packed: the row of each flat token
        for chosen in (batch.q_len == 1, batch.q_len > 1):
            if chosen.any():
                tokens, index = chosen[owner].nonzero().squeeze(1), chosen.nonzero().squeeze(1)
                yield tokens, batch.part(tokens, index, batch.q_len[index], batch.base_len[index])
