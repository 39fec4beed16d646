"""`run.py` in a subprocess; for the rest see `tests/nanospec/apps/cli/test_main.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanospec.apps.cli.main import main
from tests.nanospec.apps.cli.test_main import requests_file, results

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("smollm2")


def command(*args: str | Path) -> list[str]:
    small = ["--dtype", "float32", "--kv-cache-memory", str(100 << 20)]
    return [sys.executable, str(ROOT / "run.py"), *small, *map(str, args)]


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command(*args), capture_output=True, text=True, env=env, timeout=240)


@pytest.mark.parametrize("start", [["run.py"], ["-m", "nanospec"]], ids=["run.py", "module"])
def test_run_py_and_module_are_equivalent(start: list[str]) -> None:
    argv = [sys.executable, *start, "fetch", "gpt-5"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown model 'gpt-5'; use" in done.stderr


def test_no_escape_codes_without_terminal() -> None:
    done = run("--prompt", "Say hi.", "--max-tokens", "8", "--show-drafts")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "tokens per step" in done.stdout


def test_closed_pipe_ends_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (141, 0)  # 0 with unbuffered output, as argparse ignores the error


def test_batch_interrupted_by_ctrl_c_can_be_resumed(tmp_path: Path) -> None:
    source, target = requests_file(tmp_path, 30, ignore_eos=True), tmp_path / "results.jsonl"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    args = command("--input", source, "--output", target, "--raw", "--max-num-seqs", "2")
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=env) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (target.exists() and target.read_text().count("\n") >= 2):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "of 30 requests are done; rerun the command to continue." in errors
    before = results(target)
    assert 2 <= len(before) < 30
    assert main(command("--input", source, "--output", target, "--raw")[2:]) == 0
    after = results(target)
    assert sorted(after) == list(range(30))
    assert all(after[i] == before[i] for i in before)
