"""What the host reads of a step: a table with a line per row, as that takes one copy, and log-probabilities.

`verify.commit` writes the table, [B, 6 + 2 Q] int32, and `decode` reads it. The columns: tokens kept; drafts;
accepted drafts; drafter; length of the match; finished code, RUNNING for rows that take no part; the Q tokens
that the step emitted, -1 beyond their number, of which the kept ones count; the source of each, OWN for those
that were not drafted.

`logprobs` gives those of the model itself (before bias, penalties and temperature), as vLLM reports them:

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

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .verify import COUNTS

PIECE = 32  # rows of which a float32 copy is made at a time


class RowReport(NamedTuple):
    """What a step did for a row."""

    tokens: list[int]  # those that were kept
    num_drafted: int
    num_accepted: int  # by verification; at a stop more may be accepted than kept
    drafter: int  # see `Proposal`; NO_DRAFTER is reported as 0
    match_len: int
    finished: int  # RUNNING or how the request ended
    sources: list[int]  # of each kept token, see `Proposal.source`


def decode(lines: list[list[int]]) -> list[RowReport]:
    """Read the lines of the table, on the host."""
    C, reports = COUNTS.value, []
    for line in lines:
        n, drafted, accepted, drafter, match_len, code = line[:C]
        tokens, sources = (line[first : first + n] for first in (C, (len(line) + C) // 2))
        reports.append(RowReport(tokens, drafted, accepted, max(drafter, 0), match_len, code, sources))
    return reports


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


def kept_logprobs(
    report: Tensor, path: Tensor, q_start: Tensor, logits: Tensor, wanted: Sequence[int]
) -> Logprobs:
    """Return log-probabilities of the kept tokens of each row b with wanted[b] >= 0, and of the likeliest, as
    many as the largest of these numbers. The tensors are those of `device/step.py:StepResult`. Waits for the
    step; to be called before the next one is queued, which overwrites the logits."""
    emitted = report[:, COUNTS.value : (report.shape[1] + COUNTS.value) // 2]
    place = torch.arange(emitted.shape[1], device=report.device)
    asks = torch.tensor(wanted, device=report.device) >= 0
    b, j = ((place < report[:, :1]) & asks[:, None]).nonzero(as_tuple=True)
    most = min(max(wanted), logits.shape[1])  # no more than there are tokens
    return logprobs(logits, q_start[b] + path[b, j], emitted[b, j], most)
