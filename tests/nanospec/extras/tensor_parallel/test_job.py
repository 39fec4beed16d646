"""Failures that end a job, and their messages."""

import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from nanospec.extras.tensor_parallel import job as module
from nanospec.extras.tensor_parallel.job import Job, RankFailed, report_failure
from tests.util import eventually

LATE = "A rank did not complete 'step' within distributed_timeout=0.3 seconds, so all ranks were stopped."


@pytest.fixture
def job() -> Iterator[Any]:
    """Yield a job without processes, with a time limit of 0.3 seconds per command."""
    job = Job([], HashStore(), 0.3)
    yield connect(job)
    job.close()
    assert not job._watch.is_alive()  # it could drop the group during interpreter shutdown


def connect(job: Any) -> Any:
    """Give the job a group that records the sent commands."""
    job.sent = []
    job.group = SimpleNamespace(send=job.sent.append, close=lambda: job.sent.append("closed"))
    return job


def test_commands_time_out_but_loading_does_not(job: Any) -> None:
    """A leader waiting for the device is released and gets an error."""
    with job.command("start", math.inf):
        time.sleep(0.6)
    with pytest.raises(RankFailed) as raised, job.command("step"):
        eventually(lambda: job.sent == ["closed"])
    assert str(raised.value) == LATE
    with pytest.raises(RankFailed, match="did not complete 'step'"), job.command("step"):
        pytest.fail("a command ran in a job that has ended")


def test_hanging_leader_exits(job: Any, monkeypatch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module, "GRACE", 0.3)
    monkeypatch.setattr("os._exit", ended.append)
    with pytest.raises(RankFailed), job.command("step"):
        eventually(lambda: ended)
    assert ended == [1]
    assert capfd.readouterr().err == f"{LATE}\n"


def test_first_failure_is_the_error(job: Any) -> None:
    """A leader that only sees a closed connection reports the first failure, too."""
    report_failure(job.store, 2, ValueError("max_model_len=7 is too short."))
    report_failure(job.store, 1, RuntimeError("Connection closed by peer"))
    closed = RuntimeError("Connection closed by peer")
    with pytest.raises(RankFailed) as raised, job.command("step"):
        raise closed
    assert str(raised.value) == "Rank 2 failed, so all ranks were stopped: max_model_len=7 is too short."
    assert raised.value.__cause__ is closed


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("no"), "Rank 0 failed, so all ranks were stopped: RuntimeError('no')"),
        (KeyboardInterrupt(), "'step' was interrupted, so all ranks were stopped."),
    ],
)
def test_exception_in_command_ends_job(job: Any, error: BaseException, message: str) -> None:
    with pytest.raises((RankFailed, KeyboardInterrupt)), job.command("step", 30):
        raise error
    assert job.failure == message


@pytest.mark.parametrize(
    ("program", "message"), [("exit 3", "exited with status 3"), ("kill -9 $$", "was killed by signal 9")]
)
def test_dead_process_ends_job(program: str, message: str) -> None:
    first, dead, last = (subprocess.Popen(["sh", "-c", each]) for each in ("sleep 99", program, "sleep 99"))
    job = Job([first, dead, last], HashStore(), 30)
    error = f"^Rank 2 {message}, so all ranks were stopped\\.$"
    with pytest.raises(RankFailed, match=error), job.command("step"):
        eventually(lambda: job.failure)
    job.close()
    assert [first.returncode, last.returncode] == [-9, -9]


def test_close_notifies_ranks_once_and_waits(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "0.3"])
    (tmp_path / "folder").mkdir()
    job = connect(Job([process], HashStore(), 1, str(tmp_path / "folder/store")))
    for _ in range(2):
        job.close()
    assert process.returncode == 0
    assert job.sent == [None, "closed", "closed"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="has been closed; create a new LLM"), job.command("step"):
        pytest.fail("a command ran in a job that has ended")
