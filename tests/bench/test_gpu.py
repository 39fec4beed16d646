"""`bench/gpu.py`: failing groups do not affect others, time limits hold, rows survive a killed run; and its
benchmarks on tiny shapes with a stand-in for `torch.cuda`."""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import check, e2e, gpu, gpu_tests, kernels, rows, stand_in, steps
from bench.cases import Built
from bench.gpu import Group, Outcome

WRITER = """
import json, os, sys, time
out, group, until = (sys.argv[sys.argv.index(name) + 1] for name in ("--out", "--group", "--until"))
file = out + "/part.jsonl"
begun = [line for line in open(file) if "begins" in line] if os.path.exists(file) else []
def row(text, **figures):
    with open(file, "a") as out:
        out.write(json.dumps({"group": group, "text": text, **figures}) + "\\n")
row("first", headline=True)
"""
HANG = "import subprocess; child = subprocess.Popen(['sleep', '60']); row(str(child.pid)); time.sleep(60)"
MEET = "row(group, begins=group)\nwhile open(file).read().count('begins') < 2: time.sleep(0.05)"
AGAIN = "row('x', begins='one')\nif len(begun) < 3: os.abort()\nrow('y', done=True)"
ENDS = {  # by name: code, status and reason; the first two run together
    "a": (MEET, "ok", ""),
    "b": (MEET, "ok", ""),
    "aborts": ("os.abort()", "crashed", "SIGABRT"),
    "says": ("raise SystemExit('a sentence')", "failed", "a sentence"),
    "raises": ("1 / 0", "failed", "ZeroDivisionError"),
    "good": ("row('second', error='bad', headline=True)", "ok", ""),
    "again": (AGAIN, "crashed", "one:"),
    "hangs": (HANG, "stopped", "time limit"),
    "late": ("", "left out", "out of time"),
}


def code(name: str, text: str) -> Group:
    return Group(name, ("-c", WRITER + text), 2.0 if text == HANG else 30.0, alone=text != MEET)


def test_groups_do_not_affect_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, clock, shift = time.time(), time.time, [0.0]
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    monkeypatch.setattr(gpu.time, "time", lambda: clock() + shift[0])
    outcomes: list[Outcome] = []
    *listed, late = [code(name, text) for name, (text, _, _) in ENDS.items()]
    gpu.run_part("part", listed, 300, tmp_path, outcomes)
    shift[0] = 1000.0  # when no time is left
    outcomes.append(gpu.run_group(late, "part", tmp_path, start + 300))
    for outcome, (name, (_, status, why)) in zip(outcomes, ENDS.items(), strict=True):
        assert (outcome.name, outcome.status) == (name, status), outcome.why
        assert why in outcome.why
        assert {row["group"] for row in outcome.rows} <= {name}
    again, hangs = outcomes[6:8]
    assert [row["text"] for row in again.rows].count("x") == 2  # continues after the row that ended it
    lines = gpu.summary({"part": outcomes}).splitlines()
    assert lines[0].startswith("== part: 3 of 9 groups ok")
    assert lines[1].startswith("  aborts: CRASHED")
    assert lines[7] == "  second"  # failures come first
    assert "==== raises" in (tmp_path / "part-raises.log").read_text()
    stat = Path(f"/proc/{hangs.rows[1]['text']}/stat")  # of its child process
    for _ in range(50):
        if not stat.is_file() or " Z " in stat.read_text():  # ended, possibly not reaped
            return
        time.sleep(0.1)
    raise AssertionError("the child process is still running")


