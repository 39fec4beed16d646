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
import triton
import triton.language as tl
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


@triton.jit
def load_scores(inputs, query, ids):
    """The scores of a block of token ids at a query, shaped where the request asks for it.

    A query is (its request row, its flat index, the first flat index of its batch row, its place in
    the batch row, the batch row's length). Ids beyond the vocabulary score -inf.
    """
    inside = ids < inputs.vocab
    row = inputs.logits + query[1].to(tl.int64) * inputs.stride
    scores = tl.load(row + ids, inside, other=float("-inf")).to(tl.float32)
    if tl.load(inputs.params.shaped + query[0]):
        scores = _shape(scores, inputs, query, ids, inside)
    return scores


@triton.jit
def _shape(scores, inputs, query, ids, inside):
    params = inputs.params
    s, t, start, i, n = query
    offset = s.to(tl.int64) * inputs.vocab
    counts = tl.load(params.output_counts + offset + ids, inside, other=0)
    if inputs.ancestors is None:
        for j in range(1, i + 1):
            counts += (tl.load(inputs.input_ids + start + j) == ids).to(tl.int32)
    else:
        ancestors = tl.load(inputs.ancestors + t)
        for j in range(1, n):
            draft = tl.where((ancestors >> j) & 1 == 1, tl.load(inputs.input_ids + start + j), -1)
            counts += (draft == ids).to(tl.int32)

    scores += tl.load(params.bias + offset + ids, inside, other=0.0)
    if tl.load(inputs.positions + t) + 1 < tl.load(params.min_len + s):
        for m in range(inputs.num_stops):
            stop = tl.load(params.stop_ids + s * inputs.num_stops + m)
            scores = tl.where(ids == stop, float("-inf"), scores)
    in_prompt = tl.load(params.in_prompt + offset + ids, inside, other=0) != 0
    repetition = tl.load(params.repetition + s)
    repeated = tl.where(scores > 0, scores / repetition, scores * repetition)
    scores = tl.where((counts > 0) | in_prompt, repeated, scores)
    scores -= tl.load(params.frequency + s) * counts
    return scores - tl.load(params.presence + s) * (counts > 0)
