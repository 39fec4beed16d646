"""Guess by looking the last tokens up in the request's own text.

Chains: `kernels/ngram.py`; with a tree width above 1 several continuations: `kernels/ngram_tree.py`.
"""

from __future__ import annotations

from torch import Tensor

from ..config import SpecConfig
from ..kernels.speculation import ngram, ngram_tree
from ..kernels.speculation.proposal import Proposal
from ..state import State
from .base import Drafter


class NgramDrafter(Drafter):
    """Prompt lookup over the device-side history. Has no parameters and remembers nothing."""

    def __init__(self, spec: SpecConfig) -> None:
        self.max_n, self.width = spec.prompt_lookup_max, spec.tree_width

    def propose(self, state: State, rows: Tensor, k: int, passes: int, max_kv_len: int) -> Proposal:
        text = (state.tokens, state.num_tokens, rows, state.min_n, state.max_n, state.limit, state.max_len)
        if self.width == 1:
            return ngram.propose(*text, k, self.max_n)
        return ngram_tree.propose(*text, state.width, k, self.max_n, self.width)
