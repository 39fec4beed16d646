"""The workers of the ranks. Each has a shard of the model and all request rows, and runs the same steps.

The engine calls the leader's worker, which sends each command to the followers before it runs it. All ranks
therefore have equal request tables, and equal logits: each computes a part and gathers the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ...config import EngineConfig
from ...device.messages import PendingStep, RowResult, StepInput
from ...device.timing import Barrier
from ...device.worker import Worker
from ...drafters.estimates import StepCosts
from ...kernels.speculation.proposal import Proposal
from ...models.decoder import Model
from .process_group import ProcessGroup, RankFailed


def on_all_ranks(method: Any) -> Any:
    """Decorate a method to run on all ranks: the leader sends its name and arguments, plain data, to the
    followers. An exception on the leader stops all ranks, as they may be out of step."""

    @wraps(method)
    def run(self: RankWorker, *args: Any) -> Any:
        if self.group.rank:
            return method(self, *args)
        if self.failure is not None:
            raise RankFailed(self.failure)
        try:
            self.group.send((method.__name__, *args))
            return method(self, *args)
        except BaseException as error:
            self.failure = f"All ranks were stopped, because rank 0 failed in {method.__name__!r}: {error!r}"
            self.end()
            raise

    return run


class RankWorker(Worker):
    """The worker of one rank."""

    end: Callable[[], Any]  # stops all ranks; also called when the leader's worker is collected, and at exit

    def __init__(self, group: ProcessGroup, config: EngineConfig, model: Model, *args: Any) -> None:
        """Create the worker; `config`, `model` and `args` are the arguments of `Worker`. All GPUs must be
        equal, because different ones would add in different orders."""
        self.group = group
        super().__init__(config, model, *args)
        self.memory *= group.size  # shapes are equal on all ranks
        self._steps: deque[PendingStep] = deque(maxlen=2)  # the engine fetches one step late
        for drafter in self.drafters:
            if drafter.reads_on_host:
                propose = partial(type(drafter).propose, drafter)
                drafter.propose = partial(_propose_as_leader, group, propose)  # type: ignore[method-assign]

    def _plan_cache(self) -> tuple[int, int]:
        """Return (number of KV blocks, max_model_len) that fit on every rank."""
        plans = self.group.all_gather(torch.tensor(super()._plan_cache()))
        num_blocks, max_model_len = plans.amin(0).tolist()
        return num_blocks, max_model_len

    def follow(self) -> None:
        """Run the leader's commands until it leaves the group, which raises RankFailed."""
        while True:
            command, *args = self.group.receive()
            getattr(self, command)(*args)

    admit = on_all_ranks(Worker.admit)
    prefill = on_all_ranks(Worker.prefill)

    @on_all_ranks
    def step(self, inputs: StepInput) -> PendingStep:
        self._steps.append(super().step(inputs))
        return self._steps[-1]

    def fetch(self, pending: PendingStep) -> list[RowResult]:
        self.wait(next(i for i, step in enumerate(self._steps) if step is pending))
        return super().fetch(pending)

    @on_all_ranks
    def wait(self, index: int) -> None:
        """Wait until a step is complete on the followers' devices. The leader would wait for its own device
        without a time limit."""
        with self.stages["wait"]:
            if self.group.rank:
                self._steps[index].report()
            self.group.all_gather(torch.zeros(1))

    _release = on_all_ranks(Worker.release)

    def release(self, row: int) -> None:
        if self.failure is None:  # after a failure there is nothing to release
            self._release(row)

    @on_all_ranks
    def measure(self, barrier: Barrier = lambda: None) -> StepCosts:
        return super().measure(lambda: self.group.all_gather(torch.zeros(1, device=self.device)))

    def close(self) -> None:
        self.failure = self.failure or "This model has been closed; create a new LLM."
        self.end()


def _propose_as_leader(group: ProcessGroup, propose: Any, *args: Any) -> Proposal:
    """Return the leader's proposal, as drafters on the host may be random."""
    return Proposal._make(x if x is None else group.all_gather(x)[0] for x in propose(*args))
