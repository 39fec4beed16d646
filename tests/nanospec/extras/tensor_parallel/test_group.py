"""What ranks exchange, by gloo; here each rank is a thread, as a group is no process's own."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanospec.extras.tensor_parallel.group import Processes, gathered
from nanospec.extras.tensor_parallel.ranks import part
from nanospec.extras.tensor_parallel.team import Team

SIZE = 3


class Held:
    """A C++ group, and when the last reference to it was dropped."""

    def __init__(self, group: Any) -> None:
        self.shutdown, self.destroyed = group.shutdown, list[bool]()
        weakref.finalize(self, self.destroyed.append, True)


def exchanged(rank: int, port: int) -> dict[str, Any]:
    group = Processes(torch.device("cpu"), rank, SIZE, dist.TCPStore("127.0.0.1", port, is_master=False), 30)
    x = torch.arange(12).view(SIZE, 2, 2) + 100 * rank
    found: dict[str, Any] = {"numbers": gathered(group, [rank, 7], group.device)}
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        found[str(dtype)] = group.gather(x.to(dtype)), group.exchange(x.to(dtype))
    found["columns"] = group.gather(x[0].T)  # not contiguous
    found["nothing"] = group.gather(x[:0]).shape
    group.close()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(exchanged, range(SIZE), [store.port] * SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_all_get_everybodys_tensor_and_each_what_is_its_own(
    results: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    given = torch.stack([torch.arange(12).view(SIZE, 2, 2) + 100 * rank for rank in range(SIZE)]).to(dtype)
    for rank, found in enumerate(results):
        whole, own = found[str(dtype)]
        assert torch.equal(whole, given)
        assert torch.equal(own, given[:, rank])


def test_numbers_and_other_shapes(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["numbers"] == [[0, 7], [1, 7], [2, 7]]
        assert torch.equal(found["columns"][1], torch.tensor([[100, 102], [101, 103]]))
        assert found["nothing"] == (SIZE, 0, 2, 2)


def test_who_closes_a_group_waits_for_who_has_begun_to() -> None:
    """Else a process would end while C++ is still parting, and be aborted."""
    group, begun, done = object.__new__(Processes), Event(), Event()

    def shutdown() -> None:
        begun.set()
        done.wait(20)

    group.device, group._parting, group._group = torch.device("cpu"), None, SimpleNamespace(shutdown=shutdown)
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


def test_a_closed_job_leaves_no_thread_and_no_group_to_the_end_of_the_interpreter() -> None:
    """A daemon thread that drops the last reference to the C++ group then aborts the process."""
    store = dist.HashStore()
    ours, theirs = Pipe()
    with ours, theirs:
        group, team = Processes(torch.device("cpu"), 0, 1, store, 30), Team([ours], (), 30)
        group._group, destroyed = (alone := Held(group._group)), alone.destroyed
        del alone
        team.give_up = group.close
        part(group, None)
        assert destroyed == [True]
        team.close()
        assert not team._watch.is_alive()
