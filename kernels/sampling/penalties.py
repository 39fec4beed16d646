"""What a request does to the scores before drawing: logit bias, barred stop tokens and penalties.

For a token that occurs c times in the output (committed output and the drafts before the position):
    score += bias
    score  = -inf                               for stop tokens while position < min_len
    score  = score / repetition if score > 0 else score * repetition     if c > 0 or in the prompt
    score -= frequency * c + presence * (c > 0)
Repetition penalty: Keskar et al., 2019 (CTRL); the order is vLLM's.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..table import Table


def naive(scores: Tensor, s: int, position: int, drafts: Sequence[int], table: Table) -> Tensor:
    """The penalized scores [V] of request row s for an absolute position, given the drafts before it."""
    scores = scores + table.bias[s]
    stop_ids = table.stop_ids[s].long()
    if position < int(table.min_len[s]):
        scores[stop_ids[(stop_ids >= 0) & (stop_ids < len(scores))]] = float("-inf")
    counts = table.output_counts[s].clone()
    for token in drafts:
        counts[token] += 1
    repetition = table.repetition[s]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where((counts > 0) | table.in_prompt[s], repeated, scores)
    scores -= table.frequency[s] * counts
    scores -= table.presence[s] * (counts > 0)
    return scores


@triton.jit
def load_scores(inputs, query, ids):
    """The scores of a block of token ids at a query, penalized where the request asks for it.

    A query is (its request row, its flat index, the first flat index of its batch row, its place in
    the batch row, the batch row's length). Ids beyond the vocabulary score -inf.
    """
    inside = ids < inputs.table.vocab_size
    row = inputs.logits + query[1].to(tl.int64) * inputs.stride
    scores = tl.load(row + ids, inside, other=float("-inf")).to(tl.float32)
    if tl.load(inputs.table.penalized + query[0]):
        scores = _penalize(scores, inputs.table, inputs.batch, query, ids)
    return scores


@triton.jit
def _penalize(scores, table, batch, query, ids):
    s, t, start, i, n = query
    inside = ids < table.vocab_size
    offset = s.to(tl.int64) * table.vocab_size
    counts = tl.load(table.output_counts + offset + ids, inside, other=0)
    if batch.TREE:
        ancestors = tl.load(batch.ancestors + t)
        for j in range(1, n):
            draft = tl.where((ancestors >> j) & 1 == 1, tl.load(batch.input_ids + start + j), -1)
            counts += (draft == ids).to(tl.int32)
    else:
        for j in range(1, i + 1):
            counts += (tl.load(batch.input_ids + start + j) == ids).to(tl.int32)

    scores += tl.load(table.bias + offset + ids, inside, other=0.0)
    if tl.load(batch.positions + t) + 1 < tl.load(table.min_len + s):
        for m in range(table.num_stops):
            stop = tl.load(table.stop_ids + s * table.num_stops + m)
            scores = tl.where(ids == stop, float("-inf"), scores)
    in_prompt = tl.load(table.in_prompt + offset + ids, inside, other=0) != 0
    repetition = tl.load(table.repetition + s)
    repeated = tl.where(scores > 0, scores / repetition, scores * repetition)
    scores = tl.where((counts > 0) | in_prompt, repeated, scores)
    scores -= tl.load(table.frequency + s) * counts
    return scores - tl.load(table.presence + s) * (counts > 0)
