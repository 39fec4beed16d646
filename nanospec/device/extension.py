"""The interface of extensions: the engine and the worker call each `Extension` at fixed points of a step.

The devices of a split model have equal lists of extensions. The host's decisions for a step travel in its
order, as one plain value per extension (`plan`, `send`), so that all devices do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..config import SamplingParams
from ..kernels.batch import Batch
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table


class Constraint(Protocol):
    """The constraint on one request's output (`Request.constraint`). Drafters make no drafts for such a
    request, and it joins a step only after its previous step has been collected.

    Attributes:
        ended: nothing may follow.
        error: why the output cannot go on, a sentence.
    """

    ended: bool
    error: str | None

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume a step's tokens; return how many belong to the output."""


class Extension:
    """An extension that does nothing; subclasses override the methods that they need.

    Attributes:
        method: the name of the extension's own drafts in statistics.
        always: whether it takes part in every step, not only in those for which `plan` gave a value.
    """

    method: str | None = None
    always = False

    # Called by the worker. The calls within a step are captured with it.

    def attach(self, worker: Any) -> None:
        """Prepare for a worker, before its steps are captured."""

    def admit(self, row: int) -> None:
        """Handle the admission of a request to a row."""

    def send(self, value: Any, k: int) -> None:
        """Write the value of `plan` to the device, for a step of at most k drafts per row."""

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        """Return the proposal for rows [B], unchanged or replaced."""
        return proposal

    def change(self, logits: Tensor, batch: Batch) -> None:
        """Change logits [T, V] of the scored tokens in place."""

    def for_drafters(self, proposal: Proposal, batch: Batch) -> tuple[Proposal, Batch]:
        """Return the proposal and batch that drafters may learn from."""
        return proposal, batch

    # Called by the engine. Requests are `engine.request.Request`.

    def start(self, engine: Any) -> None:
        """Prepare for an engine, before its first step."""

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError with a sentence if a request cannot run."""

    def new(self, request: Any) -> None:
        """Handle a new request, before it is queued."""

    def plan(self, requests: Sequence[Any], limits: Sequence[int]) -> Any:
        """Return a plain value for `send`, for a step of these requests with at most `limits` drafts each, or
        None if the extension takes no part."""

    def queued(self, rows: Sequence[int]) -> Any:
        """Return a state for `collected`, after a step of request rows was queued."""

    def collected(self, step: Any, results: Sequence[Any], state: Any) -> None:
        """Handle the results of a step (`engine.engine.Queued`), after its requests have taken them."""
