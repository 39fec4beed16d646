"""Failures that end a job, and their messages."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from nanospec.extras.tensor_parallel import job as module
from nanospec.extras.tensor_parallel.job import Job, RankFailed, report_failure

LATE = r"A rank did not complete 'step' within distributed_timeout=0\.3 seconds, so all ranks were stopped\."


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
        time.sleep(0.8)
    with pytest.raises(RankFailed, match=LATE), job.command("step"):
        eventually(lambda: job.group.sent == ["closed"])
    with pytest.raises(RankFailed, match=LATE), job.command("step"):
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
    assert capfd.readouterr().err.startswith("A rank did not complete 'step' within distributed_timeout=0.3")


def test_first_failure_is_reported_by_all(job: Any) -> None:
    """Also for a leader that only sees a closed connection."""
    report_failure(job.store, 2, ValueError("max_model_len=7 is too short."))
    report_failure(job.store, 1, RuntimeError("Connection closed by peer"))
    sentence = r"^Rank 2 failed, so all ranks were stopped: max_model_len=7 is too short\.$"
    with pytest.raises(RankFailed, match=sentence) as raised, job.command("step"):
        raise RuntimeError("Connection closed by peer")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_leader_error_ends_job(job: Any) -> None:
    sentence = r"^Rank 0 failed, so all ranks were stopped: RuntimeError\('no'\)$"
    with pytest.raises(RankFailed, match=sentence), job.command("admit", 30):
        raise RuntimeError("no")


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
    job = Job([subprocess.Popen(command, start_new_session=True)], HashStore(), 30)
    with (
        pytest.raises(RankFailed, match=f"^Rank 1 {message}, so all ranks were stopped\\.$"),
        job.command("step"),
    ):
        eventually(lambda: job.failure)
    job.close()


def test_close_notifies_ranks_once_and_waits(tmp_path: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
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
