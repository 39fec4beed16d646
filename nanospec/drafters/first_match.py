"""Several drafters, of which each drafts for the rows for which those before it have nothing.

Lookup takes no time and is right where it matches; a model always has something to say. Only the last drafter
may take time that must pay (`Drafter.runs_model`). In steps that are not captured that time is measured, and
the policy decides for how many drafts the last drafter is asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import NOBODY
from ..kernels.batch import Batch
from ..kernels.speculation.proposal import Proposal, room
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..kernels.transfer import synchronize
from ..text.checks import shown
from .base import Drafter, nothing
from .estimates import DraftTimes


def propose(
    drafters: Sequence[Drafter], table: Table, rows: Tensor, k: int, last_k: int, times: DraftTimes | None
) -> Proposal:
    """Return up to `k` drafts for each of the rows [B], in k columns, of the last drafter up to `last_k`.
    `times`: what to tell the time of the last one if it runs a model; None in captured steps."""
    found: Proposal | None = None
    if times is not None:
        times.fade()
    for code, drafter in enumerate(drafters):
        most = last_k if drafter is drafters[-1] else k
        if not most:
            continue
        left = rows if found is None else torch.where(found.num_drafts > 0, -1, rows)
        if times is None or not drafter.runs_model:
            made = _checked(drafter.propose(table, left, most), drafter, left, most)
        else:
            made = _timed(drafter, table, left, most, times)
        if most < k:
            made = made._replace(**{
                name: F.pad(part, (0, k - most))
                for name in ("drafts", "source", "parents")
                if (part := getattr(made, name)) is not None
            })  # fmt: skip
        found = made if found is None else _merged(found, made, code)
    return nothing(rows, k) if found is None else found


def learn(
    drafters: Sequence[Drafter],
    table: Table,
    proposal: Proposal,
    batch: Batch,
    verdict: Verdict,
    hidden: Tensor,
) -> None:
    """Have each drafter learn, with the rows that it drafted for."""
    for code, drafter in enumerate(drafters):
        own = proposal
        if len(drafters) > 1:
            own = proposal._replace(drafter=torch.where(proposal.drafter == code, 0, NOBODY))
        drafter.learn(table, own, batch, verdict, hidden)


def _checked(made: Proposal, drafter: Drafter, rows: Tensor, k: int) -> Proposal:
    """Return a proposal for rows [B] in the layout that kernels read. Raises TypeError or ValueError."""
    B, said = len(rows), f"{drafter.name}.propose gave"
    if not isinstance(made, Proposal):
        raise TypeError(f"{said} {shown(made)}; it must return a Proposal, see `guesses`.")
    parts = {name: part for name, part in zip(made._fields[:6], made) if part is not None}
    shapes, wanted = (
        [tuple(part.shape) for part in parts.values()],
        [(B, k), (B,), (B, k), (B,), (B,), (B, k)],
    )
    if shapes != wanted[: len(shapes)]:
        raise ValueError(f"{said} tensors of the shapes {shapes}; they must be {wanted[: len(shapes)]}.")
    return made._replace(**{name: part.int().contiguous() for name, part in parts.items()})


def _timed(drafter: Drafter, table: Table, rows: Tensor, k: int, times: DraftTimes) -> Proposal:
    """Return what a drafter proposes for those of the rows [B] that have room, which it is timed for."""
    chosen = room(table, rows, k).nonzero().squeeze(1)
    if not len(chosen):
        return nothing(rows, k)
    asked = rows[chosen]
    drafter.catch_up(asked.tolist())
    start = time.perf_counter()
    made = _checked(drafter.propose(table, asked, k), drafter, asked, k)
    synchronize(rows.device)
    share = int(made.num_drafts.count_nonzero()) / len(chosen)
    times.add(len(rows), k, (time.perf_counter() - start) * 1e3, share)
    if len(chosen) == len(rows):
        return made

    def scattered(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return part.new_zeros(len(rows), *part.shape[1:]).index_copy(0, chosen, part)

    found = Proposal._make(map(scattered, made))
    return found._replace(drafter=torch.where(found.num_drafts > 0, found.drafter, NOBODY))


def _merged(first: Proposal, second: Proposal, code: int) -> Proposal:
    """Return the drafts of `first` where it has some, else those of `second`, the drafter `code`."""
    done = first.num_drafts > 0

    def chosen(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(done if one.dim() == 1 else done[:, None], one, other)

    second = second._replace(drafter=torch.where(second.drafter == NOBODY, second.drafter, code))
    parents = None
    if first.parents is not None or second.parents is not None:
        parents = chosen(_parents(first), _parents(second))
    logits, sampled = (first.logits, done) if second.logits is None else (second.logits, ~done)
    merged = Proposal(*map(chosen, first[:5], second[:5]))
    return merged._replace(parents=parents, logits=logits, sampled=sampled)


def _parents(proposal: Proposal) -> Tensor:
    """Return the parents of a proposal; a chain is a tree as well."""
    if proposal.parents is not None:
        return proposal.parents
    B, k = proposal.drafts.shape
    return torch.arange(k, dtype=torch.int32, device=proposal.drafts.device).expand(B, k)
