"""What the host wants to know of a step, in one table, so that it takes one copy.

`verify.commit` writes a line per row, [B, 6 + 2 Q] int32, and `decode` reads it. The columns: tokens kept;
drafts; accepted drafts; drafter; length of the match; finished code, RUNNING for rows that take no part; the
Q tokens that the step emitted, -1 beyond their number, of which the kept ones count; the source of each, OWN
for those that were not drafted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling.logprobs import Logprobs, logprobs
from .verify import COUNTS


class RowReport(NamedTuple):
    """What a step did for a row."""

    tokens: list[int]  # those that were kept
    num_drafted: int
    num_accepted: int  # by verification; at a stop more may be accepted than kept
    drafter: int  # see `Proposal`
    match_len: int
    finished: int  # RUNNING or how the request ended
    sources: list[int]  # of each kept token, see `Proposal.source`


def decode(lines: list[list[int]]) -> list[RowReport]:
    """Read the lines of the table, on the host."""
    C, reports = COUNTS.value, []
    for line in lines:
        n, drafted, accepted, drafter, match_len, code = line[:C]
        tokens, sources = (line[first : first + n] for first in (C, (len(line) + C) // 2))
        reports.append(RowReport(tokens, drafted, accepted, drafter, match_len, code, sources))
    return reports


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
