"""One pass over the logits, for what draws from them: `sample` and `accept`.

Each program takes a chunk of 2048 tokens of one query (so a single query still fills the GPU) and leaves
what is known of the chunk: its winner where a request draws from all tokens; for requests with filters,
whose chunks cannot have a winner yet, the probability mass and the largest scores of groups of tokens.
Chunks and groups depend on V alone, so a query's bits do not depend on what runs beside it. Limits:
V <= 262144; the rows of the logits and the tables of `Params` contiguous. The oracle is `sample.naive`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..launch import next_power_of_2
from . import noise, penalties, top_k_top_p

if TYPE_CHECKING:
    from .sample import Params

CHUNK = 2048  # tokens of the vocabulary per program
MAX_GROUPS = 1024  # per query; 64 to 256 tokens each
MAX_VOCAB = 262144


class Inputs(NamedTuple):
    """What the kernels read. A tuple keeps their argument lists short."""

    logits: Tensor
    stride: int
    vocab: int
    input_ids: Tensor
    rows: Tensor
    q_start: Tensor
    q_len: Tensor
    positions: Tensor
    ancestors: Tensor | None
    num_stops: int
    params: Params


class Partials(NamedTuple):
    """What a chunk tells about itself, [T, chunks] each, and about its groups, [T, groups].

    The winner's value and token; the largest score, NaN if a logit is; with filters the mass
    sum(exp((score - largest) / T)) and the groups' largest scores.
    """

    value: Tensor
    token: Tensor
    largest: Tensor
    mass: Tensor
    groups: Tensor


@triton.jit
def this_query(inputs, max_q_len):
    """This program's query for `penalties.load_scores`; the request row is -1 if there is none."""
    b = tl.program_id(0) // max_q_len
    i = tl.program_id(0) % max_q_len
    start, n = tl.load(inputs.q_start + b), tl.load(inputs.q_len + b)
    s = tl.where(i < n, tl.load(inputs.rows + b), -1)
    return s, start + i, start, i, n


@triton.jit(do_not_specialize=["max_q_len"])
def _scan(inputs, partials, max_q_len, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    query = this_query(inputs, max_q_len)
    s, t = query[0], query[1]
    if s < 0:
        return
    chunk, num_chunks = tl.program_id(1), tl.num_programs(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = penalties.load_scores(inputs, query, ids)
    invalid = tl.max((scores != scores).to(tl.int32)) > 0
    largest = tl.max(tl.where(scores == scores, scores, float("-inf")))
    out = t * num_chunks + chunk
    tl.store(partials.largest + out, tl.where(invalid, float("nan"), largest))
    temperature = tl.load(inputs.params.temperature + s)
    if top_k_top_p.asked(inputs, s):
        below = tl.where(scores == largest, 0.0, scores - largest)  # 0 also where all are -inf
        tl.store(partials.mass + out, tl.sum(tl.exp(below / temperature)))
        groups = tl.max(tl.reshape(scores, [CHUNK // GROUP, GROUP]), 1)
        g = tl.arange(0, CHUNK // GROUP)
        tl.store(partials.groups + out.to(tl.int64) * (CHUNK // GROUP) + g, groups)
    else:
        if temperature > 0:
            position = tl.load(inputs.positions + t) + 1
            scores -= temperature * noise.block(tl.load(inputs.params.seed + s), position, ids)
        value, token = top_k_top_p.best_of(scores, ids)
        tl.store(partials.value + out, value)
        tl.store(partials.token + out, token)


@triton.jit
def best_score(partials, t, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """The largest score at a query, and whether it says that there is nothing to draw from."""
    c = tl.arange(0, CHUNKS_PADDED)
    largest = tl.load(partials.largest + t * CHUNKS + c, c < CHUNKS, other=float("-inf"))
    best = tl.max(tl.where(largest == largest, largest, float("-inf")))
    invalid = tl.max((largest != largest).to(tl.int32)) > 0
    return best, invalid | (tl.abs(best) == float("inf"))


@triton.jit
def whole_mass(inputs, partials, s, t, best, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """The sum of exp((score - best) / temperature) over the vocabulary, at a query with filters."""
    c = tl.arange(0, CHUNKS_PADDED)
    inside, at = c < CHUNKS, t * CHUNKS + c
    largest = tl.load(partials.largest + at, inside, other=float("-inf"))
    below = (largest - best) / tl.load(inputs.params.temperature + s)
    return tl.sum(tl.load(partials.mass + at, inside, other=0.0) * tl.exp(below))


def make_inputs(logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Batch) -> Inputs:
    """Refuse what the kernels would read wrongly."""
    V = logits.shape[1]
    if V > MAX_VOCAB:
        raise ValueError(f"A vocabulary of {V} exceeds the sampling kernel's limit of {MAX_VOCAB}.")
    if logits.stride(1) != 1:
        raise ValueError("The rows of the logits must be contiguous.")
    for name in ("bias", "in_prompt", "output_counts"):
        table = getattr(params, name)
        if table.shape[1] != V or not table.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous [S, {V}], not {tuple(table.shape)}.")
    return Inputs(
        logits, logits.stride(0), V, input_ids, rows, batch.q_start, batch.q_len, batch.positions,
        batch.ancestors, params.stop_ids.shape[1], params,
    )  # fmt: skip


def scan(inputs: Inputs, max_q_len: int) -> tuple[Partials, dict[str, int]]:
    """Launch the scan of up to max_q_len queries per row: the partials, and the constants that reading
    them takes."""
    V, T, B = inputs.vocab, inputs.logits.shape[0], inputs.rows.shape[0]
    group = max(64, next_power_of_2(-(-V // MAX_GROUPS)))
    chunks = -(-V // CHUNK)
    groups = chunks * (CHUNK // group)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(T, columns, dtype=dtype, device=inputs.logits.device)

    f32, i32 = torch.float32, torch.int32
    partials = Partials(
        empty(chunks, f32), empty(chunks, i32), empty(chunks, f32), empty(chunks, f32),
        empty(groups, f32),
    )  # fmt: skip
    if T and B:
        _scan[(B * max_q_len, chunks)](inputs, partials, max_q_len, CHUNK=CHUNK, GROUP=group, num_warps=4)
    constants = {
        "CHUNKS": chunks, "CHUNKS_PADDED": next_power_of_2(chunks),
        "GROUPS": groups, "GROUPS_PADDED": next_power_of_2(groups), "GROUP": group,
        "BF16": inputs.logits.dtype == torch.bfloat16,
    }  # fmt: skip
    return partials, constants
