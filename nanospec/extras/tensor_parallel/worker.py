"""The workers of the ranks: each has a part of the model and all request rows, and takes the same steps.

The engine's worker is the leader's. It sends every verb to the followers before it runs it itself, so all
tables are equal at all times, and so are the logits, of which each rank computes a part and gathers all.

Drafters that propose on the host do so on the leader alone, and the followers receive their proposals. So
their classes may be defined in the user's script, which followers do not run, and they may be random: all
ranks verify the same drafts.
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

from ...device.graphs import StepGraphs
from ...device.orders import Admission, Flight, RowResult, StepOrder
from ...device.step import Cut
from ...device.timing import Meet
from ...device.worker import Worker
from ...drafters import Drafter
from ...drafters.estimates import StepCosts
from ...kernels.batch import Chunk
from ...kernels.speculation.proposal import Proposal
from ...kernels.table import Table
from .group import Group
from .job import Job


class Rank(Worker):
    """The worker of one rank.

    Attributes:
        job: the followers, if this is the leader.
    """

    def __init__(self, group: Group, job: Job | None, *of_worker: Any) -> None:
        """`of_worker`: the arguments of `Worker`."""
        self.group, self.job = group, job
        super().__init__(*of_worker)
        self.memory *= group.size  # shapes are equal on all ranks
        for drafter in self.drafters:
            if drafter.reads_on_host:  # all ranks use what the leader's proposes
                drafter.propose = partial(_propose, group, drafter.propose)  # type: ignore[method-assign]
        self._end = weakref.finalize(self, _end, os.getpid(), group, job, self.graphs)

    def _plan_cache(self) -> tuple[int, int]:
        """(number of KV blocks, max_model_len) that fit on every rank."""
        plans = self.group.gather(torch.tensor(super()._plan_cache(), device=self.device))
        num_blocks, max_model_len = plans.amin(0).tolist()
        return num_blocks, max_model_len

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        return None if self.job is None else self.job.failure

    def follow(self) -> None:
        """Run the leader's commands until it ends the job."""
        while (message := self.group.receive()) is not None:
            verb, *args = message
            getattr(self, verb)(*args)
        self._end()

    @contextmanager
    def _all(self, *message: Any) -> Iterator[None]:
        """Run a method on all ranks: the leader sends its name and its arguments to the followers first."""
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

    def step(self, order: StepOrder, cut: Cut = lambda offers: []) -> Flight:
        with self._all("step", order):
            return super().step(order, lambda offers: self.group.share(lambda: cut(offers)))

    def fetch(self, flight: Flight) -> list[RowResult]:
        assert self.job is not None  # followers need no results
        with self.job.command("fetch"):
            return super().fetch(flight)

    def release(self, row: int) -> None:
        if self.failure is None:  # otherwise there are no rows any more
            with self._all("release", row):
                super().release(row)

    def measure(self, meet: Meet = tuple) -> StepCosts:
        with self._all("measure"):
            return super().measure(lambda: self.group.gather(torch.zeros(1, device=self.device)))

    def close(self) -> None:
        self._end()


def _end(process: int, group: Group, job: Job | None, graphs: StepGraphs | None) -> None:
    """Leave the group when the worker is closed, collected, or left to the end of the interpreter; the leader
    ends the job. A forked process leaks the group: its destructor would wait for the parent's threads."""
    if os.getpid() != process:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        return
    if graphs is not None:
        graphs.captures.clear()  # first, as NCCL waits for its kernels in them
    (job or group).close()


class Remote(Drafter):
    """The stand-in on a follower for a drafter of the leader's host."""

    reads_on_host = True

    def __init__(self, drafter: Drafter) -> None:
        self.name, self.max_drafts, self.runs_model = drafter.name, drafter.max_drafts, drafter.runs_model
        self.makes_trees, self.memory = drafter.makes_trees, drafter.memory


def for_followers(given: Any) -> Any:
    """Return the `drafter` argument of the user with stand-ins for drafters of the host."""
    if isinstance(given, list | tuple):
        return [for_followers(each) for each in given]
    return Remote(given) if isinstance(given, Drafter) and given.reads_on_host else given


def _propose(group: Group, propose: Callable[..., Proposal], table: Table, rows: Tensor, k: int) -> Proposal:
    """Return on all ranks what the leader's drafter proposes."""
    parts = group.share(lambda: [part if part is None else part.cpu() for part in propose(table, rows, k)])
    return Proposal._make(part if part is None else part.to(group.device) for part in parts)
