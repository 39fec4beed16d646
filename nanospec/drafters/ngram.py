"""Guess by looking the last tokens up in the request's own text: see `kernels/speculation/ngram.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.speculation import ngram
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from .base import Drafter, Option, Target

if TYPE_CHECKING:
    from ..config import SpecConfig


class NgramDrafter(
    Drafter,
    method="ngram",
    help="what followed the last tokens where they occurred before",
    options=[
        Option("prompt_lookup_min", "shortest text to look up (default: 1 token)", int, "N"),
        Option("prompt_lookup_max", "longest text to look up (default: 8 tokens)", int, "N"),
    ],
):
    """Prompt lookup over the device-side history. Has no parameters and remembers nothing."""

    makes_trees = True

    def __init__(self, spec: SpecConfig) -> None:
        self.max_n, self.width = spec.prompt_lookup_max, spec.tree_width

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> NgramDrafter:
        return cls(spec)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        return ngram.propose(table, rows, k, self.max_n, self.width)
