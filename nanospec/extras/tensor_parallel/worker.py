"""The workers of the ranks. Each has a shard of the model and all request rows, and runs the same steps.

The engine calls the leader's worker, which sends each command to the followers before it runs it. All ranks
therefore have equal request tables, and equal logits: each computes a part and gathers the rest.

Drafters that propose on the host run on the leader only, and the followers receive their proposals. They may
therefore be random, and their classes may be defined in the user's script, which followers do not run.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...config import EngineConfig
from ...device.graphs import StepGraphs
from ...device.messages import Admission, PendingStep, RowResult, StepInput
from ...device.step import CountDrafts
from ...device.timing import Barrier
from ...device.worker import Worker
from ...drafters import Drafter
from ...drafters.estimates import StepCosts
from ...kernels.batch import Chunk
from ...kernels.launch import GPUS, gpu_of
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from ...models.decoder import Model
from .group import Group
from .job import Job


class Rank(Worker):
    """The worker of one rank.

    Attributes:
        job: the job of all ranks on the leader, None on followers.
    """

    def __init__(self, group: Group, job: Job | None, config: EngineConfig, model: Model, *args: Any) -> None:
        """Create the worker; `config`, `model` and `args` are the arguments of `Worker`. Raises ValueError if
        the GPUs differ, since ranks would warm up with other sizes and sum in another order."""
        self.group, self.job = group, job
        family, multiprocessors, shared, _ = gpu_of(model.norm.weight)
        gpu = torch.tensor([[*GPUS].index(family), multiprocessors, shared], device=model.device)
        if len(group.all_gather(gpu).unique(dim=0)) > 1:
            raise ValueError("The ranks of a model have different GPUs; use equal ones.")
        super().__init__(config, model, *args)
        self.memory *= group.size  # shapes are equal on all ranks
        for drafter in self.drafters:
            if drafter.reads_on_host:  # use the leader's proposals on all ranks
                drafter.propose = partial(_propose, group, drafter.propose)  # type: ignore[method-assign]
        self._end = weakref.finalize(self, _end, os.getpid(), group, job, self.graphs)

    def _plan_cache(self) -> tuple[int, int]:
        """Return (number of KV blocks, max_model_len) that fit on every rank."""
        plans = self.group.all_gather(torch.tensor(super()._plan_cache(), device=self.device))
        num_blocks, max_model_len = plans.amin(0).tolist()
        return num_blocks, max_model_len

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return None if self.job is None else self.job.failure

    def follow(self) -> None:
        """Run the leader's commands until it ends the job."""
        while (message := self.group.receive()) is not None:
            command, *args = message
            getattr(self, command)(*args)
        self._end()

    @contextmanager
    def _all(self, *message: Any) -> Iterator[None]:
        """Run a method on all ranks: the leader first sends (name, *arguments) to the followers."""
        if self.job is None:
            yield
        else:
            with self.job.command(message[0]):
                self.group.send(message)
                yield

    def admit(self, request: Admission) -> None:
        with self._all("admit", request):
            super().admit(request)

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        with self._all("prefill", chunks):
            super().prefill(chunks)

    def step(self, inputs: StepInput, count_drafts: CountDrafts = lambda proposals: []) -> PendingStep:
        with self._all("step", inputs):
            return super().step(inputs, lambda p: self.group.broadcast_object(lambda: count_drafts(p)))

    def fetch(self, pending: PendingStep) -> list[RowResult]:
        assert self.job is not None  # only the leader fetches results
        with self.job.command("fetch"):
            return super().fetch(pending)

    def release(self, row: int) -> None:
        if self.failure is None:  # after a failure there is nothing to release
            with self._all("release", row):
                super().release(row)

    def measure(self, barrier: Barrier = lambda: None) -> StepCosts:
        with self._all("measure"):
            return super().measure(lambda: self.group.all_gather(torch.zeros(1, device=self.device)))

    def close(self) -> None:
        self._end()


def _end(process: int, group: Group, job: Job | None, graphs: StepGraphs | None) -> None:
    """Leave the group, and end the job on the leader, when the worker is closed or collected, or at exit. A
    forked process leaks the group instead: its destructor would wait for the parent's threads."""
    if os.getpid() != process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return
    if graphs is not None:
        graphs.captures.clear()  # first, because NCCL waits for its kernels in the CUDA graphs
    (job or group).close()


class LeaderDrafter(Drafter):
    """A follower's stand-in for a drafter that runs on the leader's host."""

    reads_on_host = True

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.max_drafts, self.runs_model = drafter.name, drafter.max_drafts, drafter.runs_model
        self.makes_trees, self.memory = drafter.makes_trees, drafter.memory


def for_followers(drafter: Any) -> Any:
    """Return the user's `drafter` argument with `LeaderDrafter` in place of drafters that run on the host."""
    if isinstance(drafter, list | tuple):
        return [for_followers(each) for each in drafter]
    return LeaderDrafter(drafter) if isinstance(drafter, Drafter) and drafter.reads_on_host else drafter


def _propose(group: Group, propose: Callable[..., Proposal], table: Table, rows: Tensor, k: int) -> Proposal:
    """Return the proposal of the leader's drafter, on all ranks."""
    parts = group.broadcast_object(lambda: [x if x is None else x.cpu() for x in propose(table, rows, k)])
    return Proposal._make(part if part is None else part.to(group.device) for part in parts)
