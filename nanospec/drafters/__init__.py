"""What guesses. A drafter fills drafts for the rows of a step; verification does not care which."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kernels.ngram import Proposal
from ..state import State
from .ngram import NgramDrafter

__all__ = ["Drafter", "NgramDrafter"]


class Drafter(Protocol):
    """Guesses tokens from the device rows, without waiting for the device."""

    def propose(self, state: State, rows: Tensor, k: int) -> Proposal:
        """Up to `k` drafts for each of the request rows [B] int32; none for -1."""
        ...
