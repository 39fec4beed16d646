"""Test full disks and truncated files: a file is complete, or recognized as incomplete."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanospec.apps.batch.lines import result_prefix
from nanospec.apps.batch.run import Batch, indices_done, results_file
from nanospec.apps.cli.main import main
from nanospec.apps.tasks import Task
from nanospec.config import SamplingParams
from nanospec.kernels import native
from tests.nanospec.extras.tensor_parallel.test_launcher import assert_gone

TASKS = [
    Task(i, SamplingParams(), "x", url=("", "/v1/completions")[i % 2], key=f"{i:016x}") for i in range(4)
]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files in the context. Writes beyond it are truncated, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_results(path: Path) -> None:
    """Write the results of a batch whose tasks finish out of order."""
    with results_file(str(path)) as file:
        done = indices_done(path, TASKS)
        batch = Batch("input", str(path), TASKS, done, file)
        with batch.running():
            for task in reversed([task for task in TASKS if task.index not in done]):
                batch.write(result_prefix(task) + b'"text": "\xe2\x80\xa8"}\n', 1)


def test_batch_resumes_after_full_disk(tmp_path: Path) -> None:
    """Afterwards each result exists once, wherever the disk was full."""
    path = tmp_path / "whole"
    write_results(path)
    whole = sorted(path.read_bytes().split(b"\n"))
    for size in range(path.stat().st_size):
        path = tmp_path / "results"
        with file_size_limit(size), pytest.raises(OSError):
            write_results(path)
        write_results(path)
        assert sorted(path.read_bytes().split(b"\n")) == whole, size
        path.unlink()


def test_standard_output_on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nanospec.apps.cli.main.resolve_model", Path)
    monkeypatch.setattr("nanospec.apps.cli.generate.run", lambda *_: print("x" * 10**5))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--prompt", "x"]) == 2
    assert capsys.readouterr().err == "Cannot write to standard output: No space left on device.\n"


def test_truncated_compiled_library_is_recompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it would crash every process with SIGBUS."""
    if native.library() is None:
        pytest.skip("needs a compiler")
    kept = native.compiled_library(native.cache_folder())
    whole, file = kept.read_bytes(), tmp_path / kept.name
    monkeypatch.setattr(native, "_compile", lambda command, _: Path(command[-1]).write_bytes(whole))
    for size in (0, 63, 64, 4096, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert native.compiled_library(tmp_path) == file
        assert file.read_bytes() == whole


def test_interrupt_stops_compiler(tmp_path: Path) -> None:
    """This includes its child processes, as g++ has, and its temporary files."""
    script = "echo > $TMPDIR/cc1.s; sleep 60 & echo $! > pid.part; mv pid.part pid; wait"
    pid, before = tmp_path / "pid", signal.getsignal(signal.SIGALRM)

    def interrupt(*_: object) -> None:
        if pid.exists():
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with pytest.raises(KeyboardInterrupt):
            native._compile(["sh", "-c", f"cd {tmp_path}; {script}"], str(tmp_path))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "cc1.s").exists()  # not in the shared temporary folder
    assert_gone([int(pid.read_text())])
