"""The workers of ranks: each has a part of the model, a whole table of requests, and takes the same steps.

`Leader` is the engine's worker. What it is asked it has the other ranks do too, who `follow`: the same
messages in the same order, so that all tables are equal at all times. A step draws from candidates that ranks
exchange (`sampling/across.py`), unless somebody in it asks for more than the likeliest token: then from whole
logits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...config import EngineConfig, SamplingParams
from ...device.admission import Admission
from ...device.devices import on_own_device
from ...device.extension import Extension
from ...device.graphs import StepGraphs
from ...device.memory import MemoryPlan
from ...device.orders import Flight, RowResult, StepOrder
from ...device.step import Cut, Step
from ...device.worker import Worker
from ...drafters.base import Drafter
from ...drafters.costs import StepCosts
from ...kernels.batch import Batch, Chunk
from ...kernels.layer.vocab_parallel import Vocabulary
from ...kernels.sampling import across
from ...kernels.speculation.proposal import Proposal
from ...models.decoder import Model
from . import guesses
from .group import Group, gathered
from .team import Team

WHOLE = "whole"


class SplitStep(Step):
    """A step that scores a part of the vocabulary, or, if it is to be `whole`, all of it."""

    whole = False

    @property
    def _head(self) -> Vocabulary:
        assert isinstance(self.model.lm_head, Vocabulary)
        return self.model.lm_head

    def score(self, hidden: Tensor) -> Tensor:
        if self.whole:
            return super().score(hidden)
        T, head, out = len(hidden), self._head, None
        width = head.part.shape[0]
        if len(self._logits) >= T:
            out = self._logits.flatten()[: T * width].view(T, width)
        return self.model.logits(hidden, out, head.part)

    def draw(self, logits: Tensor, batch: Batch, proposal: Proposal) -> Tensor:
        if self.whole:
            return super().draw(logits, batch, proposal)
        head = self._head
        count = min(logits.shape[1], head.size - head.first)
        return across.choose(head.gather(across.best(logits, head.first, count, self.table, batch)))


class Rank(Worker):
    """The worker of one rank.

    Attributes:
        group: the ranks.
        memory: the plan of each rank, see `MemoryPlan`.
    """

    _step: SplitStep

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        drafters: Sequence[Drafter],
        group: Group,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.group = group
        self._whole: set[int] = set()  # rows whose requests need the logits of all tokens
        super().__init__(config, model, drafters, extensions)

    def make_step(self, kind: type[Step] = SplitStep) -> Step:
        return super().make_step(kind)

    def plan_cache(self) -> tuple[int, int]:
        """As much as fits on all ranks."""
        plans = gathered(self.group, super().plan_cache(), self.device)
        blocks, lengths = (min(numbers) for numbers in zip(*plans, strict=True))
        return blocks, lengths

    @on_own_device
    def _build(self) -> None:
        super()._build()
        # Else the first request that needs it would wait.
        if self.graphs is not None and not self.graphs.lazy:
            self._step.whole = True
            self.graphs.capture_all((WHOLE, None))
            self._step.whole = False
        plans = gathered(self.group, super().memory[0], self.device)
        self._memory = [MemoryPlan(*plan) for plan in plans]

    @property
    def memory(self) -> list[MemoryPlan]:
        return self._memory

    def admit(self, requests: Sequence[Admission]) -> None:
        super().admit(requests)
        for request in requests:
            needs = needs_whole(request.params, self.config.spec.acceptance)
            (self._whole.add if needs else self._whole.discard)(request.row)

    def prepare(self, order: StepOrder) -> Hashable:
        variant = super().prepare(order)
        asked = max(order.logprobs) >= 0 or not self._whole.isdisjoint(order.rows)
        whole = variant is not None or asked
        self._step.whole = whole
        return (WHOLE, variant) if whole else None

    def meet(self) -> None:
        self.group.gather(torch.zeros(1, device=self.device))


def needs_whole(params: SamplingParams, acceptance: str) -> bool:
    """Whether a request's tokens depend on more than which one has the largest logit plus noise."""
    cuts = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    exact = (params.acceptance or acceptance) == "exact"
    return bool(cuts or params.changes_logits) or not exact


class Leader(Rank):
    """The rank that the engine speaks to; the others do the same.

    Attributes:
        team: the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        drafters: Sequence[Drafter],
        group: Group,
        team: Team,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.team = team
        self._flights: deque[Flight] = deque()
        team.give_up = group.close
        with team.together():
            super().__init__(config, model, drafters, group, extensions)
        self._end = weakref.finalize(self, _end, team, group, self.graphs)
        guesses.tell(self.drafters, team.tell)

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return self.team.failure

    def admit(self, requests: Sequence[Admission]) -> None:
        with self.team.together(("admit", requests)):
            super().admit(requests)

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        with self.team.together(("prefill", chunks)):
            super().prefill(chunks)

    def step(self, order: StepOrder, cut: Cut) -> Flight:
        def told(*columns: Any) -> list[int]:
            kept = cut(*columns)
            self.team.tell(kept)
            return kept

        with self.team.together(("step", order)):
            self._flights.append(super().step(order, told))
        return self._flights[-1]

    def fetch(self, flight: Flight) -> list[RowResult]:
        before = next(i for i, queued in enumerate(self._flights) if queued is flight)
        with self.team.together(("fetch", before)):
            _pop(self._flights, before)
            return super().fetch(flight)

    def release(self, row: int) -> None:
        if self.team.failure is None:  # else nobody has anything left
            with self.team.together(("release", row)):
                super().release(row)

    def measure(self) -> StepCosts:
        with self.team.together(("measure",)):
            return super().measure()

    def close(self) -> None:
        self._end()


def _end(team: Team, group: Group, graphs: StepGraphs | None) -> None:
    if team.is_ours:
        team.dismiss()
        part(group, graphs)
        team.close()


def part(group: Group, graphs: StepGraphs | None) -> None:
    """Leave the others. NCCL waits for its kernels that are captured, so these go first."""
    if graphs is not None:
        graphs.clear()
    group.close()


def _pop(flights: deque[Flight], before: int) -> Flight:
    """The next flight but those `before` it, which nobody wants to know of any more."""
    for _ in range(before):
        flights.popleft()
    return flights.popleft()


def follow(worker: Rank, messages: Iterator[Any]) -> None:
    """Do what the leader does, until it says that this is the end."""
    flights: deque[Flight] = deque()
    guesses.hear(worker.drafters, messages, worker.device)
    for message in messages:
        if isinstance(message, Exception):
            raise message
        verb, *args = message
        if verb == "end":
            return
        elif verb == "step":  # without graphs, the next messages are guesses of the host's, and what was cut
            flights.append(worker.step(args[0], lambda *columns: next(messages)))
        elif verb == "fetch":
            worker.fetch(_pop(flights, *args))
        else:
            getattr(worker, verb)(*args)
