"""What the host wants to know of a step, in one table, so that it takes one copy.

`verify.commit` writes a line per row, [B, 6 + 2 Q] int32, and `decode` reads it. The columns: tokens kept;
drafts; accepted drafts; drafter; length of the match; finished code, RUNNING for rows that take no part; the
Q tokens that the step emitted, -1 beyond their number, of which the kept ones count; the source of each, OWN
for those that were not drafted.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import OWN

NUM_COLUMNS = tl.constexpr(6)  # before the tokens
_OWN = tl.constexpr(OWN)


def num_columns(Q: int) -> int:
    """Return the number of columns of a step of Q tokens per row."""
    return NUM_COLUMNS.value + 2 * Q


class RowReport(NamedTuple):
    """What a step did for a row.

    Attributes:
        tokens: the tokens that were kept.
        num_drafted, num_accepted: drafts, and those that verification accepted; at a stop more of them
            may be accepted than kept.
        drafter, match_len: see `Proposal`.
        finished: a code of `kernels/__init__.py`.
        sources: of each kept token, see `Proposal.source`.
    """

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    drafter: int
    match_len: int
    finished: int
    sources: list[int]


def decode(lines: list[list[int]]) -> list[RowReport]:
    """Read the lines of the table, on the host."""
    C, reports = NUM_COLUMNS.value, []
    for line in lines:
        n, drafted, accepted, drafter, match_len, code = line[:C]
        tokens, sources = (line[first : first + n] for first in (C, (len(line) + C) // 2))
        reports.append(RowReport(tokens, drafted, accepted, drafter, match_len, code, sources))
    return reports


def kept_tokens(lines: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kept tokens of the rows that `asked` [B] bool names: the row, the place among the emitted
    ones and the token of each, [N]. Waits for the device."""
    C = NUM_COLUMNS.value
    tokens = lines[:, C : C + (lines.shape[1] - C) // 2]
    place = torch.arange(tokens.shape[1], device=lines.device)
    b, j = ((place < lines[:, :1]) & asked[:, None]).nonzero(as_tuple=True)
    return b, j, tokens[b, j]


@triton.jit
def store(lines, proposal, walked, appended, widths, WIDTH: tl.constexpr):
    """Store the line of this program's row, from what `verify._walk` and `_append_run` return."""
    b, place = tl.program_id(0), tl.arange(0, WIDTH)
    n, emitted, count, path = walked
    kept, code = appended
    Q, K = widths
    line = lines + b * (NUM_COLUMNS + 2 * Q)
    tl.store(line, kept)
    tl.store(line + 1, tl.maximum(n - 1, 0))
    tl.store(line + 2, tl.maximum(count - 1, 0))
    tl.store(line + 3, tl.load(proposal.drafter + b))
    tl.store(line + 4, tl.load(proposal.match_len + b))
    tl.store(line + 5, code.to(tl.int32))
    tl.store(line + NUM_COLUMNS + place, emitted, place < Q)
    source = tl.load(proposal.source + b * K + path - 1, (place > 0) & (place < count), other=_OWN)
    before = tl.where(place > 0, place - 1, Q - 1)  # the last place has no draft behind it
    tl.store(line + NUM_COLUMNS + Q + before, source, place < Q)
