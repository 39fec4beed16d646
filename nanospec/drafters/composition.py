"""Run the drafters of a step.

Several drafters run in order, each for the rows that the previous ones have no drafts for: n-gram lookup is
cheap and accurate where it matches, a model always has drafts. Only the last one may run a model. The policy
limits how many drafts it proposes, and lets them replace those of short matches.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import NO_DRAFTER
from ..kernels.batch import Batch
from ..kernels.launch import use_triton
from ..kernels.speculation.layout import lay_out
from ..kernels.speculation.proposal import Proposal, draft_limits, merge
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..text.validation import check_number, shown
from . import Drafter, no_drafts

PER_ROW = ("num_drafts", "match_len", "drafter")  # fields of a `Proposal` of shape [B]; the others are [B, K]


def propose(
    drafters: Sequence[Drafter], table: Table, rows: Tensor, k: int, model_k: int, min_match: Tensor | None
) -> Proposal:
    """Return drafts for each of the rows [B], in k columns. A drafter that runs a model
    proposes at most `model_k`, and its drafts replace those of matches shorter than `min_match`."""
    merged: Proposal | None = None
    for code, drafter in enumerate(drafters):
        limit = min(model_k, k) if drafter.runs_model else k
        if not limit:
            continue
        remaining = rows
        if merged is not None:
            kept = merged.num_drafts > 0
            if drafter.runs_model and min_match is not None:
                # A match length of 0: the drafts are not from lookup.
                kept &= (merged.match_len == 0) | (merged.match_len >= min_match)
            remaining = torch.where(kept, -1, rows)
        if drafter.runs_model and not use_triton(rows):  # on a CPU, reading the rows does not wait
            remaining = torch.where(draft_limits(table, remaining, limit) > 0, remaining, -1)
            drafting = [row for row in remaining.tolist() if row >= 0]
            if not drafting:
                continue
            drafter.catch_up(drafting)
        proposal = _widen(_checked(drafter, table, remaining, limit), k)
        if merged is not None:
            has_drafts = proposal.num_drafts > 0
            codes = torch.where(has_drafts, code, NO_DRAFTER).int()
            proposal = merge(kept | ~has_drafts, merged, proposal._replace(drafter=codes))
        merged = proposal
    return no_drafts(rows, k) if merged is None else merged


def _widen(proposal: Proposal, k: int) -> Proposal:
    """Return a proposal with k columns."""
    if not (missing := k - proposal.drafts.shape[1]):
        return proposal
    return Proposal._make(x if x is None or x.dim() == 1 else F.pad(x, (0, missing)) for x in proposal)


def layers_of(drafters: Sequence[Drafter], num_layers: int) -> list[int]:
    """Return the `hidden_state_layers` of all drafters, one after the other. Raises ValueError unless they
    are numbers of layers of a target with `num_layers`."""
    names = [(f"{each.name}.hidden_state_layers", n) for each in drafters for n in each.hidden_state_layers]
    return [check_number(name, n, 0, num_layers) for name, n in names]


def learn(
    drafters: Sequence[Drafter], table: Table, proposal: Proposal, batch: Batch, verdict: Verdict
) -> None:
    """Call `learn` of each drafter that defines it, with NO_DRAFTER for rows with drafts of others."""
    for code, drafter in enumerate(drafters):
        if getattr(drafter.learn, "__func__", None) is Drafter.learn:
            continue
        own = proposal._replace(drafter=torch.where(proposal.drafter == code, 0, NO_DRAFTER))
        drafter.learn(table, own, batch, verdict)


def read_hidden_states(
    drafters: Sequence[Drafter], table: Table, batch: Batch, hidden: Tensor, verdict: Verdict | None = None
) -> None:
    """Call `read_hidden_states` of each drafter with its columns of `hidden` [T, n * H], the states of
    `layers_of`. After a step, `hidden` includes rejected drafts; `verdict` selects the tokens to read."""
    counts = [len(drafter.hidden_state_layers) for drafter in drafters]
    if not any(counts) or not batch.num_tokens:  # no tokens: all rows have finished
        return
    if verdict is not None and batch.parents is None:  # the accepted tokens are the first of each row
        batch = replace(batch, q_len=verdict.num_emitted)
    elif verdict is not None:
        nodes, width = batch, verdict.path.shape[1]
        batch = lay_out(table, nodes.rows, nodes.base_len, verdict.num_emitted, width)
        b = batch.row_of_token
        i = torch.arange(len(b), device=b.device) - batch.q_start[b]
        hidden = hidden[
            (nodes.q_start[b] + verdict.path[b, i.clamp(max=width - 1)]).clamp(max=len(hidden) - 1)
        ]
    parts = hidden.split([count * hidden.shape[1] // sum(counts) for count in counts], 1)
    for drafter, count, part in zip(drafters, counts, parts, strict=True):
        if count:
            drafter.read_hidden_states(table, batch, part.contiguous())


def _checked(drafter: Drafter, table: Table, rows: Tensor, k: int) -> Proposal:
    """Return a drafter's proposal for rows [B], checked and contiguous in int32; errors name the drafter."""
    try:
        proposal = drafter.propose(table, rows, k)
    except Exception as error:  # of the same type, so that out-of-memory errors are recognized
        if drafter.name not in str(error):
            error.args = (f"{drafter.name}.propose failed: {error}", *error.args[1:])
        raise
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{drafter.name}.propose returned {shown(proposal)}; it must return a Proposal.")
    for name, part in proposal._asdict().items():
        shape = torch.Size((len(rows),) if name in PER_ROW else (len(rows), k))
        kind: list[Any] = [getattr(part, attr, None) for attr in ("shape", "device", "layout", "dtype")]
        fits = kind[:3] == [shape, rows.device, rows.layout] and torch.can_cast(kind[3], torch.int32)
        if not fits and not (part is None and name in proposal._field_defaults):
            actual = " ".join(str(each) for each in (type(part).__name__, *kind) if each is not None)
            expected = f"Tensor {shape} {rows.device} {rows.layout} {torch.int32}"
            raise ValueError(f"{drafter.name}.propose returned {name} as {actual}; expected {expected}.")
    return Proposal._make(None if part is None else part.int().contiguous() for part in proposal)
