"""Log-probabilities of the model itself (before bias, penalties and temperature), as vLLM reports them.

    logits  [T, V]        bf16, fp16 or fp32
    index   [N] int       which row of logits each result is about
    tokens  [N] int       whose log-probability is asked; -1 (no token) counts as 0
    own     [N] float32   log softmax(logits[index])[tokens]
    rank    [N] int32     1 + the number of tokens with a larger logit
    top     [N, n] float32, top_ids [N, n] int32    the n likeliest tokens, of equal ones those with the
                          lowest ids first

A row has the same bits alone and among others. All but the sums of exponentials is exact, so only they need
a kernel of their own: PyTorch's order of summation depends on the number of rows. Meant for the few rows that
ask: float32 copies of the logits are made of `PIECE` rows at a time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import use_triton

CHUNK = 4096  # tokens per iteration
PIECE = 32  # rows


class Logprobs(NamedTuple):
    """See the module docstring."""

    own: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor


def logprobs(logits: Tensor, index: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Return log-probabilities of `tokens` and of the `num_top` likeliest, in rows `index` of `logits`."""
    found = []
    for rows, chosen in zip(index.long().split(PIECE), tokens.long().split(PIECE), strict=True):
        x = logits[rows].float()
        own, total = x.gather(1, chosen.clamp(min=0)[:, None]), log_sum_exp(x)[:, None]
        rank, top_ids = (x > own).sum(1) + 1, _largest(x, num_top)
        found.append(((own - total)[:, 0], rank.int(), x.gather(1, top_ids) - total, top_ids.int()))
    return Logprobs(*map(torch.cat, zip(*found, strict=True)))


def _largest(x: Tensor, count: int) -> Tensor:
    """Return [N, count] the indices of the largest numbers of float32 rows, of equal ones the first first
    (`topk` takes any of them, depending on `count`): by a key of 64 bits, the number's and the index's."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    key = (ascending.long() << 32) - torch.arange(x.shape[1], device=x.device)
    return key.topk(count, -1).indices


def log_sum_exp(x: Tensor) -> Tensor:
    """Return log sum exp [N] of each row [N, V] float32."""
    return (launch if use_triton(x) else naive)(x)


def naive(x: Tensor) -> Tensor:
    # PyTorch splits a single row among threads, and several by row: the same sums in two orders.
    return (x.repeat(2, 1) if len(x) == 1 else x).logsumexp(-1)[: len(x)]


@triton.jit
def _log_sum_exp(x, totals, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    x += row.to(tl.int64) * vocab
    largest, mass = tl.full([CHUNK], float("-inf"), tl.float32), tl.zeros([CHUNK], tl.float32)
    for first in range(0, vocab, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        largest = tl.maximum(largest, tl.load(x + ids, ids < vocab, other=float("-inf")))
    best = tl.max(largest)
    for first in range(0, vocab, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        mass += tl.exp(tl.load(x + ids, ids < vocab, other=float("-inf")) - best)
    tl.store(totals + row, best + tl.log(tl.sum(mass)))


def launch(x: Tensor) -> Tensor:
    totals = x.new_empty(len(x))
    if len(x):
        _log_sum_exp[(len(x),)](x, totals, x.shape[1], CHUNK=CHUNK, num_warps=8)
    return totals
