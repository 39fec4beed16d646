"""Sample the targets on a GPU, in two launches; the specification is `sample.naive`.

`scan` reads the logits once. Each program reduces a chunk of 2048 tokens of one query, so that even a single
query is spread over many multiprocessors. If the request samples from all tokens, it stores the winner of the
chunk. With top-k, top-p or min-p the winner is not known yet, so it stores the probability mass of the chunk
and the maxima of groups of tokens. `_finish` compares the winners of the chunks, or samples with
`top_k_top_p`. Chunks and groups depend on V only, so the result of a query does not depend on the batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import NAN_TOKEN
from ..batch import Batch
from ..launch import next_power_of_2
from ..table import Table
from . import noise, top_k_top_p
from .scores import NO_TOKEN, Inputs, load_chunks, load_scores, max_and_id, this_query

_NAN_TOKEN = tl.constexpr(NAN_TOKEN)
CHUNK = tl.constexpr(2048)  # tokens of the vocabulary per program
MAX_GROUPS = 1024  # per query; 64 to 256 tokens each


class Scan(NamedTuple):
    """The inputs, and the results per chunk, [N, CHUNKS] each, and per group, [N, GROUPS].

    `value` and `token` of the winner; `largest`, the maximum score; with top-k, top-p or min-p `mass`,
    sum(exp((score - largest) / T)), and the maxima of `groups`. `value` and `largest` are NaN if a score is.
    """

    inputs: Inputs
    value: Tensor
    token: Tensor
    largest: Tensor
    mass: Tensor
    groups: Tensor
    order: Tensor  # written by `top_k_top_p.py`: the groups by descending maximum
    CHUNKS: tl.constexpr
    GROUPS: tl.constexpr
    GROUP: tl.constexpr  # tokens per group


@triton.jit
def filters_tokens(table, s):
    """Return whether request row s filters tokens: samples with top-k, top-p or min-p."""
    top_k = tl.load(table.top_k + s)
    by_count = (top_k > 0) & (top_k < table.vocab_size)
    by_mass = (tl.load(table.top_p + s) < 1) | (tl.load(table.min_p + s) > 0)
    return (tl.load(table.temperature + s) > 0) & (by_count | by_mass)


@triton.jit
def _scan(scan):
    query = this_query(scan.inputs)
    if query.s < 0:
        return
    chunk = tl.program_id(2)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = load_scores(scan.inputs, query, ids)
    invalid = tl.max((scores != scores).to(tl.int32)) > 0
    largest = tl.max(tl.where(scores == scores, scores, float("-inf")))
    out, temperature = query.line * scan.CHUNKS + chunk, tl.load(scan.inputs.table.temperature + query.s)
    tl.store(scan.largest + out, tl.where(invalid, float("nan"), largest))
    if filters_tokens(scan.inputs.table, query.s):
        below = tl.where(scores == largest, 0.0, scores - largest)  # 0 also if all are -inf
        tl.store(scan.mass + out, tl.sum(tl.exp(below / temperature)))
        groups = tl.max(tl.reshape(scores, [CHUNK // scan.GROUP, scan.GROUP]), 1)
        g = out.to(tl.int64) * (CHUNK // scan.GROUP) + tl.arange(0, CHUNK // scan.GROUP)
        tl.store(scan.groups + g, groups)
    else:
        if temperature > 0:
            seed = tl.load(scan.inputs.table.seed + query.s)
            scores -= temperature * noise.log_e(seed, query.position, ids)
        value, token = max_and_id(scores, ids)
        tl.store(scan.value + out, tl.where(invalid, float("nan"), value))
        tl.store(scan.token + out, token)


@triton.jit
def best_score(scan, query):
    """Return the largest score of a query, and whether it is invalid: NaN or infinite."""
    largest = load_chunks(scan, query, scan.largest)
    best = tl.max(tl.where(largest == largest, largest, float("-inf")))
    invalid = tl.max((largest != largest).to(tl.int32)) > 0
    return best, invalid | (tl.abs(best) == float("inf"))


def scan(inputs: Inputs, max_q_len: int) -> Scan:
    """Launch the scan of up to `max_q_len` queries per row."""
    N, V = inputs.logits.shape
    B, chunks = len(inputs.batch.rows), triton.cdiv(V, CHUNK.value)
    group = max(64, next_power_of_2(triton.cdiv(V, MAX_GROUPS)))
    groups = chunks * (CHUNK.value // group)
    f32, i32 = torch.float32, torch.int32
    per_chunk, per_group = (
        ((chunks, f32), (chunks, i32), (chunks, f32), (chunks, f32)),
        ((groups, f32), (groups, i32)),
    )
    tensors = (
        inputs.logits.new_empty(N, columns, dtype=dtype) for columns, dtype in (*per_chunk, *per_group)
    )
    result = Scan._make((inputs, *tensors, *map(tl.constexpr, (chunks, groups, group))))
    if N and B:
        _scan[(max_q_len, B, chunks)](result, num_warps=4)
    return result


@triton.jit
def _finish(scan, targets):
    query = this_query(scan.inputs)
    if query.s < 0:
        return
    best, invalid = best_score(scan, query)
    if invalid:
        token = tl.full([], _NAN_TOKEN, tl.int32)
    elif filters_tokens(scan.inputs.table, query.s):
        token = top_k_top_p.draw(scan, query, best)
    else:
        winners, ids = load_chunks(scan, query, scan.value), load_chunks(scan, query, scan.token, NO_TOKEN)
        _, token = max_and_id(winners, ids)
    tl.store(targets + query.line, token)


def launch(logits: Tensor, table: Table, batch: Batch) -> Tensor:
    scanned = scan(Inputs.of(logits, table, batch), batch.max_q_len)
    targets = batch.rows.new_empty(len(logits))
    if batch.num_rows and len(targets):
        # Fewer warps would spill registers.
        _finish[(batch.max_q_len, batch.num_rows)](scanned, targets, num_warps=16)
    return targets
