"""The scores that a query samples from: logits after logit bias, masked stop tokens and penalties.

For a token that occurs c times in the output (the committed output and the drafts before the position):
    score += bias
    score  = -inf                               for stop tokens while position < min_len
    score  = score / repetition if score > 0 else score * repetition     if c > 0 or in the prompt
    score -= frequency * c + presence * (c > 0)
The repetition penalty is that of Keskar et al., 2019 (CTRL); the order is vLLM's. The scores of requests that
are not `penalized` are their logits.

Also defines the arguments (`Inputs`) and the `Query` that all kernels that read logits share.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch, DraftTree, Tensors
from ..table import Table

MAX_VOCAB = 262144
NO_TOKEN = tl.constexpr(2147483647)  # larger than any token ID


def scores_of(logits: Tensor, table: Table, batch: Batch, tree: DraftTree, node: int) -> tuple[Tensor, int]:
    """Return the scores [V] float32 of the query at a node, and its target's position."""
    t, s = tree.start + node, tree.row
    scores, position = logits[t].float(), int(batch.positions[t]) + 1
    if table.penalized[s]:
        scores = penalize(scores, s, position, tree.drafts_to(node), table)
    return scores, position


def penalize(scores: Tensor, s: int, position: int, drafts: Sequence[int], table: Table) -> Tensor:
    """Return the penalized scores [V] of request row s at an absolute position, after `drafts`."""
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


class Inputs(NamedTuple):
    """The inputs of the kernels: logits [N, V], the request rows and the batch."""

    logits: Tensor
    stride: int
    table: Table
    batch: Tensors

    @classmethod
    def of(cls, logits: Tensor, table: Table, batch: Batch) -> "Inputs":
        if (V := logits.shape[1]) > MAX_VOCAB:
            raise ValueError(f"The vocabulary size {V} exceeds the sampling kernel's limit of {MAX_VOCAB}.")
        return cls(logits, logits.stride(0), table, batch.tensors)


class Query(NamedTuple):
    """A scored token: its request row (-1: none), the position of its target, the row of its logits, the
    first flat index of its batch row, its node there, and that row's length."""

    s: Any
    position: Any
    line: Any
    start: Any
    node: Any
    n: Any


@triton.jit
def this_query(inputs):
    """Return the query of this program; the grid is (node, batch row)."""
    node, b = tl.program_id(0), tl.program_id(1)
    start, n = tl.load(inputs.batch.q_start + b), tl.load(inputs.batch.q_len + b)
    s = tl.where(node < n, tl.load(inputs.batch.rows + b), -1)
    position = tl.load(inputs.batch.positions + start + node, s >= 0, other=0) + 1
    return Query(s, position, start + node, start, node, n)


@triton.jit
def load_scores(inputs, query, ids):
    """Load the scores of a block of token ids at a query; -inf for ids outside the vocabulary."""
    row = inputs.logits + query.line.to(tl.int64) * inputs.stride
    scores = tl.load(row + ids, ids < inputs.table.vocab_size, other=float("-inf")).to(tl.float32)
    if tl.load(inputs.table.penalized + query.s):
        scores = _penalize(scores, inputs.table, inputs.batch, query, ids)
    return scores


@triton.jit
def _penalize(scores, table, batch, query, ids):
    s, start = query.s, query.start
    inside = ids < table.vocab_size
    offset = s.to(tl.int64) * table.vocab_size
    counts = tl.load(table.output_counts + offset + ids, inside, other=0)
    if batch.TREE:
        ancestors = tl.load(batch.ancestors + start + query.node)
        for j in range(1, query.n):
            draft = tl.where((ancestors >> j) & 1 == 1, tl.load(batch.input_ids + start + j), -1)
            counts += (draft == ids).to(tl.int32)
    else:
        for j in range(1, query.node + 1):
            counts += (tl.load(batch.input_ids + start + j) == ids).to(tl.int32)

    scores += tl.load(table.bias + offset + ids, inside, other=0.0)
    if query.position < tl.load(table.min_len + s):
        for m in range(table.num_stops):
            stop = tl.load(table.stop_ids + s * table.num_stops + m)
            scores = tl.where(ids == stop, float("-inf"), scores)
    in_prompt = tl.load(table.in_prompt + offset + ids, inside, other=0) != 0
    repetition = tl.load(table.repetition + s)
    repeated = tl.where(scores > 0, scores / repetition, scores * repetition)
    scores = tl.where((counts > 0) | in_prompt, repeated, scores)
    scores -= tl.load(table.frequency + s) * counts
    return scores - tl.load(table.presence + s) * (counts > 0)


@triton.jit
def max_and_id(values, ids):
    """Return the maximum of a block of values, and the lowest id that attains it."""
    largest = tl.max(values)
    return largest, tl.min(tl.where(values == largest, ids, NO_TOKEN))


@triton.jit
def update_max(best, token, values, ids):
    """Combine the best value and token so far with those of a block."""
    high, lowest = max_and_id(values, ids)
    better = (high > best) | ((high == best) & (lowest < token))
    return tl.where(better, high, best), tl.where(better, lowest, token)


@triton.jit
def load_chunks(scan, query, values, other=float("-inf")):
    """Load the values [N, CHUNKS] of the chunks of a query, padded with `other` to a power of 2."""
    c = tl.arange(0, triton.next_power_of_2(scan.CHUNKS))
    return tl.load(values + query.line * scan.CHUNKS + c, c < scan.CHUNKS, other=other)
