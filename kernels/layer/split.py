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


class Summed(NamedTuple):
    """The rank's `part` [N, K / ranks] of a weight [N, K], possibly packed."""

    part: Any
    gather: Gather


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
