"""The process around the command line: signals at moments that a randomly timed one rarely hits. Signals at
random times are in `campaigns/faults/test_signals.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
BEGIN = """
import atexit, os, signal, sys, tempfile
from importlib.abc import MetaPathFinder
from nanospec import __main__ as process

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
ENDING = """
atexit.register(send_signal)
sys.argv = ["run.py", "fetch", "no-such-model"]
"""
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
sys.argv = ["run.py", "fetch", "no-such-model"]
"""
LEAVING = """
from nanospec.apps.cli import main

def run(argv):
    with tempfile.TemporaryDirectory(dir=".") as folder:
        try:
            send_signal(NUMBER)
        finally:
            assert os.path.isdir(folder)
            AGAIN

main._run = run
"""
LEAVE, HANG_UP = (LEAVING.replace("NUMBER", f"signal.{name}") for name in ("SIGTERM", "SIGHUP"))
END = "\nprocess.command()\n"
CASES = {  # script, exit status as a shell reports it, start of stderr, number of files left
    "while-importing": (IMPORTING, 130, "", 0),
    "while-python-ends": (ENDING, 130, "python run.py: unknown model 'no-such-model'", 0),
    "while-restoring-handlers": (RESTORING, 2, "python run.py: unknown model 'no-such-model'", 0),
    "while-reporting-the-first": (TWICE, 130, "", 0),
    "terminated": (LEAVE.replace("AGAIN", ""), 143, "", 0),
    "terminated-twice": (LEAVE.replace("AGAIN", "send_signal(signal.SIGTERM)"), 143, "", 1),
    "hung-up": (HANG_UP.replace("AGAIN", ""), 129, "", 0),
}


def run(tmp_path: Path, script: str) -> tuple[int, str]:
    command, env = [sys.executable, "-c", BEGIN + script + END], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_process_ends_without_traceback(tmp_path: Path, case: str) -> None:
    script, expected, message, left = CASES[case]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        status, errors = run(tmp_path, script)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert status == expected, errors
    assert errors.startswith(message)
    assert errors.count("\n") <= 1, errors
    assert len(list(tmp_path.iterdir())) == left


def test_ignored_signals_stay_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As set by nohup, and by shells for background jobs."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        script = HANG_UP.replace("AGAIN", "send_signal()\n    return 3") + "atexit.register(send_signal)"
        status, errors = run(tmp_path, script)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (status, errors) == (3, "")
