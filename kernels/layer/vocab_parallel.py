"""Formats of a weight of which every rank has a part, and what ranks exchange to use it.

* `Summed`: columns of [N, K] are divided, so every rank has a summand of each number of the product.
* `Vocabulary`: rows of [V, H], the embedding or lm_head, are divided; the last rank's may reach beyond V.

All that ranks exchange goes through a `Gather`. That ranks get the same numbers in the same order is all that
is needed for them to compute the same bits (an all-reduce of a library adds in an order that depends on the
size of the message, so that a token's bits would depend on its neighbours).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""x [...] of every rank, equal in shape and dtype -> [N, ...] in the order of ranks, on all of them."""


Exchange = Callable[[Tensor], Tensor]
"""x [N, ...] of every rank, x[r] for rank r -> [N, ...] in the order of ranks who sent it."""

# What a GPU receives from its neighbours (370 GB/s) in the 20 us or so that slices cost beside their bytes:
# one more exchange (10 us), and starts of kernels that add (one a rank and two or three, 1.3 us each).
EXCHANGE = 7_400_000  # bytes


def in_slices(size: int, ranks: int) -> bool:
    """Whether summands of so many bytes are added a slice by each rank.

    Gathered, a rank receives ranks - 1 of them. In slices it receives 2 (ranks - 1) / ranks, as in a ring, in
    two exchanges for one.
    """
    return size * (ranks - 1) * (ranks - 2) > ranks * EXCHANGE


class Summed(NamedTuple):
    """The rank's `part` [N, K / ranks] of a weight [N, K], possibly packed. Of its bias one rank has all, and
    the others zeros."""

    part: Any
    gather: Gather
    exchange: Exchange
    ranks: int

    def parts(self, product: Tensor) -> Tensor:
        """From this rank's summand [T, H]: those of all ranks [ranks, T, H], or their sum [1, T, H]. Added in
        order in float32 and rounded, they are the same.

        They are gathered, or, where that takes longer (`in_slices`), each rank adds some rows for all.
        """
        (T, H), n = product.shape, self.ranks
        if not in_slices(product.nbytes, n):
            return self.gather(product)
        slices = F.pad(product, (0, 0, 0, -T % n)).view(n, -1, H)
        return self.gather(total(self.exchange(slices))).view(1, -1, H)[:, :T]


def total(parts: Tensor) -> Tensor:
    """The sum of parts [N, ...] in their order, in float32 at least, rounded once."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    found = parts[0].to(wide)
    for part in parts[1:]:
        found = found + part  # which widens it: one kernel on a GPU
    return found.to(parts.dtype)


class Vocabulary(NamedTuple):
    """The rank's `part` [V / ranks, H], possibly packed: of `size` rows of the whole those from `first`
    on."""

    part: Any
    gather: Gather
    first: int
    size: int

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows [T, H] of ids [T]: those of one rank, to which the others add zeros."""
        mine = (ids >= self.first) & (ids < self.first + self.part.shape[0])
        rows = F.embedding(torch.where(mine, ids - self.first, 0), self.part)
        return self.gather(rows.masked_fill(~mine[:, None], 0)).sum(0)

    def whole(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """Columns [T, V / ranks] of each rank as [T, V], written to `out` if it is given."""
        logits = self.gather(part).transpose(0, 1).flatten(1)[:, : self.size]
        return logits.contiguous() if out is None else out.copy_(logits)
