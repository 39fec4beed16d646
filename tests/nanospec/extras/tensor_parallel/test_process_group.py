"""Communication between ranks over gloo. Ranks are threads here, since groups are not tied to processes."""

import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore

from nanospec.extras.tensor_parallel.process_group import ProcessGroup, RankFailed

SIZE, CPU = 3, torch.device("cpu")
COMMANDS = [("admit", ["x" * 10_000]), None]
DTYPES = (torch.float32, torch.bfloat16, torch.bool)


def run_ranks(size: int, path: Path, work: Callable[[ProcessGroup], Any], seconds: float = 30) -> list[Any]:
    """Connect ranks in threads, and return the results of `work`."""

    def run(rank: int) -> Any:
        return work(ProcessGroup(rank, size, FileStore(str(path / "store"), size), CPU, seconds))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_gathered_tensors_and_commands(tmp_path: Path) -> None:
    x = torch.arange(12 * SIZE).view(SIZE, 3, 2, 2)

    def exchange(group: ProcessGroup) -> tuple[list[Any], list[Tensor]]:
        mine = x[group.rank]
        gathered = [group.all_gather(mine.to(dtype)) for dtype in DTYPES]
        gathered += group.all_gather(mine[0].T), group.all_gather(mine[:, :0])
        for command in COMMANDS if group.rank == 0 else ():
            group.send(command)
        received = [group.receive() for _ in COMMANDS] if group.rank else COMMANDS
        group.close()
        return received, gathered

    expected = [x.to(dtype) for dtype in DTYPES] + [x[:, 0].mT, x[:, :, :0]]
    for received, gathered in run_ranks(SIZE, tmp_path, exchange):
        assert all(map(torch.equal, gathered, expected))
        assert [tensor.dtype for tensor in gathered] == [tensor.dtype for tensor in expected]
        assert received == COMMANDS


def test_timeout_applies_to_collectives_but_not_to_an_idle_leader(tmp_path: Path) -> None:
    def wait(group: ProcessGroup) -> Any:
        if group.rank:
            command = group.receive()
            message = r"did not answer within distributed_timeout=0.3 seconds\."
            with pytest.raises(RankFailed, match=message):
                group.all_gather(torch.ones(1))
            return command
        time.sleep(0.6)
        group.send("now")
        time.sleep(0.6)
        return None

    assert run_ranks(2, tmp_path, wait, 0.3) == [None, "now"]


def test_lost_rank_fails_collectives_at_once(tmp_path: Path) -> None:
    def leave(group: ProcessGroup) -> None:
        if group.rank:
            group.close()
            return
        with pytest.raises(RankFailed, match="A rank died"):
            group.all_gather(torch.ones(1))

    begun = time.monotonic()
    run_ranks(2, tmp_path, leave)
    assert time.monotonic() - begun < 20


def test_close_destroys_group(tmp_path: Path) -> None:
    """A destructor that runs during interpreter shutdown would abort the process."""

    def close(group: Any) -> None:
        destroyed, backend = Event(), type("Backend", (), {"abort": lambda self: None})()
        weakref.finalize(backend, destroyed.set)
        group._backends = {"cpu": group._backends["cpu"], "cuda": backend}
        del backend
        for _ in range(2):
            group.close()
        assert destroyed.is_set()

    run_ranks(1, tmp_path, close)
