"""What the host wants to know of a step, in one table, so that it takes one copy.

`verify.commit` writes a line per row, [B, 6 + 2 Q] int32, and `decode` reads it. The columns: tokens kept;
drafts; accepted drafts; drafter; length of the match; finished code, RUNNING for rows that take no part; the
Q tokens that the step emitted, -1 beyond their number, of which the kept ones count; the source of each, OWN
for those that were not drafted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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


def kept_tokens(lines: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kept tokens of the rows that `asked` [B] bool names: the row, the place among the emitted
    ones and the token of each, [N]. Waits for the device."""
    tokens = lines[:, COUNTS.value : (lines.shape[1] + COUNTS.value) // 2]
    place = torch.arange(tokens.shape[1], device=lines.device)
    b, j = ((place < lines[:, :1]) & asked[:, None]).nonzero(as_tuple=True)
    return b, j, tokens[b, j]