def test_terminated_run_keeps_rows_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "groups", lambda part, cpu: [code("a", "time.sleep(60)")])
    monkeypatch.setattr(gpu, "STOP", threading.Event())
    file, before = tmp_path / "part.jsonl", signal.getsignal(signal.SIGTERM)

    def terminate() -> None:
        while not (file.is_file() and "first" in file.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    (waiting := threading.Thread(target=terminate, daemon=True)).start()
    try:
        with pytest.raises(SystemExit, match="terminated"):
            gpu.main(["steps", "--cpu", "--out", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    waiting.join()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["parts"] == {"steps": {}}
    with file.open("a") as part:
        part.write('{"text": "cu')
    assert [row["text"] for row in rows.read(file)] == ["first"]


TESTS = """
import os, time
def test_a(): pass
def test_b(): assert 1 == 2
def test_c(): os.abort()
def test_d(): pass
def test_e(): time.sleep(60)
"""


def test_tests_continue_after_a_crashing_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that hangs. The processes are forked, since importing torch takes seconds."""
    monkeypatch.setattr(gpu_tests, "EACH", 1.0)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_bad.py").write_text(TESTS)
    options = ["-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "no:faulthandler"]

    def run_tests() -> None:
        faulthandler.disable()  # would print a traceback
        notes = gpu_tests.Notes(tmp_path / "tests.jsonl", "bad")
        os._exit(pytest.main([str(tmp_path), *options], plugins=[notes]))

    codes = []
    for _ in range(3):
        process = multiprocessing.get_context("fork").Process(target=run_tests)
        process.start()
        process.join()
        codes.append(process.exitcode)
    assert codes == [-signal.SIGABRT, 1, pytest.ExitCode.NO_TESTS_COLLECTED]
    found = rows.read(tmp_path / "tests.jsonl")
    ends = {row["test"][-1]: row["outcome"] for row in found if "test" in row}
    assert ends == {"a": "passed", "b": "failed", "d": "passed"}
    assert [row["begins"][-1] for row in found if "begins" in row] == [*"abcde"]


# ---- benchmarks on tiny shapes -------------------------------------------------------------------

GRID = ["--shape", "tiny", "--batches", "1", "2", "--repeats", "1"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install = stand_in.install
    monkeypatch.setattr(stand_in, "install", lambda: install(monkeypatch.setattr))
    monkeypatch.setenv("NANOSPEC_PDL", "1")
    return tmp_path


def measured(main: Any, part: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a script in a dry run and return its rows, except begin and end markers."""
    main([*arguments, "--cpu", "--out", str(out)])
    return [row for row in rows.read(out / f"{part}.jsonl") if "text" in row]


@pytest.mark.long
def test_steps(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = [*GRID, "--contexts", "64", "--ks", "0", "2"]
    _, *result = measured(steps.main, "steps", out, *grid)
    expected = [(b, k, mode) for b in (1, 2) for k in (0, 2) for mode in steps.MODES]
    assert [(row["batch"], row["k"], row["mode"]) for row in result] == expected
    assert all(row["ms"] > 0 and row["share"] > 0 for row in result)
    assert len(measured(steps.main, "steps", out, *grid)) == len(result) + 2  # all groups have begun before

    def full(*arguments: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(steps, "Worker", full)
    last = measured(steps.main, "steps", out, *grid, "--group", "b")[-1]
    assert "memory" in last["left_out"]


@pytest.mark.long
def test_e2e(out: Path) -> None:
    result = measured(e2e.main, "e2e", out, *GRID, "--max-tokens", "6", "--prompt", "48", "--seconds", "0.1")
    systems = [row for row in result if "system" in row]
    assert len(systems) == 2 * 2 * len(e2e.SYSTEMS)
    assert all(row["rate"]["median"] > 0 for row in systems)


def test_kernels_are_checked_and_timed_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = ["--only", "ngram-B1-L1024", "rms_norm-H576-T1$", "rms_norm-H576-T1", "--repeats", "1"]
    late = measured(kernels.main, "kernels", out, *only, "--until", "1")
    assert all("left_out" in row and "us" not in row for row in late if "case" in row or "left_out" in row)
    assert any("left_out" in row for row in late)
    result = [row["case"] for row in measured(kernels.main, "kernels", out, *only) if "case" in row]
    assert len(result) == len(set(result)) >= 2
    assert result[0].startswith("B1-L1024")
    monkeypatch.setattr(check, "LIMIT", -1.0)
    with pytest.raises(SystemExit):
        measured(kernels.main, "kernels", out, *only[:2], *only[-2:], "--group", "wrong")
    assert any(row.get("wrong") for row in rows.read(out / "kernels.jsonl"))


@pytest.mark.parametrize("wrong", ["off", "unwritten", "changed"])
def test_check_detects_defects(wrong: str) -> None:
    """A wrong result, an unwritten one, and an argument that only the kernel changes."""
    builds: list[str] = []

    def build(device: str) -> Built:
        x = torch.randn(3, 64, dtype=torch.bfloat16)
        builds.append(device)
        first = len(builds) == 1

        def run() -> torch.Tensor:
            if wrong == "changed":
                x.add_(int(first))
                return torch.zeros(1)
            return x.clone() if not first else x + 1 if wrong == "off" else torch.empty_like(x)

        return Built(run)

    result = check.compare(build, "cpu", how="naive")
    assert check.is_wrong(result, "any")
    assert math.isnan(result["error"]) == (wrong == "unwritten")
    assert not torch.are_deterministic_algorithms_enabled()
