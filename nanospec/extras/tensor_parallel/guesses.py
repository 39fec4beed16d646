"""Drafters that guess on the host do so on the leader's alone, which tells the other ranks.

So their classes may stand in the user's script, which other ranks do not run, and need not guess the same
twice: whatever they do, all ranks verify the same drafts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...drafters.base import Drafter
from ...drafters.loading import Guessers
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table


class Elsewhere(Drafter):
    """Stands on other ranks for a drafter of the leader's."""

    reads_on_host = True

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.max_drafts, self.runs_model = drafter.name, drafter.max_drafts, drafter.runs_model
        self.makes_trees, self.memory = drafter.makes_trees, drafter.memory


def for_others(given: Guessers | None) -> Guessers | None:
    """What other ranks are given for what the leader was."""
    if isinstance(given, Drafter):
        return Elsewhere(given) if given.reads_on_host else given
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [who if isinstance(who, str) else for_others(who) for who in given]  # type: ignore[misc]
    return given


def tell(drafters: Iterable[Drafter], send: Callable[[Any], None]) -> None:
    """Have the leader's drafters tell what they propose."""

    def told(own: Callable[..., Proposal]) -> Callable[..., Proposal]:
        def propose(table: Table, rows: Tensor, k: int) -> Proposal:
            proposal = own(table, rows, k)
            send(pickle.dumps([part if part is None else part.cpu() for part in proposal]))
            return proposal

        return propose

    for drafter in _on_host(drafters):
        drafter.propose = told(drafter.propose)  # type: ignore[method-assign]


def hear(drafters: Iterable[Drafter], messages: Iterator[Any], device: torch.device) -> None:
    """Have those of another rank propose what they are told."""

    def propose(table: Table, rows: Tensor, k: int) -> Proposal:
        parts: Any = pickle.loads(next(messages))
        return Proposal._make(part if part is None else part.to(device) for part in parts)

    for drafter in _on_host(drafters):
        drafter.propose = propose  # type: ignore[method-assign]


def _on_host(drafters: Iterable[Drafter]) -> list[Drafter]:
    return [drafter for drafter in drafters if drafter.reads_on_host]
