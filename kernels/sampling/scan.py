"""One pass over the logits, for what draws from them: `sample` and `accept`.

Each program takes a chunk of 2048 tokens of one query (so a single query still fills the GPU) and leaves
what is known of the chunk: its winner where a request draws from all tokens; for requests with top-k,
top-p or min-p, whose chunks cannot have a winner yet, the probability mass and the largest scores of
groups of tokens. Chunks and groups depend on V alone, so a query's bits do not depend on what runs beside
it. The oracle is `sample.naive`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2
from . import noise
from .scores import Inputs, load_scores, this_query

CHUNK = tl.constexpr(2048)  # tokens of the vocabulary per program
MAX_GROUPS = 1024  # per query; 64 to 256 tokens each
NO_TOKEN = tl.constexpr(2147483647)  # behind all others


class Partials(NamedTuple):
    """What a chunk tells about itself, [N, CHUNKS] each, and about its groups, [N, GROUPS].

    The winner's value, NaN if a logit is, and its token; the largest score, NaN likewise; with top-k, top-p
    or min-p the mass sum(exp((score - largest) / T)) and the groups' largest scores. GROUP: tokens per group.
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
def best_of(values, ids):
    """Return the largest of a block of values, and the lowest id that has it."""
    largest = tl.max(values)
    return largest, tl.min(tl.where(values == largest, ids, NO_TOKEN))


@triton.jit
def better_of(best, token, values, ids):
    """Return the better of a value with its token and the best of a block."""
    high, lowest = best_of(values, ids)
    better = (high > best) | ((high == best) & (lowest < token))
    return tl.where(better, high, best), tl.where(better, lowest, token)


@triton.jit
def leaves_out(table, s):
    """Return whether request row s leaves tokens out when it draws: has top-k, top-p or min-p."""
    top_k = tl.load(table.top_k + s)
    by_count = (top_k > 0) & (top_k < table.vocab_size)
    by_mass = (tl.load(table.top_p + s) < 1) | (tl.load(table.min_p + s) > 0)
    return (tl.load(table.temperature + s) > 0) & (by_count | by_mass)


@triton.jit
def _scan(inputs, partials):
    query = this_query(inputs)
    if query.s < 0:
        return
    chunk = tl.program_id(2)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = load_scores(inputs, query, ids)
    invalid = tl.max((scores != scores).to(tl.int32)) > 0
    largest = tl.max(tl.where(scores == scores, scores, float("-inf")))
    out, temperature = query.line * partials.CHUNKS + chunk, tl.load(inputs.table.temperature + query.s)
    tl.store(partials.largest + out, tl.where(invalid, float("nan"), largest))
    if leaves_out(inputs.table, query.s):
        below = tl.where(scores == largest, 0.0, scores - largest)  # 0 also where all are -inf
        tl.store(partials.mass + out, tl.sum(tl.exp(below / temperature)))
        groups = tl.max(tl.reshape(scores, [CHUNK // partials.GROUP, partials.GROUP]), 1)
        g = out.to(tl.int64) * (CHUNK // partials.GROUP) + tl.arange(0, CHUNK // partials.GROUP)
        tl.store(partials.groups + g, groups)
    else:
        if temperature > 0:
            scores -= temperature * noise.log_e(tl.load(inputs.table.seed + query.s), query.position, ids)
        value, token = best_of(scores, ids)
        tl.store(partials.value + out, tl.where(invalid, float("nan"), value))
        tl.store(partials.token + out, token)


@triton.jit
def of_chunks(values, line, CHUNKS: tl.constexpr, other=float("-inf")):
    """Return what the chunks of a query left in values [N, CHUNKS], padded with `other` to a power of 2."""
    c = tl.arange(0, triton.next_power_of_2(CHUNKS))
    return tl.load(values + line * CHUNKS + c, c < CHUNKS, other=other)


@triton.jit
def best_score(partials, line):
    """Return the largest score at a query, and whether it says that there is nothing to draw from."""
    largest = of_chunks(partials.largest, line, partials.CHUNKS)
    best = tl.max(tl.where(largest == largest, largest, float("-inf")))
    invalid = tl.max((largest != largest).to(tl.int32)) > 0
    return best, invalid | (tl.abs(best) == float("inf"))


@triton.jit
def whole_mass(partials, line, best, temperature):
    """Return the sum of exp((score - best) / temperature) over the vocabulary, at a query with top-k etc."""
    largest = of_chunks(partials.largest, line, partials.CHUNKS)
    mass = of_chunks(partials.mass, line, partials.CHUNKS, 0.0)
    return tl.sum(mass * tl.exp((largest - best) / temperature))


def scan(inputs: Inputs, max_q_len: int) -> Partials:
    """Launch the scan of up to max_q_len queries per row."""
    N, V = inputs.logits.shape
    B = inputs.batch.rows.shape[0]
    group = max(64, next_power_of_2(-(-V // MAX_GROUPS)))
    chunks = -(-V // CHUNK.value)
    groups = chunks * (CHUNK.value // group)
    f32, i32 = torch.float32, torch.int32
    shapes = ((chunks, f32), (chunks, i32), (chunks, f32), (chunks, f32), (groups, f32))
    tensors = (inputs.logits.new_empty(N, columns, dtype=dtype) for columns, dtype in shapes)
    sizes = (tl.constexpr(size) for size in (chunks, groups, group))
    partials = Partials._make((*tensors, *sizes))
    if N and B:
        _scan[(max_q_len, B, chunks)](inputs, partials, num_warps=4)
    return partials
