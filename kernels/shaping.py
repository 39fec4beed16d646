"""What a request does to the scores before drawing: logit bias, barred stop tokens and penalties.

For a token that occurs c times in the output (committed output and the drafts before the position):
    score += bias
    score  = -inf                               for stop tokens while position < min_len
    score  = score / repetition if score > 0 else score * repetition     if c > 0 or in the prompt
    score -= frequency * c + presence * (c > 0)
Repetition penalty: Keskar et al., 2019 (CTRL); the order is vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .sample import Params


def naive(scores: Tensor, s: int, position: int, drafts: Tensor, params: Params) -> Tensor:
    """The shaped scores [V] of request row s for an absolute position, given the drafts before it."""
    scores = scores + params.bias[s]
    stop_ids = params.stop_ids[s].long()
    if position < int(params.min_len[s]):
        scores[stop_ids[stop_ids >= 0]] = float("-inf")
    counts = params.output_counts[s].clone()
    counts.index_add_(0, drafts.long(), torch.ones_like(drafts, dtype=counts.dtype))
    repetition = params.repetition[s]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where((counts > 0) | params.in_prompt[s], repeated, scores)
    scores -= params.frequency[s] * counts
    scores -= params.presence[s] * (counts > 0)
    return scores
