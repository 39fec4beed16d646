"""`run.py` in a process; the other tests of the command line are in `tests/nanospec/apps/cli`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanospec.apps.cli.main import main
from tests.nanospec.apps.cli.test_generate import requests_file, results
from tests.nanospec.test_llm import folder

__all__ = ["folder"]
ROOT = Path(__file__).resolve().parent.parent
RUN = [sys.executable, str(ROOT / "run.py")]


@pytest.mark.parametrize("start", [["run.py"], ["-m", "nanospec"]], ids=["run.py", "module"])
def test_run_py_and_module_are_equivalent(start: list[str]) -> None:
    argv = [sys.executable, *start, "fetch", "gpt-5"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown model 'gpt-5'; use" in done.stderr


def test_closed_pipe_ends_quietly() -> None:
    with subprocess.Popen([*RUN, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (141, 0)  # 0 with unbuffered output, as argparse ignores the error


def test_batch_interrupted_by_ctrl_c_can_be_resumed(folder: Path, tmp_path: Path) -> None:
    source, target = requests_file(tmp_path, 30, max_tokens=200), tmp_path / "results.jsonl"
    args = ["--model", str(folder), "--dtype", "float32", "--input", str(source), "--output", str(target)]
    few, env = [*RUN, *args, "--max-num-seqs", "2"], {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(few, stderr=subprocess.PIPE, text=True, env=env) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (target.exists() and target.read_text().count("\n") >= 2):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "\x1b" not in errors  # not a terminal
    assert "of 30 requests are done; rerun the command to continue." in errors
    before = results(target)
    assert 2 <= len(before) < 30
    assert main(args) == 0
    after = results(target)
    assert sorted(after) == list(range(30))
    assert all(after[i] == before[i] for i in before)
