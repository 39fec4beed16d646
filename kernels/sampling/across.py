"""The target's own token where every rank has the logits of a part of the vocabulary
(`layer/vocab_parallel.py`).

    logits      [T, n]           the rank's: of the tokens from `first` on
    candidates  [2, C, T] f32    the largest value of each of C chunks of them, and its token
    targets     [T] int32        as `sample` gives them, from the candidates [ranks, 2, C, T] of all

Ranks exchange candidates, not logits. That is enough for requests that draw from all tokens as the model
has them: greedily, or with temperature (as `sample`: argmax(score - T log E), ties to the lowest id;
NAN_TOKEN where a logit is NaN or the largest is infinite). Requests that ask for more need the logits of all.
A float32 holds a token's id exactly, as they are below 2^24.

Kernel: a program per query and chunk of 2048 tokens, as in `scan.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..codes import NAN_TOKEN
from ..dispatch import use_triton
from ..speculation.walk import rows_of
from ..table import Table
from . import noise
from .scan import CHUNK, winner_of
from .scores import this_query


def best(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    """Return a rank's candidates from its first `count` logits; the rest are padding. Candidates of padding
    queries are unspecified."""
    return (launch if use_triton(logits) else naive)(logits, first, count, table, batch)


def choose(candidates: Tensor) -> Tensor:
    """Return the targets, from the candidates of all ranks."""
    values, ids = candidates.transpose(0, 1).flatten(1, 2)  # [ranks * C, T] each
    largest = values.amax(0)
    token = torch.where(values == largest, ids, float("inf")).amin(0)
    return torch.where(largest.isfinite(), token, NAN_TOKEN).int()


def naive(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    scores = logits[:, :count].to(torch.float32, copy=True)
    ids = torch.arange(first, first + count, device=logits.device)
    for row in rows_of(batch):
        temperature = float(table.temperature[row.request]) if row.request >= 0 else 0
        for t in range(row.start, row.start + len(row.ids)) if temperature > 0 else ():
            log_e = noise.naive(int(table.seed[row.request]), int(batch.positions[t]) + 1, ids)
            scores[t] -= temperature * log_e
    value, place = scores.max(-1)
    return torch.stack([value, ids[place].float()])[:, None]


@triton.jit(do_not_specialize=["T"])
def _best(logits, stride, part, table, batch, out, T):
    query, chunk = this_query(batch), tl.program_id(2)
    if query.s < 0:
        return
    first, count = part
    values, tokens = out
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    row = logits + query.t.to(tl.int64) * stride
    scores = tl.load(row + place, place < count, other=float("-inf")).to(tl.float32)
    invalid = tl.max((scores != scores).to(tl.int32)) > 0
    value, token = winner_of(scores, first + place, query, table, batch)
    tl.store(values + chunk * T + query.t, tl.where(invalid, float("nan"), value))
    tl.store(tokens + chunk * T + query.t, token.to(tl.float32))


def launch(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    (T, n), B = logits.shape, batch.num_rows
    chunks = triton.cdiv(n, CHUNK.value)  # as many on all ranks
    candidates = torch.empty(2, chunks, T, dtype=torch.float32, device=logits.device)
    if T and B:
        _best[(batch.max_q_len, B, chunks)](
            logits, logits.stride(0), (first, count), table, batch.tensors, tuple(candidates), T, num_warps=4
        )
    return candidates
