"""Communication between ranks over gloo. Ranks are threads here, since groups are not tied to processes."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanospec.extras.tensor_parallel import group as module
from nanospec.extras.tensor_parallel.group import Group, RankInfo

SIZE, CPU = 3, torch.device("cpu")
COMMANDS = [("admit", ["x" * 10_000]), None]


class LocalRankInfo(RankInfo):
    """A rank within this process."""

    def store(self) -> dist.Store:
        return STORES[self.path]


STORES = {name: dist.HashStore() for name in ("together", "alone", "waiting")}


def place(rank: int, size: int, name: str) -> RankInfo:
    return LocalRankInfo(rank, size, rank, size, name)


def exchanged(rank: int) -> dict[str, Any]:
    group = Group(CPU, place(rank, SIZE, "together"), 30)
    x = torch.arange(12).view(SIZE, 2, 2) + 100 * rank
    result: dict[str, Any] = {"numbers": group.all_gather(torch.tensor([rank, 7])).tolist()}
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        result[str(dtype)] = group.all_gather(x.to(dtype)), group.all_to_all(x.to(dtype))
    result["columns"] = group.all_gather(x[0].T)  # not contiguous
    result["nothing"] = group.all_gather(x[:0]).shape
    result["commands"] = COMMANDS
    if rank:
        result["commands"] = [group.receive() for _ in COMMANDS]
    else:
        for command in COMMANDS:
            group.send(command)
    group.close()
    return result


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(exchanged, range(SIZE)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_gather_and_exchange(results: list[dict[str, Any]], dtype: torch.dtype) -> None:
    given = torch.stack([torch.arange(12).view(SIZE, 2, 2) + 100 * rank for rank in range(SIZE)]).to(dtype)
    for rank, result in enumerate(results):
        whole, own = result[str(dtype)]
        assert torch.equal(whole, given)
        assert torch.equal(own, given[:, rank])


def test_other_shapes_and_commands(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["numbers"] == [[0, 7], [1, 7], [2, 7]]
        assert torch.equal(result["columns"][1], torch.tensor([[100, 102], [101, 103]]))
        assert result["nothing"] == (SIZE, 0, 2, 2)
        assert result["commands"] == COMMANDS


def test_missing_ranks_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START", 0.1)
    with pytest.raises(ConnectionError, match="Not all of the 2 ranks started within 0.1 seconds"):
        Group(CPU, place(0, 2, "waiting"), 30)

    def check() -> None:
        raise OSError("a rank has failed")

    with pytest.raises(OSError, match="a rank has failed"):
        Group(CPU, place(1, 3, "waiting"), 30, check)


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


def test_concurrent_close_waits() -> None:
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
