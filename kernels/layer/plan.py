"""What attention derives from a batch once per step, for all layers with the same sliding window.

The kernels take the batch and the window as they are. `attention.naive` needs more: the batch in parts
that are worth computing at once, the pages of each and a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import MAX_QUERIES, Batch

SPLIT_ROWS = 8  # from so many rows on, those with one query are computed apart from the others
TILE = 128  # queries of a prompt that are computed at once

Tokens = Tensor | slice | None


class Part(NamedTuple):
    """B rows of a batch, or a tile of one of them, that `naive` computes at once.

    Attributes:
        tokens: which flat tokens of the batch they are, None for all of them.
        batch: they alone.
        blocks: [B * n], the n pages that each row sees.
        mask: [Hkv * B, G * Q, n * block_size], 0 where a query sees a cache entry and else -inf; the first
            dimension may be 1 for one row.
    """

    tokens: Tokens
    batch: Batch
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """See the module docstring.

    Attributes:
        batch: the queries.
        num_heads: Hq.
        cache: [2, Hkv, num_blocks, block_size, D] of any layer; only its shape and dtype matter.
        window: lets a query see itself and the `window - 1` positions before it; None for all of them.
    """

    batch: Batch
    num_heads: int
    cache: Tensor
    window: int | None = None

    @cached_property
    def parts(self) -> list[Part]:
        """For `naive`: together they are all tokens but padding."""
        return [self._part(tokens, batch) for tokens, batch in _split(self.batch)]

    def _part(self, tokens: Tokens, batch: Batch) -> Part:
        _, num_kv_heads, _, block_size, _ = self.cache.shape
        # Whole pages, so that the length of every sum is a multiple of the page size: with that, and
        # plain batched products, a bf16 row has the same bits whatever is computed beside it.
        blocks = batch.block_table[:, : -(-batch.max_kv_len // block_size)]
        visible = _visible(batch, blocks.shape[1] * block_size, self.window)
        B, Q, width = visible.shape
        mask = torch.zeros(B, 1, Q, width, dtype=self.cache.dtype, device=visible.device)
        mask.masked_fill_(~visible[:, None], float("-inf"))
        heads, group = (1 if B == 1 else num_kv_heads), self.num_heads // num_kv_heads
        mask = mask.expand(heads, B, group, Q, width).reshape(heads * B, group * Q, width)
        return Part(tokens, batch, blocks.flatten(), mask)


def _visible(batch: Batch, width: int, window: int | None) -> Tensor:
    """[B, Q, width] bool: which of the first `width` cache entries of its row each query sees."""
    j = torch.arange(width, device=batch.q_start.device)
    own = (j - batch.base_len[:, None])[:, None]  # [B, 1, width]: which of the step's own tokens of the row
    if batch.ancestors is None:
        visible = own <= torch.arange(batch.max_q_len, device=j.device)[:, None]
    else:
        masks = batch.ancestors[batch.grid][..., None]  # [B, Q, 1]
        bit = (masks >> own.clamp(0, MAX_QUERIES - 1)) & 1
        visible = (own < 0) | ((bit == 1) & (own < MAX_QUERIES))
    if window is not None:
        positions = batch.positions[batch.grid]  # [B, Q]
        at = j.expand(len(positions), 1, -1)  # [B, 1, width]: the position of each entry
        if batch.ancestors is not None:
            place = own.clamp(0, batch.max_q_len - 1)
            at = torch.where(own < 0, at, positions[:, None].gather(2, place).to(at.dtype))
        visible = visible & (at > positions[..., None] - window)
    return visible


def _split(batch: Batch) -> Iterator[tuple[Tokens, Batch]]:
    """Pieces of prompts tile by tile, each as a few queries of a row are: so prefill has the bits of
    decoding, in chunks of any size. Of packed chains, rows with one query and rows with several apart, so
    that one row's drafts do not pad all others. Anything else whole."""
    if batch.prefill:
        for b, (start, n) in enumerate(zip(batch.q_start.tolist(), batch.q_len.tolist(), strict=True)):
            for first in range(0, n, TILE):
                tile = slice(start + first, start + min(first + TILE, n))
                q_len = torch.full_like(batch.q_len[:1], tile.stop - tile.start)
                yield tile, batch.part(tile, slice(b, b + 1), q_len, batch.base_len[b : b + 1] + first)
    elif batch.padded or batch.num_rows < SPLIT_ROWS or batch.ancestors is not None:
        yield None, batch
    else:
        owner = torch.repeat_interleave(batch.q_len)  # packed: the row of each flat token
        for chosen in (batch.q_len == 1, batch.q_len > 1):
            if chosen.any():
                tokens, index = chosen[owner].nonzero().squeeze(1), chosen.nonzero().squeeze(1)
                yield tokens, batch.part(tokens, index, batch.q_len[index], batch.base_len[index])
