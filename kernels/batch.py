"""Which tokens of a flat batch belong to which request, and where each lies in the KV cache.

A step scores T tokens laid out flat. Row b (one request) owns tokens `q_start[b] .. q_start[b] +
q_len[b]`. Two layouts occur: *uniform*, `q_start[b] = b * max_q_len`, with rows padded to the same
length (what a captured graph needs), and *packed*, rows back to back (what a CPU prefers). A padding
token has slot -1, and nothing it computes reaches another token.

Positions count from 0. Before the step the cache holds `base_len[b]` entries of row b; its query i is
at cache index `base_len[b] + i`. It sees cache index j iff j < base_len[b], or j - base_len[b] is set
in its ancestor mask. Without a mask the queries form a chain: query i sees j <= base_len[b] + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MAX_TREE_NODES = 64  # one bit per query of a row in an int64 ancestor mask


@dataclass
class Batch:
    """A flat batch of T tokens over B rows. All tensors are on the model's device.

    Attributes:
        positions: [T] int32, rotary position of each token (0 for padding).
        slots: [T] int32, `block * block_size + offset` in the cache, -1 for padding.
        block_table: [B, max_blocks] int32, the pages of each row.
        q_start, q_len, base_len: [B] int32, see the module docstring. q_len may be 0.
        max_q_len: the largest q_len (uniform layout: the padded length).
        max_kv_len: an upper bound of base_len + q_len.
        ancestors: [T] int64 bit masks, bit i = "sees query i of its own row" (itself included), or
            None for chains.
        parents: [T] int32, with `ancestors`: the place in its own row (0 .. q_len - 1) of the query that
            each query follows, 0 for the first.
        prefill: whether these are pieces of prompts, chains of any length. Said rather than seen from the
            lengths, so that a row's bits do not depend on how long the rows beside it are.
    """

    positions: Tensor
    slots: Tensor
    block_table: Tensor
    q_start: Tensor
    q_len: Tensor
    base_len: Tensor
    max_q_len: int
    max_kv_len: int
    ancestors: Tensor | None = None
    parents: Tensor | None = None
    prefill: bool = False

    @property
    def num_rows(self) -> int:
        return self.q_start.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    # What follows is derived once per step for the `naive` operations of all layers.

    @cached_property
    def uniform(self) -> bool:
        """Whether the flat tokens are a plain [B, max_q_len] grid."""
        return self.num_tokens == self.num_rows * self.max_q_len

    @cached_property
    def grid(self) -> Tensor:
        """[B, max_q_len] int64: flat index of each query; entries beyond q_len repeat a valid one."""
        i = torch.arange(self.max_q_len, device=self.q_start.device)
        last = (self.q_len - 1).clamp(min=0)
        index = self.q_start[:, None] + torch.minimum(i, last[:, None])
        return index.clamp(max=self.num_tokens - 1).long()  # an empty last row starts at T

    @cached_property
    def in_row(self) -> Tensor:
        """[T] int64: b * max_q_len + i of each flat token of a packed batch, in order."""
        i = torch.arange(self.max_q_len, device=self.q_start.device)
        return (i < self.q_len[:, None]).flatten().nonzero().squeeze(1)

    @cached_property
    def visible(self) -> Tensor:
        """[B, max_q_len, max_kv_len] bool: what each query may see (sliding windows aside)."""
        j = torch.arange(self.max_kv_len, device=self.q_start.device) - self.base_len[:, None]  # [B, kv]
        i = torch.arange(self.max_q_len, device=self.q_start.device)
        if self.ancestors is None:
            return j[:, None] <= i[:, None]
        masks = self.ancestors[self.grid]  # [B, Q]
        own = (masks[..., None] >> j.clamp(0, MAX_TREE_NODES - 1)[:, None]) & 1
        own = (own == 1) & (j < MAX_TREE_NODES)[:, None]
        return torch.where(j[:, None] < 0, True, own)

    @cached_property
    def written(self) -> tuple[Tensor | None, Tensor]:
        """Which tokens have a slot ([n] int64, or None for all of them), and their slots as int64."""
        keep = self.slots >= 0
        if bool(keep.all()):
            return None, self.slots.long()
        index = keep.nonzero().squeeze(1)
        return index, self.slots[index].long()
