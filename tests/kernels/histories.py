"""Requests whose histories the n-gram drafters search."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from tests.kernels.batches import make_table


class Request(NamedTuple):
    """A request row: its text and settings. `room`: how many tokens it may still grow by."""

    text: list[int]
    min_n: int = 1
    max_n: int = 3
    limit: int = 63
    room: int = 1000
    width: int = 1

    def wanted(self, k: int) -> int:
        """How many drafts it can use."""
        return max(min(self.limit, k, self.room - 1), 0)


def history_table(requests: list[Request], capacity: int = 0) -> Table:
    capacity = max([capacity, 1, *(len(r.text) for r in requests)])
    # What lies behind a text repeats it, so that reading beyond the end finds better matches.
    return make_table(
        1,
        tokens=[((r.text or [7]) * capacity)[:capacity] for r in requests],
        num_tokens=[len(r.text) for r in requests],
        max_len=[len(r.text) + r.room for r in requests],
        min_n=[r.min_n for r in requests],
        max_n=[r.max_n for r in requests],
        limit=[r.limit for r in requests],
        width=[r.width for r in requests],
    )


def check_form(proposal: Proposal, num_rows: int, k: int, tree: bool) -> None:
    """Types and shapes of what lookup proposes."""
    assert isinstance(proposal, Proposal)
    assert (proposal.parents is not None) == tree
    assert proposal[6:] == (None, None)
    assert all(part.dtype == torch.int32 for part in proposal if part is not None)
    assert proposal.drafts.shape == proposal.source.shape == (num_rows, k)
    assert proposal.drafter.tolist() == [0] * num_rows


@st.composite
def texts(draw: st.DrawFn, max_size: int = 40) -> list[int]:
    """Few different tokens, or a repeated piece with some errors: many matches, near and far."""
    text: list[int] = draw(st.lists(st.integers(0, 3), max_size=max_size))
    if draw(st.booleans()) and text:
        piece = text[: draw(st.integers(1, 6))]
        text = (piece * max_size)[: draw(st.integers(1, max_size))]
        for place in draw(st.lists(st.integers(0, len(text) - 1), max_size=3)):
            text[place] = draw(st.integers(0, 3))
    return text


@st.composite
def requests(draw: st.DrawFn) -> Request:
    min_n = draw(st.integers(1, 4))
    return Request(
        draw(texts()),
        min_n,
        min_n + draw(st.integers(0, 3)),
        draw(st.integers(0, 20)),
        draw(st.integers(-2, 22)),
        draw(st.integers(0, 8)),
    )
