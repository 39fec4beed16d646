"""Failures that end a job, and their messages."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from nanospec.extras.tensor_parallel import job as module
from nanospec.extras.tensor_parallel.job import Job, RankFailed, report_failure

LATE = "A rank did not complete 'step' within distributed_timeout=0.3 seconds, so all ranks were stopped."


class Connection:
    """Records sent commands."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, command: Any) -> None:
        self.sent.append(command)

    def close(self) -> None:
        self.sent.append("closed")


@pytest.fixture
def job() -> Iterator[Any]:
    """A job without processes and with a time limit of 0.3 seconds per command."""
    job: Any = Job([], HashStore(), 0.3)
    job.group = Connection()
    yield job
    job.close()
    assert not job._watch.is_alive()  # it could drop the group during interpreter shutdown


def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_commands_time_out_but_loading_does_not(job: Any) -> None:
    """A leader waiting for the device is released and gets an error."""
    with job.command("start", math.inf):
        time.sleep(0.6)
    with pytest.raises(RankFailed) as raised, job.command("step"):
        eventually(lambda: job.group.sent == ["closed"])
    assert str(raised.value) == LATE
    with pytest.raises(RankFailed, match="did not complete 'step'"), job.command("step"):
        pytest.fail("nothing is begun any more")


def test_hanging_leader_exits(
    job: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module, "GRACE", 0.3)
    monkeypatch.setattr("os._exit", ended.append)
    with pytest.raises(RankFailed), job.command("step"):
        eventually(lambda: ended)
    assert ended == [1]
    assert capfd.readouterr().err == f"{LATE}\n"


def test_first_failure_is_the_error(job: Any) -> None:
    """Also for a leader that only sees a closed connection."""
    report_failure(job.store, 2, ValueError("max_model_len=7 is too short."))
    report_failure(job.store, 1, RuntimeError("Connection closed by peer"))
    closed = RuntimeError("Connection closed by peer")
    with pytest.raises(RankFailed) as raised, job.command("step"):
        raise closed
    assert str(raised.value) == "Rank 2 failed, so all ranks were stopped: max_model_len=7 is too short."
    assert raised.value.__cause__ is closed


def test_exception_in_command_ends_job(job: Any) -> None:
    with pytest.raises(RankFailed) as raised, job.command("step", 30):
        raise RuntimeError("no")
    assert str(raised.value) == "Rank 0 failed, so all ranks were stopped: RuntimeError('no')"


def test_interrupted_command_ends_job(job: Any) -> None:
    """Otherwise the ranks would be out of step."""
    with pytest.raises(KeyboardInterrupt), job.command("step"):
        raise KeyboardInterrupt
    assert job.failure == "'step' was interrupted, so all ranks were stopped."


@pytest.mark.parametrize(
    ("program", "message"), [("exit(3)", "exited with status 3"), ("os.kill(0, 9)", "was killed by signal 9")]
)
def test_dead_process_ends_job(program: str, message: str) -> None:
    command = [sys.executable, "-c", f"import os; {program}"]
    others = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
    dead = subprocess.Popen(command, start_new_session=True)
    job = Job([others[0], dead, others[1]], HashStore(), 30)
    with (
        pytest.raises(RankFailed, match=f"^Rank 2 {message}, so all ranks were stopped\\.$"),
        job.command("step"),
    ):
        eventually(lambda: job.failure)
    job.close()
    assert [other.returncode for other in others] == [-9, -9]


def test_close_notifies_ranks_once_and_waits(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "0.3"])
    (tmp_path / "folder").mkdir()
    job: Any = Job([process], HashStore(), 1, str(tmp_path / "folder/store"))
    job.group = Connection()
    for _ in range(2):
        job.close()
    assert process.returncode == 0
    assert job.group.sent == [None, "closed", "closed"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="has been closed; create a new LLM"), job.command("step"):
        pytest.fail("nothing is begun any more")
