"""What the host wants to know of a step, in one table, so that it takes one copy.

`report` writes a line per row, [B, 6 + 2 Q] int32, and `decode` reads it; nobody else knows the columns:
tokens kept; drafts; accepted drafts; drafter; length of the match; finished code; the Q tokens that the
step emitted, of which the kept ones count; the source of each, OWN for those that were not drafted.

Kernel: one program per row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..codes import OWN
from ..dispatch import use_triton
from ..launch import next_power_of_2
from ..table import Table
from .proposal import Proposal
from .verify import Verdict

NUM_COLUMNS = tl.constexpr(6)  # before the tokens
_OWN = tl.constexpr(OWN)


class RowReport(NamedTuple):
    """What a step did for a row.

    Attributes:
        tokens: the tokens that were kept.
        num_drafted, num_accepted: drafts, and those that verification accepted; at a stop more of them
            may be accepted than kept.
        drafter, match_len: see `Proposal`.
        finished: a code of `codes.py`.
        sources: of each kept token, see `Proposal.source`.
    """

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    drafter: int
    match_len: int
    finished: int
    sources: list[int]


def report(batch: Batch, proposal: Proposal, verdict: Verdict, table: Table) -> Tensor:
    """The table of the module docstring, after `commit`."""
    return (launch if use_triton(verdict.path) else naive)(batch, proposal, verdict, table)


def decode(lines: list[list[int]]) -> list[RowReport]:
    """The lines of the table, on the host."""
    C, reports = NUM_COLUMNS.value, []
    for line in lines:
        num_kept, num_drafted, num_accepted, drafter, match_len, finished = line[:C]
        Q = (len(line) - C) // 2
        tokens, sources = line[C : C + num_kept], line[C + Q : C + Q + num_kept]
        reports.append(RowReport(tokens, num_drafted, num_accepted, drafter, match_len, finished, sources))
    return reports


def kept_tokens(lines: Tensor, asked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The kept tokens of the rows that `asked` [B] bool names: the row, the place among the emitted ones and
    the token of each, [N]. Waits for the device."""
    C = NUM_COLUMNS.value
    tokens = lines[:, C : C + (lines.shape[1] - C) // 2]
    place = torch.arange(tokens.shape[1], device=lines.device)
    b, j = ((place < lines[:, :1]) & asked[:, None]).nonzero(as_tuple=True)
    return b, j, tokens[b, j]


def naive(batch: Batch, proposal: Proposal, verdict: Verdict, table: Table) -> Tensor:
    """In plain Python."""
    codes, sources = table.finished.tolist(), proposal.source.tolist()
    columns = (batch.rows, batch.q_len, proposal.drafter, proposal.match_len, *verdict)
    lines = []
    for b, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        s, n, drafter, match_len, emitted, num_emitted, path, num_kept = row
        # The token drawn at one place of the path was drafted as the next.
        source = [sources[b][place - 1] for place in path[1:num_emitted]]
        source += [OWN] * (len(emitted) - len(source))
        counts = [num_kept, max(n - 1, 0), max(num_emitted - 1, 0), drafter, match_len, codes[max(s, 0)]]
        lines.append(counts + emitted + source)
    return torch.tensor(lines, dtype=torch.int32, device=verdict.path.device)


@triton.jit(do_not_specialize=["Q", "k"])
def _report(batch, proposal, verdict, table, out, Q, k, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    line = out + b * (NUM_COLUMNS + 2 * Q)
    number = tl.load(verdict.num_emitted + b)
    tl.store(line, tl.load(verdict.num_kept + b))
    tl.store(line + 1, tl.maximum(tl.load(batch.q_len + b) - 1, 0))
    tl.store(line + 2, tl.maximum(number - 1, 0))
    tl.store(line + 3, tl.load(proposal.drafter + b))
    tl.store(line + 4, tl.load(proposal.match_len + b))
    tl.store(line + 5, tl.load(table.finished + tl.maximum(tl.load(batch.rows + b), 0)).to(tl.int32))
    i = tl.arange(0, WIDTH)
    emitted = tl.load(verdict.emitted + b * Q + i, i < Q, other=0)
    tl.store(line + NUM_COLUMNS + i, emitted, i < Q)
    # The token drawn at one place of the path was drafted as the next.
    accepted = (i + 1 < Q) & (i + 1 < number)
    draft = tl.load(verdict.path + b * Q + i + 1, accepted, other=1) - 1
    source = tl.load(proposal.source + b * k + draft, accepted, other=_OWN)
    tl.store(line + NUM_COLUMNS + Q + i, source, i < Q)


def launch(batch: Batch, proposal: Proposal, verdict: Verdict, table: Table) -> Tensor:
    B, Q = verdict.emitted.shape
    out = verdict.emitted.new_empty(B, NUM_COLUMNS.value + 2 * Q)
    if B:
        _report[(B,)](
            batch.tensors, proposal, verdict, table, out, Q, proposal.source.shape[1],
            WIDTH=next_power_of_2(Q), num_warps=1,
        )  # fmt: skip
    return out
