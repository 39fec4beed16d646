"""The interface of extensions: the engine and the worker call each `Extension` at fixed points of a step.

All devices of a split model have the same extensions. What the host decides for a step is sent in its
`StepInput`, as one plain value per extension (`plan`, `send`), so that all devices behave identically.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..config import SamplingParams
from ..kernels.batch import Batch
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table


class Constraint(Protocol):
    """A constraint on the output of a request, for which only extensions propose drafts."""

    ended: bool  # whether the output is complete
    error: str | None  # the reason if the output cannot be continued

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume the tokens of a step and return how many of them belong to the output."""


class Extension:
    """Base class of extensions. Its methods do nothing; subclasses override those that they need."""

    drafter_name: str | None = None  # name of its drafts in statistics, None if it proposes no drafts
    always = False  # whether it takes part in all steps, or only in those for which `plan` returns a value

    # Called by the worker. The calls within a step are captured with it.

    def attach(self, worker: Any) -> None:
        """Prepare for a worker, before its steps are captured."""

    def admit(self, row: int) -> None:
        """Handle the admission of a request to a row."""

    def send(self, value: Any, k: int) -> None:
        """Write the value returned by `plan` to the device, for a step with at most k drafts per row."""

    def propose(self, table: Table, rows: Tensor, proposal: Proposal) -> Proposal:
        """Return the proposal for rows [B], unchanged or replaced."""
        return proposal

    def process_logits(self, logits: Tensor, batch: Batch) -> None:
        """Change logits [T, V] of the scored tokens in place."""

    # Called by the engine. Requests are `engine.request.Request`.

    def start(self, engine: Any) -> None:
        """Prepare for an engine, before its first step."""

    def check(self, params: SamplingParams) -> None:
        """Raise ValueError if the extension does not support the parameters."""

    def on_request(self, request: Any) -> None:
        """Handle a new request, before it is queued."""

    def plan(self, requests: Sequence[Any], max_drafts: Sequence[int]) -> Any:
        """Return a plain value for `send`, or None if the extension takes no part in the step. `requests`
        decode in the step, request i with at most max_drafts[i] drafts."""

    def on_queued(self, rows: Sequence[int]) -> Any:
        """Return a state to be passed to `on_collected`, after a step of these rows has been queued."""

    def on_collected(self, step: Any, results: Sequence[Any], state: Any) -> None:
        """Handle the results of a step (`engine.engine.QueuedStep`), after its requests have been updated."""
