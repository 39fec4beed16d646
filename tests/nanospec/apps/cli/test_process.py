"""The process around the command line: its two starts, a closed pipe, and signals at chosen moments."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import atexit, os, signal, sys, tempfile
from importlib.abc import MetaPathFinder
from nanospec import __main__ as process

sys.argv = ["run.py", "fetch", "no-such-model"]

def send_signal(number=signal.SIGINT):
    os.kill(os.getpid(), number)

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "nanospec.apps.cli.main":
            send_signal()

def leave(number, again=lambda: None):
    def run(argv):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            try:
                send_signal(number)
            finally:
                assert os.path.isdir(folder)
                again()
        return 3
    from nanospec.apps.cli import main
    main._run = run

%s
process.command()
"""
UNKNOWN = "python run.py: unknown model 'no-such-model'; use "
CASES = {  # last lines of the program, exit status in a shell, start of stderr
    "while-importing": ("sys.meta_path.insert(0, Finder())", 130, ""),
    "while-python-ends": ("atexit.register(send_signal)", 130, UNKNOWN),
    "terminated": ("leave(signal.SIGTERM)", 143, ""),
    "hung-up": ("leave(signal.SIGHUP)", 129, ""),
    "ignored": ("leave(signal.SIGHUP, send_signal); atexit.register(send_signal)", 3, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_process_ends_without_traceback(tmp_path: Path, case: str) -> None:
    """Signals that were ignored at the start stay ignored, as after nohup or in background jobs of shells."""
    lines, status, message = CASES[case]
    action, numbers = signal.SIG_IGN if case == "ignored" else signal.SIG_DFL, (signal.SIGHUP, signal.SIGINT)
    options: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "cwd": tmp_path, "timeout": 60}
    options["preexec_fn"] = lambda: [signal.signal(number, action) for number in numbers]
    done = subprocess.run([sys.executable, "-c", PROGRAM % lines], capture_output=True, text=True, **options)
    assert (done.returncode if done.returncode >= 0 else 128 - done.returncode) == status, done.stderr
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") <= 1, done.stderr
    assert list(tmp_path.iterdir()) == []  # the temporary folder was removed


def test_closed_pipe_ends_quietly() -> None:
    for start in ("run.py", "-mnanospec"):
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, start, "--help"], cwd=ROOT, **both) as process:  # type: ignore
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode in (141, 0)  # 0 with unbuffered output, as argparse ignores the error
