"""Guess by looking the last tokens up in the request's own text: see `kernels/speculation/ngram.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.speculation import ngram
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from .base import Drafter, Target

if TYPE_CHECKING:
    from ..config import SpecConfig


class NgramDrafter(Drafter):
    """Prompt lookup over the device-side history. Has no parameters and remembers nothing."""

    name = "ngram"
    makes_trees = True

    def __init__(self, spec: SpecConfig) -> None:
        self.max_n, self.width = spec.prompt_lookup_max, spec.tree_width

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> NgramDrafter:
        return cls(spec)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        return ngram.propose(table, rows, k, self.max_n, self.width)
