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
PROGRAM = """
import atexit, os, signal, sys, tempfile
from importlib.abc import MetaPathFinder
from nanospec import __main__ as process

sys.argv = ["run.py", "fetch", "no-such-model"]
restore = process._handle

def send_signal(number=signal.SIGINT):
    os.kill(os.getpid(), number)

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "nanospec.apps.cli.main":
            send_signal()

class Stream:
    def write(self, text):
        send_signal()

    def flush(self):
        pass

def interrupted(argv):
    sys.stderr = Stream()
    raise KeyboardInterrupt

def handle(numbers, action):
    if action is signal.SIG_DFL:
        send_signal()
    restore(numbers, action)

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
RUN = "from nanospec.apps.cli import main; main._run = interrupted"
CASES = {  # last lines of the program, exit status in a shell, start of stderr, number of files left
    "while-importing": ("sys.meta_path.insert(0, Finder())", 130, "", 0),
    "while-python-ends": ("atexit.register(send_signal)", 130, UNKNOWN, 0),
    "while-restoring-handlers": ("process._handle = handle", 2, UNKNOWN, 0),
    "while-reporting-the-first": (RUN, 130, "", 0),
    "terminated": ("leave(signal.SIGTERM)", 143, "", 0),
    "terminated-twice": ("leave(signal.SIGTERM, lambda: send_signal(signal.SIGTERM))", 143, "", 1),
    "hung-up": ("leave(signal.SIGHUP)", 129, "", 0),
    "ignored": ("leave(signal.SIGHUP, send_signal); atexit.register(send_signal)", 3, "", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_process_ends_without_traceback(tmp_path: Path, case: str) -> None:
    """Ignored signals stay ignored, as set by nohup, and by shells for background jobs."""
    lines, status, message, left = CASES[case]
    actions = {signal.SIGHUP: signal.SIG_DFL}  # the tests themselves may run under nohup
    if case == "ignored":
        actions = {signal.SIGHUP: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}
    before = {number: signal.signal(number, action) for number, action in actions.items()}
    command, env = [sys.executable, "-c", PROGRAM % lines], {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (done.returncode if done.returncode >= 0 else 128 - done.returncode) == status, done.stderr
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") <= 1, done.stderr
    assert len(list(tmp_path.iterdir())) == left
