"""One pass over the logits, for what draws from them: `sample` and `accept`.

Each program takes a chunk of 2048 tokens of one query (so a single query still fills the GPU) and leaves
what is known of the chunk: its winner where a request draws from all tokens; for requests with top-k,
top-p or min-p, whose chunks cannot have a winner yet, the probability mass and the largest scores of
groups of tokens. Chunks and groups depend on V alone, so a query's bits do not depend on what runs beside
it. Limits: V <= 262144; the rows of the logits contiguous. The oracle is `sample.naive`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch, Tensors
from ..launch import next_power_of_2
from ..table import Table
from . import noise, penalties, top_k_top_p

CHUNK = tl.constexpr(2048)  # tokens of the vocabulary per program
MAX_GROUPS = 1024  # per query; 64 to 256 tokens each
MAX_VOCAB = 262144


class Inputs(NamedTuple):
    """What the kernels read: logits [T, V], their stride, the table of request rows, the batch."""

    logits: Tensor
    stride: int
    table: Table
    batch: Tensors

    @classmethod
    def of(cls, logits: Tensor, table: Table, batch: Batch) -> Inputs:
        """Refuse what the kernels would read wrongly."""
        V = logits.shape[1]
        if V > MAX_VOCAB:
            raise ValueError(f"A vocabulary of {V} exceeds the sampling kernel's limit of {MAX_VOCAB}.")
        if table.vocab_size != V:
            raise ValueError(f"Logits of {V} tokens do not fit a table for {table.vocab_size}.")
        if logits.stride(1) != 1:
            raise ValueError("The rows of the logits must be contiguous.")
        return cls(logits, logits.stride(0), table, batch.tensors)


class Partials(NamedTuple):
    """What a chunk tells about itself, [T, CHUNKS] each, and about its groups, [T, GROUPS].

    The winner's value and token; the largest score, NaN if a logit is; with top-k, top-p or min-p the mass
    sum(exp((score - largest) / T)) and the groups' largest scores. GROUP: tokens per group.
    """

    value: Tensor
    token: Tensor
    largest: Tensor
    mass: Tensor
    groups: Tensor
    CHUNKS: tl.constexpr
    GROUPS: tl.constexpr
    GROUP: tl.constexpr


@triton.jit
def this_query(batch):
    """This program's query for `penalties.load_scores`; the request row is -1 if there is none."""
    i, b = tl.program_id(0), tl.program_id(1)
    start, n = tl.load(batch.q_start + b), tl.load(batch.q_len + b)
    s = tl.where(i < n, tl.load(batch.rows + b), -1)
    return s, start + i, start, i, n


@triton.jit
def _scan(inputs, partials):
    query = this_query(inputs.batch)
    s, t = query[0], query[1]
    if s < 0:
        return
    chunk = tl.program_id(2)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = penalties.load_scores(inputs, query, ids)
    invalid = tl.max((scores != scores).to(tl.int32)) > 0
    largest = tl.max(tl.where(scores == scores, scores, float("-inf")))
    out = t * partials.CHUNKS + chunk
    tl.store(partials.largest + out, tl.where(invalid, float("nan"), largest))
    temperature = tl.load(inputs.table.temperature + s)
    if top_k_top_p.asked(inputs.table, s):
        below = tl.where(scores == largest, 0.0, scores - largest)  # 0 also where all are -inf
        tl.store(partials.mass + out, tl.sum(tl.exp(below / temperature)))
        groups = tl.max(tl.reshape(scores, [CHUNK // partials.GROUP, partials.GROUP]), 1)
        g = out.to(tl.int64) * (CHUNK // partials.GROUP) + tl.arange(0, CHUNK // partials.GROUP)
        tl.store(partials.groups + g, groups)
    else:
        if temperature > 0:
            position = tl.load(inputs.batch.positions + t) + 1
            scores -= temperature * noise.block(tl.load(inputs.table.seed + s), position, ids)
        value, token = top_k_top_p.best_of(scores, ids)
        tl.store(partials.value + out, value)
        tl.store(partials.token + out, token)


@triton.jit
def of_chunks(values, t, CHUNKS: tl.constexpr, other=float("-inf")):
    """What the chunks of query t left in values [T, CHUNKS], padded with `other` to a power of 2."""
    c = tl.arange(0, triton.next_power_of_2(CHUNKS))
    return tl.load(values + t * CHUNKS + c, c < CHUNKS, other=other)


@triton.jit
def best_score(partials, t):
    """The largest score at a query, and whether it says that there is nothing to draw from."""
    largest = of_chunks(partials.largest, t, partials.CHUNKS)
    best = tl.max(tl.where(largest == largest, largest, float("-inf")))
    invalid = tl.max((largest != largest).to(tl.int32)) > 0
    return best, invalid | (tl.abs(best) == float("inf"))


@triton.jit
def whole_mass(partials, t, best, temperature):
    """The sum of exp((score - best) / temperature) over the vocabulary, at a query with top-k etc."""
    largest = of_chunks(partials.largest, t, partials.CHUNKS)
    mass = of_chunks(partials.mass, t, partials.CHUNKS, 0.0)
    return tl.sum(mass * tl.exp((largest - best) / temperature))


def scan(inputs: Inputs, max_q_len: int) -> Partials:
    """Launch the scan of up to max_q_len queries per row."""
    T, V = inputs.logits.shape
    B = inputs.batch.rows.shape[0]
    group = max(64, next_power_of_2(-(-V // MAX_GROUPS)))
    chunks = -(-V // CHUNK.value)
    groups = chunks * (CHUNK.value // group)
    f32, i32 = torch.float32, torch.int32
    shapes = ((chunks, f32), (chunks, i32), (chunks, f32), (chunks, f32), (groups, f32))
    tensors = (inputs.logits.new_empty(T, columns, dtype=dtype) for columns, dtype in shapes)
    sizes = (tl.constexpr(size) for size in (chunks, groups, group))
    partials = Partials._make((*tensors, *sizes))
    if T and B:
        _scan[(max_q_len, B, chunks)](inputs, partials, num_warps=4)
    return partials
