"""Ranks as threads of one process: all of tensor parallelism but its processes.

    with split_engine(2, config, weights_of(config), EngineConfig(...)) as split: run(split.engine, jobs)

The leader is the engine's worker, in the thread of the test; the others follow in threads of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanospec.config import EngineConfig
from nanospec.drafters.base import Drafter, Target
from nanospec.drafters.loading import load_drafters
from nanospec.engine.engine import Engine
from nanospec.extras import wanted
from nanospec.extras.tensor_parallel.group import Group
from nanospec.extras.tensor_parallel.ranks import Leader, Rank, follow
from nanospec.extras.tensor_parallel.shard import Shard
from nanospec.extras.tensor_parallel.team import Team
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from nanospec.models.random_weights import random_weights

Weights = dict[str, Tensor]
MakeDrafter = Callable[[Model, Group], Sequence[Drafter]]
PATIENCE = 60.0  # seconds


class Threads:
    """The group of one of several threads."""

    device = torch.device("cpu")

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(given)
        self._given, self._barrier = given, barrier
        self.count = 0

    def gather(self, x: Tensor) -> Tensor:
        self.count += 1
        self._given[self.rank] = x
        self._barrier.wait(PATIENCE)
        shapes = {(tuple(part.shape), part.dtype) for part in self._given}
        assert len(shapes) == 1, f"ranks are out of step: {shapes}"
        found = torch.stack(list(self._given))
        self._barrier.wait(PATIENCE)  # before anybody gives the next one
        return found

    def exchange(self, x: Tensor) -> Tensor:
        return self.gather(x)[:, self.rank]

    def close(self) -> None:
        self._barrier.abort()


def groups_of(size: int) -> list[Threads]:
    given, barrier = [None] * size, threading.Barrier(size)
    return [Threads(rank, given, barrier) for rank in range(size)]


def together(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """What so many ranks give who work at the same time."""
    groups = groups_of(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, groups))


class ThreadTeam(Team):
    """Ranks that get their messages by queues."""

    def __init__(self, inboxes: list[SimpleQueue[Any]]) -> None:
        super().__init__((), (), PATIENCE)
        self.inboxes, self.threads = inboxes, list[threading.Thread]()
        self.errors: list[BaseException] = []

    def tell(self, message: Any) -> None:
        for inbox in self.inboxes:
            inbox.put(message)

    def _explain(self, error: Exception) -> None:
        self.failure = f"{error!r} {self.errors!r}"

    def dismiss(self) -> None:
        super().dismiss()
        for thread in self.threads:  # they are to be done before their group is closed
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert not self.errors, self.errors


def weights_of(config: ModelConfig, seed: int = 0) -> Weights:
    """Random ones, by name."""
    get = random_weights(config, torch.float32, "cpu", seed)
    return {name: get(name) for name in config.parameter_shapes()}


def part_of(config: ModelConfig, weights: Weights, group: Group) -> Model:
    """The model of one rank."""
    shard = Shard(config, group)

    def get(name: str) -> Tensor:
        part = shard.part(name)
        return weights[name].clone() if part is None else part.filled(part.of(weights[name])).clone()

    return shard.joined(Model(shard.config, torch.float32, "cpu", get))


class Split(NamedTuple):
    """An engine over several ranks, and what each has: its group and, once it is there, its worker."""

    engine: Engine
    groups: list[Threads]
    workers: dict[int, Rank]

    def assert_equal(self) -> None:
        """All ranks know the same of all requests. To be called when they have ended."""
        for worker in self.workers.values():
            for mine, theirs in zip(self.engine.worker.table, worker.table, strict=True):
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


@contextmanager
def split_engine(
    size: int,
    config: ModelConfig,
    weights: Weights,
    options: EngineConfig,
    drafter: MakeDrafter | None = None,
) -> Iterator[Split]:
    """An engine over so many ranks; `drafter` makes one for each."""
    groups = groups_of(size)
    inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in groups[1:]]
    team, workers = ThreadTeam(inboxes), dict[int, Rank]()

    def parts(rank: int) -> tuple[EngineConfig, Model, Sequence[Drafter], Group]:
        model = part_of(config, weights, groups[rank])
        made = load_drafters(options.spec, Target(model)) if drafter is None else drafter(model, groups[rank])
        return options, model, made, groups[rank]

    def be(rank: int) -> None:
        try:
            workers[rank] = Rank(*parts(rank), wanted(options))
            follow(workers[rank], iter(inboxes[rank - 1].get, None))
        except BaseException as error:
            team.errors.append(error)
            groups[rank].close()

    team.threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in team.threads:
        thread.start()
    leader = Leader(*parts(0), team, wanted(options))
    try:
        yield Split(Engine(options, leader), groups, workers)
    finally:
        leader.close()
