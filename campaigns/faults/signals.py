"""Send signals to real processes, and collect their output and leftovers.

    sandbox = Sandbox(folder)
    end = sandbox.send(sandbox.start(["--prompt", "ab"]), 1.5, [signal.SIGINT])

Each process has a private cache, home and temporary folder, which show its leftover files and identify its
child processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nanospec.kernels import native

ROOT = Path(__file__).resolve().parents[2]
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
    """Private folders for processes."""

    def __init__(self, folder: Path, compiled: bool = True) -> None:
        self.folder = folder
        for name in ("tmp", "cache/nanospec", "home"):
            (folder / name).mkdir(parents=True)
        if compiled and native.library() is not None:
            file = native.compiled_library(native.cache_folder())
            (folder / "cache/nanospec" / file.name).symlink_to(file)
        self._before = self._files()
        private = {"TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "HOME": "home"}
        places = {name: str(folder / where) for name, where in private.items()}
        self.env = {**os.environ, **places, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, args: Sequence[object], **options: Any) -> subprocess.Popen[str]:
        """Start `run.py` with arguments."""
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        pipes |= {"stdin": subprocess.DEVNULL, **options}
        command = [sys.executable, str(ROOT / "run.py"), *map(str, args)]
        return subprocess.Popen(command, cwd=self.folder, env=self.env, text=True, **pipes)

    def send(self, process: subprocess.Popen[str], delay: float, signals: Sequence[int]) -> End:
        """Send signals to a process, first after `delay` s, then 1 to 300 ms apart, and wait for its end."""
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
        mark, pids = f"TMPDIR={self.folder}/tmp".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    pids.append(int(path.name))
        return pids

    def leftovers(self) -> set[str]:
        """Return the files that processes left in the temporary and cache folders."""
        return self._files() - self._before

    def _files(self) -> set[str]:
        paths = (path for name in ("tmp", "cache") for path in (self.folder / name).rglob("*"))
        return {str(path.relative_to(self.folder)) for path in paths}
