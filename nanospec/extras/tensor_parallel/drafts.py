"""Drafters that propose on the host do so on the leader alone, and the followers receive their proposals.

So their classes may be defined in the user's script, which followers do not run, and they may be random:
all ranks verify the same drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from ...drafters.base import Drafter
from ...drafters.loading import Guessers
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from .group import Group


class Remote(Drafter):
    """The stand-in on a follower for a drafter of the leader's host."""

    reads_on_host = True

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.max_drafts, self.runs_model = drafter.name, drafter.max_drafts, drafter.runs_model
        self.makes_trees, self.memory = drafter.makes_trees, drafter.memory


def for_followers(given: Guessers | None) -> Guessers | None:
    """Return the `drafter` argument of the user with stand-ins for drafters of the host."""
    if isinstance(given, Drafter):
        return Remote(given) if given.reads_on_host else given
    if given is None or isinstance(given, str):
        return given
    return [for_followers(each) for each in given]  # type: ignore[misc]


def share_proposals(drafters: Iterable[Drafter], group: Group) -> None:
    """Have all ranks use what the leader's drafters of the host propose."""
    for drafter in drafters:
        if drafter.reads_on_host:
            drafter.propose = partial(_propose, group, drafter.propose)  # type: ignore[method-assign]


def _propose(group: Group, own: Callable[..., Proposal], table: Table, rows: Tensor, k: int) -> Proposal:
    if group.rank:
        parts: Any = group.receive()
        return Proposal._make(part if part is None else part.to(group.device) for part in parts)
    proposal = own(table, rows, k)
    group.send([part if part is None else part.cpu() for part in proposal])
    return proposal
