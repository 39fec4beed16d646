"""The target's own token where every rank has the logits of a part of the vocabulary (`layer/split.py`).

    logits      [T, n]           the rank's: of the tokens from `first` on
    candidates  [2, C, T] f32    the largest value of each of C chunks of them, and its token
    targets     [T] int32        as `sample` gives them, from the candidates [ranks, 2, C, T] of all

Ranks exchange candidates, not logits. That is enough for requests that draw from all tokens as the model
has them: greedily, or with temperature (as `sample`: argmax(score - T log E), ties to the lowest id;
NAN_TOKEN where a logit is NaN or the largest is infinite). Who asks for more needs the logits of all. A
float32 holds a token's id exactly, as they are below 2^24.

Kernels: a program per query and chunk of 2048 tokens, as in `scan.py`; then one per query.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..codes import NAN_TOKEN
from ..dispatch import use_triton
from ..launch import next_power_of_2
from ..speculation.walk import rows_of
from ..table import Table
from . import noise, scan, top_k_top_p
from .sample import contenders
from .scan import CHUNK

_NAN_TOKEN = tl.constexpr(NAN_TOKEN)


def best(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    """The candidates of a rank, whose first `count` logits are of tokens. Those of padding queries are
    unspecified."""
    return (launch_best if use_triton(logits) else naive_best)(logits, first, count, table, batch)


def choose(candidates: Tensor) -> Tensor:
    """The targets, from the candidates of all ranks."""
    return (launch_choose if use_triton(candidates) else naive_choose)(candidates)


def naive_best(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    logits = logits[:, :count]
    value, place = logits.float().max(-1)
    temperatures = table.temperature.tolist()
    for row in rows_of(batch):
        s = row.request
        if s < 0 or temperatures[s] <= 0:
            continue
        for t in range(row.start, row.start + len(row.ids)):
            if torch.isfinite(value[t]):
                seed, position = int(table.seed[s]), int(batch.positions[t]) + 1
                scores = logits[t].float()
                kept = contenders(scores, temperatures[s], seed, position, first)
                drawn = scores[kept] - temperatures[s] * noise.naive(seed, position, kept + first)
                value[t], i = drawn.max(0)
                place[t] = kept[i]
    return torch.stack([value, (place + first).float()])[:, None]


def naive_choose(candidates: Tensor) -> Tensor:
    values, ids = candidates.transpose(0, 1).flatten(1, 2)  # [ranks * C, T] each
    largest = values.amax(0)
    token = torch.where(values == largest, ids, float("inf")).amin(0)
    return torch.where(largest.isfinite(), token, NAN_TOKEN).int()


@triton.jit
def _best(logits, stride, count, first, table, batch, candidates, T, CHUNKS):
    query = scan.this_query(batch)
    s, t = query[0], query[1]
    if s < 0:
        return
    chunk = tl.program_id(2)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < count
    scores = tl.load(logits + t.to(tl.int64) * stride + place, inside, other=float("-inf")).to(tl.float32)
    invalid = tl.max((scores != scores).to(tl.int32)) > 0
    temperature = tl.load(table.temperature + s)
    if temperature > 0:
        position = tl.load(batch.positions + t) + 1
        scores -= temperature * noise.block(tl.load(table.seed + s), position, first + place)
    value, token = top_k_top_p.best_of(scores, first + place)
    tl.store(candidates + chunk * T + t, tl.where(invalid, float("nan"), value))
    tl.store(candidates + (CHUNKS + chunk) * T + t, token.to(tl.float32))


@triton.jit(do_not_specialize=["T"])
def _choose(candidates, targets, T, RANKS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    t = tl.program_id(0)
    c = tl.arange(0, WIDTH)
    inside = c < RANKS * CHUNKS
    at = candidates + ((c // CHUNKS * 2) * CHUNKS + c % CHUNKS) * T + t
    values = tl.load(at, inside, other=float("-inf"))
    ids = tl.load(at + CHUNKS * T, inside, other=0.0).to(tl.int32)
    invalid = tl.max((values != values).to(tl.int32)) > 0
    value, token = top_k_top_p.best_of(values, tl.where(inside, ids, 2147483647))
    bad = invalid | (tl.abs(value) == float("inf"))
    tl.store(targets + t, tl.where(bad, _NAN_TOKEN, token))


def launch_best(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    (T, n), B = logits.shape, batch.num_rows
    if logits.stride(1) != 1:
        raise ValueError("The rows of the logits must be contiguous.")
    chunks = triton.cdiv(n, CHUNK.value)  # as many on all ranks
    candidates = torch.empty(2, chunks, T, dtype=torch.float32, device=logits.device)
    if T and B:
        _best[(batch.max_q_len, B, chunks)](
            logits, logits.stride(0), count, first, table, batch.tensors, candidates, T, chunks, num_warps=4
        )
    return candidates


def launch_choose(candidates: Tensor) -> Tensor:
    ranks, _, chunks, T = candidates.shape
    targets = torch.empty(T, dtype=torch.int32, device=candidates.device)
    if T:
        _choose[(T,)](
            candidates.contiguous(), targets, T, RANKS=ranks, CHUNKS=chunks,
            WIDTH=next_power_of_2(ranks * chunks), num_warps=1,
        )  # fmt: skip
    return targets
