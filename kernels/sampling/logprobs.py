"""Log-probabilities of the model itself (before bias, penalties and temperature), as vLLM reports them.

    logits  [T, V]        bf16, fp16 or fp32
    index   [N] int       which row of logits each result is about
    tokens  [N] int       whose log-probability is asked; -1 (no token) counts as 0
    own     [N] float32   log softmax(logits[index])[tokens]
    rank    [N] int32     1 + the number of tokens with a larger logit
    top     [N, n] float32, top_ids [N, n] int32    the n likeliest tokens, of equal ones those with the
                          lowest ids first

Kernel: two launches, and no float32 copy of the logits. `_scan` reads them once, each program a chunk
of 4096 tokens of one row, and leaves the chunk's n largest, found one after another in registers;
`_finish` merges. Meant for the few rows that ask and an n of some 20; limit: chunks * n <= 8192.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import use_triton
from ..launch import next_power_of_2
from .scan import of_chunks
from .top_k_top_p import best_of

CHUNK = 4096
MAX_CANDIDATES = 8192


class Logprobs(NamedTuple):
    """See the module docstring."""

    own: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor


class Partials(NamedTuple):
    """What `_scan` leaves of each chunk: its largest logit, sum(exp(logit - largest)), how many exceed the
    token asked for, [N, chunks] each; its largest logits and their ids, [N, chunks * n] each."""

    largest: Tensor
    mass: Tensor
    above: Tensor
    top: Tensor
    top_ids: Tensor


def logprobs(logits: Tensor, index: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Log-probabilities of `tokens` and of the `num_top` likeliest, in rows `index` of `logits`."""
    return (launch if use_triton(logits) else naive)(logits, index, tokens, num_top)


def naive(logits: Tensor, index: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    x = logits[index.long()].float()
    chosen = x.gather(1, tokens.long().clamp(min=0)[:, None])
    # PyTorch splits a single row among threads, and several by row: the same sums in two orders.
    total = (x.repeat(2, 1) if len(x) == 1 else x).logsumexp(-1, keepdim=True)[: len(x)]
    top_ids = _largest(x, num_top)
    top = x.gather(1, top_ids)
    rank = (x > chosen).sum(1) + 1
    return Logprobs((chosen - total)[:, 0], rank.int(), top - total, top_ids.int())


def _largest(x: Tensor, count: int) -> Tensor:
    """[N, count] the indices of the largest numbers of float32 rows, of equal ones the first first (`topk`
    takes any of them, depending on `count`): by a key of 64 bits, the number's and then the index's."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    key = (ascending.long() << 32) - torch.arange(x.shape[1], device=x.device)
    return key.topk(count, -1).indices


@triton.jit(do_not_specialize=["num_top"])
def _scan(logits, stride, vocab, index, tokens, partials, num_top, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    x = logits + tl.load(index + row).to(tl.int64) * stride
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = tl.load(x + ids, ids < vocab, other=float("-inf")).to(tl.float32)
    chosen = tl.load(x + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    largest = tl.max(scores)
    below = tl.where(scores == largest, 0.0, scores - largest)  # 0 also where all are -inf
    out = row * tl.num_programs(1) + chunk
    tl.store(partials.largest + out, largest)
    tl.store(partials.mass + out, tl.sum(tl.exp(below)))
    tl.store(partials.above + out, tl.sum((scores > chosen).to(tl.int32)))
    out *= num_top
    _store_largest(scores, ids, 0.0, partials.top + out, partials.top_ids + out, num_top)


@triton.jit(do_not_specialize=["num_top"])
def _finish(
    logits, stride, index, tokens, partials, result, num_top,
    CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    largest = of_chunks(partials.largest, row, CHUNKS)
    best = tl.max(largest)
    mass = of_chunks(partials.mass, row, CHUNKS, 0.0)
    total = best + tl.log(tl.sum(mass * tl.exp(largest - best)))
    x = logits + tl.load(index + row).to(tl.int64) * stride
    chosen = tl.load(x + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    tl.store(result.own + row, chosen - total)
    tl.store(result.rank + row, 1 + tl.sum(of_chunks(partials.above, row, CHUNKS, 0)))
    c = tl.arange(0, CANDIDATES)
    inside, at = c < CHUNKS * num_top, row * CHUNKS * num_top + c
    values = tl.load(partials.top + at, inside, other=float("-inf"))
    ids = tl.load(partials.top_ids + at, inside, other=2147483647)
    out = row * num_top
    _store_largest(values, ids, total, result.top + out, result.top_ids + out, num_top)


@triton.jit
def _store_largest(values, ids, minus, value_out, id_out, num_top):
    """Store the num_top largest of a block of values less `minus`, and their ids, one by one."""
    for j in range(num_top):
        value, token = best_of(values, ids)
        tl.store(value_out + j, value - minus)
        tl.store(id_out + j, token)
        # A logit may be -inf too; with the highest of ids it loses the tie to those not found yet.
        found = ids == token
        values, ids = tl.where(found, float("-inf"), values), tl.where(found, 2147483647, ids)


def launch(logits: Tensor, index: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    (_, V), N = logits.shape, len(index)
    chunks = -(-V // CHUNK)
    limit = min(V, MAX_CANDIDATES // chunks)
    if not 0 <= num_top <= limit:
        raise ValueError(f"{num_top} log-probabilities per token exceed the limit of {limit}.")
    if logits.stride(1) != 1:
        raise ValueError("The rows of the logits must be contiguous.")
    wide = chunks * num_top
    f32, i32 = (partial(logits.new_empty, dtype=dtype) for dtype in (torch.float32, torch.int32))
    partials = Partials(f32(N, chunks), f32(N, chunks), i32(N, chunks), f32(N, wide), i32(N, wide))
    result = Logprobs(f32(N), i32(N), f32(N, num_top), i32(N, num_top))
    if N:
        _scan[(N, chunks)](
            logits, logits.stride(0), V, index, tokens, partials, num_top, CHUNK=CHUNK, num_warps=8
        )
        _finish[(N,)](
            logits, logits.stride(0), index, tokens, partials, result, num_top,
            CHUNKS=chunks, CANDIDATES=next_power_of_2(max(wide, 1)), num_warps=4,
        )  # fmt: skip
    return result
