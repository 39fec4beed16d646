"""Test SIGINT, SIGTERM, SIGHUP and SIGKILL, also repeated, at random moments of real processes, from startup
to exit. `make faults` runs each command RUNS (20) times.

Each process has a private cache, home and temporary folder, which show its leftover files and identify its
child processes."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import NamedTuple

import pytest

from nanospec.kernels import native
from tests.alphabet import folder
from tests.nanospec.extras.tensor_parallel.test_launcher import assert_gone

__all__ = ["folder"]
pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]
ROOT = Path(__file__).resolve().parents[2]
RUNS = int(os.environ.get("RUNS", "20"))
SIGNALS = [[SIGINT], [SIGINT] * 2, [SIGINT] * 2, [SIGINT] * 3, [SIGTERM], [SIGTERM] * 2, [SIGHUP], [SIGKILL]]
SMALL: list[object] = ["--dtype", "float32", "--device", "cpu", "--max-num-seqs", 4]
LONG: list[object] = ["--max-tokens", 300, "--ignore-eos"]
WAYS: dict[str, list[object]] = {
    "prompt": ["--prompt", "abcab", *LONG],
    "batch": ["--input", "in.jsonl", "--output", "out.jsonl", "--raw"],
    "chat": ["--chat", *LONG],
    "help": ["--help"],
    "compile": ["--prompt", "abcab", "--max-tokens", 3],
}
NOISE = re.compile(r"Traceback|Exception ignored|Fatal Python|terminate called|core dumped|leaked")
STARTUP_ERROR = "Fatal Python error: init_"  # Ctrl-C during the initialization of Python
TIMEOUT = 120.0  # time limit in seconds for a process to exit


class End(NamedTuple):
    """The end of a process: its exit status as in a shell, its output, and the child processes it left."""

    status: int
    out: str
    err: str
    orphans: list[int]


class Sandbox:
    """Private folders for processes, with a batch of requests and typed prompts."""

    def __init__(self, path: Path, compiled: bool) -> None:
        self.path = path
        for name in ("tmp", "cache/nanospec", "home"):
            (path / name).mkdir(parents=True)
        if compiled and native.library() is not None:
            file = native.compiled_library(native.cache_folder())
            (path / "cache/nanospec" / file.name).symlink_to(file)
        params = {"max_tokens": 100, "ignore_eos": True}
        lines = ({"prompt": "ab" * (i % 3 + 1), "seed": i, "temperature": i % 2, **params} for i in range(40))
        (path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (path / "typed").write_text("ab\nabc\nabcd\n")
        self.kept = self.files()

    def run(self, args: Sequence[object], delay: float = 0, signals: Sequence[int] = ()) -> End:
        """Run the command line. Send signals, first after `delay` s, then 1 to 300 ms apart."""
        private = {"TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "HOME": "home"}
        places = {name: str(self.path / where) for name, where in private.items()}
        env = {**os.environ, **places, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command, pipe = [sys.executable, str(ROOT / "run.py"), *map(str, args)], subprocess.PIPE
        with open(self.path / "typed") as typed:
            process = subprocess.Popen(
                command, cwd=self.path, env=env, text=True, stdin=typed, stdout=pipe, stderr=pipe
            )
        try:
            for number in signals:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(delay)
                    break
                process.send_signal(number)
                delay = 0.001 * 300 ** (delay * 1e4 % 1)  # 1 to 300
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
            orphans = [pid for pid in self.processes() if pid != process.pid]
        code = process.returncode
        return End(code if code >= 0 else 128 - code, out, err, orphans)

    def processes(self) -> list[int]:
        """Return the running processes of this sandbox, including child processes."""
        mark, pids = f"TMPDIR={self.path}/tmp".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    pids.append(int(path.name))
        return pids

    def files(self) -> set[str]:
        """Return the files in the temporary and cache folders."""
        paths = (path for name in ("tmp", "cache") for path in (self.path / name).rglob("*"))
        return {str(path.relative_to(self.path)) for path in paths}

    def results(self) -> list[tuple[int, str, list[int]]]:
        """Return the complete lines of the results, without statistics."""
        file = self.path / "out.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")]
        return sorted((line["index"], line["key"], line["token_ids"]) for line in lines)


@pytest.mark.parametrize("way", WAYS)
def test_process_exits_on_signal(way: str, folder: Path, tmp_path: Path) -> None:
    args = ["--model", folder, *SMALL, *WAYS[way]] if way != "help" else WAYS[way]
    begin, undisturbed = time.monotonic(), Sandbox(tmp_path / "undisturbed", way != "compile")
    assert undisturbed.run(args).status == 0
    whole = time.monotonic() - begin
    for seed in range(RUNS):
        draw = random.Random(f"{way}-{seed}")
        numbers = draw.choice(SIGNALS)
        sandbox = Sandbox(tmp_path / str(seed), way != "compile")
        end = sandbox.run(args, draw.random() * whole, numbers)
        if end.err.startswith(STARTUP_ERROR):
            continue
        assert end.status in (0, 128 + numbers[0]), end
        assert not NOISE.search(end.err), end
        assert_gone(end.orphans)
        if SIGKILL not in numbers:
            libraries = {name for name in sandbox.files() if name.endswith(".so") and name.count("/") == 2}
            assert not sandbox.files() - sandbox.kept - libraries, end
            assert not end.orphans, end
        if way == "batch":
            assert sandbox.run(args).status == 0
            assert sandbox.results() == undisturbed.results()
