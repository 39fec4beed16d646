"""The process around the command line: signals at moments that a randomly timed one rarely hits. Signals at
random times are in `campaigns/faults/test_signals.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
BEGIN = """
import atexit, os, signal, sys, tempfile
from importlib.abc import MetaPathFinder
from nanospec import __main__ as process

sys.argv = ["run.py", "fetch", "no-such-model"]

def send_signal(number=signal.SIGINT):
    os.kill(os.getpid(), number)

"""
IMPORTING = """
class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "nanospec.apps.cli.main":
            send_signal()

sys.meta_path.insert(0, Finder())
"""
ENDING = "atexit.register(send_signal)"
TWICE = """
from nanospec.apps.cli import main

class Stream:
    def write(self, text):
        send_signal()

    def flush(self):
        pass

def interrupted(argv):
    sys.stderr = Stream()
    raise KeyboardInterrupt

main._run = interrupted
"""
RESTORING = """
restore = process._handle

def handle(numbers, action):
    if action is signal.SIG_DFL:
        send_signal()
    restore(numbers, action)

process._handle = handle
"""
LEAVING = """
from nanospec.apps.cli import main

def run(argv):
    with tempfile.TemporaryDirectory(dir=".") as folder:
        try:
            send_signal(signal.{0})
        finally:
            assert os.path.isdir(folder)
            {1}

main._run = run
"""
UNKNOWN = "python run.py: unknown model 'no-such-model'; use "
CASES = {  # script, exit status as a shell reports it, start of stderr, number of files left
    "while-importing": (IMPORTING, 130, "", 0),
    "while-python-ends": (ENDING, 130, UNKNOWN, 0),
    "while-restoring-handlers": (RESTORING, 2, UNKNOWN, 0),
    "while-reporting-the-first": (TWICE, 130, "", 0),
    "terminated": (LEAVING.format("SIGTERM", ""), 143, "", 0),
    "terminated-twice": (LEAVING.format("SIGTERM", "send_signal(signal.SIGTERM)"), 143, "", 1),
    "hung-up": (LEAVING.format("SIGHUP", ""), 129, "", 0),
}


@contextmanager
def inherited(action: signal.Handlers, *numbers: int) -> Iterator[None]:
    """Set the action of signals, which processes that start in the context inherit."""
    before = [(number, signal.signal(number, action)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def run(tmp_path: Path, script: str) -> tuple[int, str]:
    code = f"{BEGIN}{script}\nprocess.command()\n"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60
    )
    return done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_process_ends_without_traceback(tmp_path: Path, case: str) -> None:
    script, expected, message, left = CASES[case]
    with inherited(signal.SIG_DFL, signal.SIGHUP):  # the tests themselves may run under nohup
        status, errors = run(tmp_path, script)
    assert status == expected, errors
    assert errors.startswith(message)
    assert errors.count("\n") <= 1, errors
    assert len(list(tmp_path.iterdir())) == left


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    """As set by nohup, and by shells for background jobs."""
    with inherited(signal.SIG_IGN, signal.SIGHUP, signal.SIGINT):
        script = LEAVING.format("SIGHUP", "send_signal()\n    return 3") + ENDING
        assert run(tmp_path, script) == (3, "")
