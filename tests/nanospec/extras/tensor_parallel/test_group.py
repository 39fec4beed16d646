"""Communication between ranks over gloo. Ranks are threads here, since groups are not tied to processes."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from nanospec.extras.tensor_parallel import group as module
from nanospec.extras.tensor_parallel.group import Group, RankInfo

SIZE, CPU = 3, torch.device("cpu")
COMMANDS = [("admit", ["x" * 10_000]), None]
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool)
STORES = defaultdict[str, Store](HashStore)


class LocalRankInfo(RankInfo):
    """A rank within this process."""

    def store(self) -> Store:
        return STORES[self.path]


def place(rank: int, size: int, name: str) -> RankInfo:
    return LocalRankInfo(rank, size, rank, size, name)


def test_collectives_and_commands() -> None:
    x = torch.arange(12 * SIZE).view(SIZE, SIZE, 2, 2)  # by sender and receiver

    def exchange(rank: int) -> tuple[list[Any], list[Tensor]]:
        group = Group(CPU, place(rank, SIZE, "together"), 30)
        gathered: list[Tensor] = []
        for dtype in DTYPES:
            gathered += group.all_gather(x[rank].to(dtype)), group.all_to_all(x[rank].to(dtype))
        gathered += group.all_gather(x[rank, 0].T), group.all_gather(x[rank, :, :0])
        for command in COMMANDS if rank == 0 else ():
            group.send(command)
        received = [group.receive() for _ in COMMANDS] if rank else COMMANDS
        received = [*received, group.broadcast_object(lambda: f"computed by {rank}")]
        group.close()
        return received, gathered

    with ThreadPoolExecutor(SIZE) as pool:
        results = list(pool.map(exchange, range(SIZE)))
    for rank, (received, gathered) in enumerate(results):
        expected = [part.to(dtype) for dtype in DTYPES for part in (x, x[:, rank])]
        expected += x[:, 0].mT, x[:, :, :0]
        assert all(map(torch.equal, gathered, expected))
        assert [tensor.dtype for tensor in gathered] == [tensor.dtype for tensor in expected]
        assert received == [*COMMANDS, "computed by 0"]


def absent(store: Store) -> None:
    """The other rank has not started."""


def silent(store: Store) -> None:
    """The other rank has started and does not connect."""
    store.add("nanospec/ranks", 1)


@pytest.mark.parametrize("other", [absent, silent])
def test_ranks_that_do_not_start_in_time(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of the start have one deadline, and fail at once when `check` does."""

    def fail() -> None:
        raise OSError("a rank has failed")

    for start, check, error in (
        (0.1, lambda: None, "Not all of the 2 ranks started within 0.1 seconds"),
        (9, fail, "a rank has failed"),
    ):
        name, begun = f"{other.__name__} {start}", time.monotonic()
        monkeypatch.setattr(module, "START", start)
        other(STORES[name])
        with pytest.raises(OSError, match=error):
            Group(CPU, place(0, 2, name), 2, check)
        assert time.monotonic() - begun < 1.5


def test_limit_applies_to_each_collective_but_not_to_an_idle_leader(tmp_path: Path) -> None:
    def wait(rank: int) -> Any:
        group = Group(CPU, RankInfo(rank, 2, rank, 2, str(tmp_path / "store")), 0.3)
        if rank:
            command = group.receive()
            with pytest.raises(RuntimeError):
                group.all_gather(torch.ones(1))
            return command
        time.sleep(0.6)
        group.send("now")
        time.sleep(0.6)
        return None

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wait, range(2))) == [None, "now"]


class FakeGroup:
    """A stand-in for a C++ group that records when its last reference is dropped."""

    def __init__(self) -> None:
        self.destroyed: list[bool] = []
        weakref.finalize(self, self.destroyed.append, True)


def test_close_destroys_group() -> None:
    """Otherwise its destructor could run during interpreter shutdown, which aborts the process."""
    group = Group(CPU, place(0, 1, "alone"), 30)
    group._gloo = group._tensors = held = FakeGroup()
    destroyed = held.destroyed
    del held
    group.close()
    assert destroyed == [True]
    group.close()


def test_concurrent_close_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = object.__new__(Group)
    begun, done = Event(), Event()

    def abort() -> None:
        begun.set()
        done.wait(20)

    group.device, group._closing = torch.device("cuda"), Lock()
    group._gloo = group._tensors = SimpleNamespace(abort=abort)
    first, second = Thread(target=group.close), Thread(target=group.close)
    first.start()
    assert begun.wait(20)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    done.set()
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()
    monkeypatch.setattr(module, "CLOSING", 0.1)  # devices of other ranks may not respond
    group._tensors = SimpleNamespace(abort=lambda: Event().wait(5))
    group.close()
