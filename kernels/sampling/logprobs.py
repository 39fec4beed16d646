"""Log-probabilities of the model itself (before bias, penalties and temperature), as vLLM reports them.

    logits  [T, V]        bf16, fp16 or fp32
    index   [N] int       which row of logits each result is about
    tokens  [N] int       whose log-probability is asked; -1 (no token) counts as 0
    own     [N] float32   log softmax(logits[index])[tokens]
    rank    [N] int32     1 + the number of tokens with a larger logit
    top     [N, n] float32, top_ids [N, n] int32    the n likeliest tokens, of equal ones those with the
                          lowest ids first

A row has the same bits alone and among others: all but the sums of exponentials is exact, and PyTorch's
order of summation depends on the number of rows alone, so there always are as many. Meant for the few rows
that ask.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 32  # rows of which a float32 copy is made at a time


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
        own, total = x.gather(1, chosen.clamp(min=0)[:, None]), _log_sum_exp(x)
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


def _log_sum_exp(x: Tensor) -> Tensor:
    """Return log sum exp [N, 1] of each row [N, V] float32."""
    # On a CPU, PyTorch splits a single row among threads, and several by row: the same sums in two orders.
    least = PIECE if x.is_cuda else 2
    return F.pad(x, (0, 0, 0, max(least - len(x), 0))).logsumexp(-1, keepdim=True)[: len(x)]
