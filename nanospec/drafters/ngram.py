"""Guess by looking the last tokens up in the request's own text; see `kernels/ngram.py`."""

from __future__ import annotations

from torch import Tensor

from ..config import SpecConfig
from ..kernels import ngram
from ..state import State


class NgramDrafter:
    """Prompt lookup over the device-side history. Has no parameters and no state of its own."""

    def __init__(self, spec: SpecConfig) -> None:
        self.max_n = spec.prompt_lookup_max

    def propose(self, state: State, rows: Tensor, k: int) -> ngram.Proposal:
        """Up to `k` drafts for each of `rows` [B] int32."""
        return ngram.propose(
            state.tokens,
            state.num_tokens,
            rows,
            state.min_n,
            state.max_n,
            state.limit,
            state.max_len,
            k,
            self.max_n,
        )
