"""The results of a step for the host: a report with one line per row, and log-probabilities.

`verify.commit` writes the report, [B, 6 + 2 Q] int32, so that the host needs one copy; `decode` reads it.
Its columns: number of kept tokens; drafts; accepted drafts; drafter; match length; `finished` (RUNNING for
inactive rows); Q columns of emitted tokens, padded with -1, of which the kept ones come first; Q columns of
their sources, FROM_TARGET for tokens that were not drafts.

`logprobs` returns those of the unmodified logits (before bias, penalties and temperature), as in vLLM:

    logits  [T, V]        bf16, fp16 or fp32
    index   [N] int       row of `logits` for each result
    tokens  [N] int       token whose log-probability is returned; -1 (no token) is treated as 0
    own     [N] float32   log softmax(logits[index])[tokens]
    rank    [N] int32     1 + the number of tokens with a larger logit
    top     [N, n] float32, top_ids [N, n] int32    the n most likely tokens, ties by the lowest ID

The result of a row is bitwise independent of the other rows: only the sums of exponentials are rounded, and
their order in PyTorch depends on the number of rows, which is therefore padded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .verify import COUNTS

PIECE = 32  # rows converted to float32 at a time


class RowReport(NamedTuple):
    """The result of a step for one row."""

    tokens: list[int]  # the kept tokens
    num_drafted: int
    num_accepted: int  # by verification, so before truncation at a stop token
    drafter: int  # see `Proposal`
    match_len: int
    finished: int  # RUNNING or why the request ended
    sources: list[int]  # source of each kept token, see `Proposal.source`


def decode(lines: list[list[int]]) -> list[RowReport]:
    """Decode the lines of a report on the host."""
    C, reports = COUNTS.value, []
    for line in lines:
        n, drafted, accepted, drafter, match_len, code = line[:C]
        tokens, sources = (line[first : first + n] for first in (C, (len(line) + C) // 2))
        reports.append(RowReport(tokens, drafted, accepted, drafter, match_len, code, sources))
    return reports


class Logprobs(NamedTuple):
    """See the module docstring."""

    own: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor


def logprobs(logits: Tensor, index: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Return log-probabilities of `tokens` and of the `num_top` most likely, in rows `index` of `logits`."""
    results = []
    for rows, chosen in zip(index.long().split(PIECE), tokens.long().split(PIECE), strict=True):
        x = logits[rows].float()
        # On a CPU, PyTorch splits a single row among threads, and with it the sum; two rows are not split.
        missing = max((PIECE if x.is_cuda else 2) - len(x), 0)
        total = F.pad(x, (0, 0, 0, missing)).logsumexp(-1, keepdim=True)[: len(x)]
        own = x.gather(1, chosen.clamp(min=0)[:, None])
        rank, top_ids = (x > own).sum(1) + 1, _largest(x, num_top)
        results.append(((own - total)[:, 0], rank.int(), x.gather(1, top_ids) - total, top_ids.int()))
    return Logprobs(*map(torch.cat, zip(*results, strict=True)))


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the indices [N, count] of the largest numbers of float32 rows [N, V], ties by the lowest index.
    `topk` breaks ties arbitrarily, so it gets 64-bit keys that consist of number and index."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    key = (ascending.long() << 32) - torch.arange(x.shape[1], device=x.device)
    return key.topk(count, -1).indices


def kept_logprobs(
    report: Tensor, path: Tensor, q_start: Tensor, logits: Tensor, num_top: Sequence[int]
) -> Logprobs:
    """Return log-probabilities of the kept tokens of each row b with num_top[b] >= 0, and of the max(num_top)
    most likely tokens. The tensors are those of `device/step.py:StepResult`. Waits for the step."""
    emitted = report[:, COUNTS.value : (report.shape[1] + COUNTS.value) // 2]
    i = torch.arange(emitted.shape[1], device=report.device)
    requested = torch.tensor(num_top, device=report.device) >= 0
    b, j = ((i < report[:, :1]) & requested[:, None]).nonzero(as_tuple=True)
    most = min(max(num_top), logits.shape[1])  # at most the vocabulary
    return logprobs(logits, q_start[b] + path[b, j], emitted[b, j], most)
