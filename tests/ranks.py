"""Run tensor-parallel ranks as threads. Rank 0 runs in the test's thread."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanospec.config import EngineConfig
from nanospec.drafters import Drafter, Target
from nanospec.drafters.methods import load_drafters
from nanospec.engine.engine import Engine
from nanospec.extras import create_extensions
from nanospec.extras.tensor_parallel.process_group import ProcessGroup, RankFailed
from nanospec.extras.tensor_parallel.shard import Shard
from nanospec.extras.tensor_parallel.worker import RankWorker
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from tests.random_weights import random_weights

Weights = dict[str, Tensor]
MakeDrafter = Callable[[Model, ProcessGroup], Sequence[Drafter]]
TIMEOUT = 60.0  # seconds


class Threads(ProcessGroup):
    """A group whose ranks are threads."""

    def __init__(self, rank: int, given: list[Any], barrier: threading.Barrier) -> None:
        self.device, self.rank, self.size = torch.device("cpu"), rank, len(given)
        self.given, self.barrier = given, barrier
        self.commands: list[SimpleQueue[Any]] = []  # to the other ranks, or from the leader

    def all_gather(self, x: Tensor) -> Tensor:
        self.given[self.rank] = x
        try:
            self.barrier.wait(TIMEOUT)
            assert len({(part.dtype, part.shape) for part in self.given}) == 1
            result = torch.stack(self.given)
            self.barrier.wait(TIMEOUT)  # before any rank gathers again
        except threading.BrokenBarrierError:
            raise RankFailed("A rank has left the group.") from None
        return result

    def send(self, command: Any) -> None:
        for queue in self.commands:
            queue.put(command)

    def receive(self) -> Any:
        if (command := self.commands[0].get()) is None:
            raise RankFailed("The leader has left the group.")
        return command

    def close(self) -> None:
        self.send(None)


def groups_of(size: int) -> list[Threads]:
    given, barrier = [None] * size, threading.Barrier(size)
    groups = [Threads(rank, given, barrier) for rank in range(size)]
    for group in groups[1:]:
        group.commands.append(SimpleQueue())
        groups[0].commands += group.commands
    return groups


def together(size: int, work: Callable[[ProcessGroup], Any]) -> list[Any]:
    """Run `work` on each rank and return the results, or raise the error of the first rank that fails."""
    errors: list[Exception] = []

    def run(group: Threads) -> Any:
        try:
            return work(group)
        except Exception as error:
            errors.append(error)
            group.barrier.abort()  # the others would wait for this rank

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, groups_of(size)))
    if errors:
        raise errors[0]
    return results


def weights_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Weights:
    get = random_weights(config, dtype, "cpu", 0)
    return {name: get(name) for name in config.parameter_shapes()}


def part_of(config: ModelConfig, weights: Weights, group: ProcessGroup) -> Model:
    """Return the model of one rank."""
    shard = Shard(config, group)
    parts = {name: shard.take(name, weight).clone() for name, weight in weights.items()}
    return shard.joined(Model(shard.config, torch.float32, "cpu", parts.__getitem__))


class Split(NamedTuple):
    """An engine over several ranks, and the workers of all ranks but 0."""

    engine: Engine
    workers: dict[int, RankWorker]

    def assert_equal(self) -> None:
        """Check that all ranks have equal tables after all requests have ended."""
        for worker in self.workers.values():
            for name, column in worker.table._asdict().items():
                expected = getattr(self.engine.worker.table, name)
                assert torch.equal(torch.as_tensor(expected), torch.as_tensor(column)), name


@contextmanager
def split_engine(
    size: int, config: ModelConfig, weights: Weights, options: EngineConfig,
    drafter: MakeDrafter | None = None,
) -> Iterator[Split]:  # fmt: skip
    """Run an engine over `size` ranks; `drafter` creates each rank's drafters."""
    groups, workers, errors = groups_of(size), dict[int, RankWorker](), list[BaseException]()

    def worker(rank: int) -> RankWorker:
        group = groups[rank]
        model = part_of(config, weights, group)
        made = load_drafters(options.spec, Target(model)) if drafter is None else drafter(model, group)
        return RankWorker(group, options, model, made, create_extensions(options))

    def run_rank(rank: int) -> None:
        try:
            workers[rank] = worker(rank)
            workers[rank].follow()
        except RankFailed:
            pass
        except BaseException as error:
            errors.append(error)
            groups[rank].barrier.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    leader = worker(0)
    leader.end = groups[0].close
    try:
        yield Split(Engine(options, leader), workers)
    finally:
        leader.close()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert errors == []
