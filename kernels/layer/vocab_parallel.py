"""Products and an embedding of whose weight every rank has a part, and what ranks exchange to use it.

* `Summed`: columns of [N, K] are divided, so every rank has a summand of each number of the product.
* `Vocabulary`, `Embedding`: rows of [V, H] are divided; the last rank's may reach beyond V.

All that ranks exchange goes through a `Gather`. That ranks get the same numbers in the same order is all that
is needed for them to compute the same bits (an all-reduce of a library adds in an order that depends on the
size of the message, so that a token's bits would depend on its neighbours).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import Linear
from .norm import Norm
from .stream import Stream, residual_add, total

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


class Summed(Linear):
    """A product of which every rank has a summand, by its `part` [N, K / ranks] of the weight. Of the bias
    one rank has all, and the others zeros."""

    def __init__(self, part: Linear, gather: Gather, exchange: Exchange, ranks: int) -> None:
        super().__init__(part.weight, part.bias)
        self.part, self.gather, self.exchange, self.ranks = part, gather, exchange, ranks

    def add_to(self, stream: Stream, x: Tensor, norm: Norm, own: Norm | None = None) -> Stream:
        return residual_add(self.parts(self.part(x)), stream.x, norm, own)

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


class Vocabulary(Linear):
    """The lm_head, of which every rank has a `part` [V / ranks, H]: of `size` rows those from `first`
    on."""

    def __init__(self, part: Linear, gather: Gather, first: int, size: int) -> None:
        super().__init__(part.weight)
        self.part, self.gather, self.first, self.size = part, gather, first, size

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        columns = self.gather(self.part(x))  # [ranks, T, V / ranks]
        logits = columns.transpose(0, 1).flatten(1)[:, : self.size]
        return logits.contiguous() if out is None else out.copy_(logits)


@dataclass(frozen=True)
class Embedding:
    """The embedding, of which every rank has a `part` [V / ranks, H]: the rows from `first` on."""

    part: Tensor
    gather: Gather
    first: int

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the rows [T, H] of ids [T]: those of one rank, to which the others add zeros."""
        mine = (ids >= self.first) & (ids < self.first + len(self.part))
        rows = F.embedding(torch.where(mine, ids - self.first, 0), self.part)
        return self.gather(rows.masked_fill(~mine[:, None], 0)).sum(0)
