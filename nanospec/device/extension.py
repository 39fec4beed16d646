"""What an option may add to the engine and the worker: an `Extension` is called at fixed points of a step.

The worker and the engine hold a list of extensions, usually without an active one. Where a model is split
among processes, each of them has the same list: what the host decides for a step travels in the step's order
as one plain value per extension (`plan`, `send`), so that all processes do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..config import SamplingParams
from ..kernels.batch import Batch
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table

if TYPE_CHECKING:
    from .admission import HostWrites


class Constraint(Protocol):
    """What an extension holds the output of one request to (`Request.constraint`). Drafters make no drafts
    for such a request, and it takes part in a step only when its step before has been collected.

    Attributes:
        ended: nothing may follow.
        error: why the output cannot go on, a sentence.
    """

    ended: bool
    error: str | None

    def advance(self, tokens: Sequence[int]) -> int:
        """Take a step's tokens up; return how many belong to the output."""


class Extension:
    """Does nothing at any point; an option overrides what it needs.

    Attributes:
        method: what statistics call the drafts that the extension makes.
        always: it takes part in every step, not only in those for which `plan` gave a value.
    """

    method: str | None = None
    always = False

    # Called by the worker. Those that take part in a step are captured with it.

    def attach(self, worker: Any) -> None:
        """Take what is needed of a worker, whose steps have not been captured."""

    def admit(self, writes: HostWrites, row: int) -> None:
        """A request got a row."""

    def send(self, writes: HostWrites, value: Any, k: int) -> None:
        """Send the device what `plan` gave for a step of at most k drafts per row."""

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        """Return the proposal for rows [B], or another one in its place."""
        return proposal

    def change(self, logits: Tensor, batch: Batch) -> None:
        """Change logits [T, V] of the scored tokens in place."""

    def for_drafters(self, proposal: Proposal, batch: Batch) -> tuple[Proposal, Batch]:
        """Return what drafters may learn from."""
        return proposal, batch

    # Called by the engine. Requests are `engine.request.Request`.

    def start(self, engine: Any) -> None:
        """Take what is needed of an engine, which has not run."""

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError with a sentence if a request cannot run."""

    def new(self, request: Any) -> None:
        """A request was made, which is to be queued next."""

    def add(self, request: Any) -> None:
        """A request was queued."""

    def plan(self, requests: Sequence[Any], limits: Sequence[int]) -> Any:
        """Return what the device must know for a step of requests with at most so many drafts each; None for
        nothing."""

    def queued(self, rows: Sequence[int]) -> Any:
        """A step of request rows was queued; what is returned is handed to `collected`."""

    def collected(self, step: Any, results: Sequence[Any], kept: Any) -> None:
        """The requests of a step (`engine.engine.Queued`) have taken up its results."""
