"""Communication between ranks over gloo. Ranks are threads here, since groups are not tied to processes."""

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.extras.tensor_parallel import group as module
from nanospec.extras.tensor_parallel.group import Group, RankInfo

SIZE, CPU = 3, torch.device("cpu")
COMMANDS = [("admit", ["x" * 10_000]), None]
DTYPES = (torch.float32, torch.bfloat16, torch.bool)


class Target(SimpleNamespace):
    """A mock of a C++ group, which supports weak references."""


def rank_info(rank: int, size: int, store: Path) -> RankInfo:
    return RankInfo(rank, size, rank, size, str(store))


def test_collectives_and_commands(tmp_path: Path) -> None:
    x = torch.arange(12 * SIZE).view(SIZE, SIZE, 2, 2)  # by sender and receiver

    def exchange(rank: int) -> tuple[list[Any], list[Tensor]]:
        group = Group(CPU, rank_info(rank, SIZE, tmp_path / "store"), 30)
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


def test_limit_applies_to_each_collective_but_not_to_an_idle_leader(tmp_path: Path) -> None:
    def wait(rank: int) -> Any:
        group = Group(CPU, rank_info(rank, 2, tmp_path / "store"), 0.3)
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


@pytest.mark.parametrize("started", [0, 1])  # the other rank has not started, or does not connect
def test_ranks_that_do_not_connect_in_time(started: int, tmp_path: Path, monkeypatch: Any) -> None:
    late = "Not all of the 2 ranks started within 0.1 seconds"
    for limit, check, error in ((0.1, lambda: None, late), (9, lambda: [][0], "out of range")):
        info, begun = rank_info(0, 2, tmp_path / str(limit)), time.monotonic()
        monkeypatch.setattr(module, "START", limit)
        info.store().add("nanospec/ranks", started)
        with pytest.raises((OSError, IndexError), match=error):
            Group(CPU, info, 2, check)
        assert time.monotonic() - begun < 1.5


def test_close_destroys_group(tmp_path: Path) -> None:
    """A destructor that runs during interpreter shutdown would abort the process."""
    group, destroyed = Group(CPU, rank_info(0, 1, tmp_path / "store"), 30), Event()
    group._gloo = group._tensors = held = Target()
    weakref.finalize(held, destroyed.set)
    del held
    group.close()
    assert destroyed.is_set()
    group.close()


def test_close_waits_for_concurrent_close_but_not_for_hanging_devices(monkeypatch: Any) -> None:
    group: Any = object.__new__(Group)
    events: Any = Event(), Event()
    begun, done = events
    group.device, group._closing = torch.device("cuda"), Lock()
    group._gloo = group._tensors = Target(abort=lambda: (begun.set(), done.wait(20)))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(group.close)
        assert begun.wait(20)
        second = pool.submit(group.close)
        time.sleep(0.1)
        assert not first.done()
        assert not second.done()
        done.set()
    monkeypatch.setattr(module, "CLOSING", 0.1)
    group._tensors = Target(abort=lambda: Event().wait(5))
    group.close()
