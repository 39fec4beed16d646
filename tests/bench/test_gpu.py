"""`bench/gpu.py`: failing groups do not affect others, time limits hold, rows survive a killed run; and its
benchmarks on tiny shapes with a stand-in for `torch.cuda`."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import check, e2e, gpu, kernels, rows, stand_in, steps
from bench.cases import Built, Case, all_cases
from bench.gpu import Group, Outcome

WRITER = """
import json, os, sys, time
out, group, until = (sys.argv[sys.argv.index(name) + 1] for name in ("--out", "--group", "--until"))
until = float(until)
file = out + "/part.jsonl"
begun = [line for line in open(file) if "begins" in line] if os.path.exists(file) else []
def row(text, **figures):
    with open(file, "a") as out:
        out.write(json.dumps({"group": group, "text": text, **figures}) + "\\n")
row("first", headline=True)
"""


def code(text: str, limit: float = 30.0, name: str = "a") -> Group:
    return Group(name, ("-c", WRITER + text), limit)


def run(listed: list[Group], out: Path, limit: float = 60.0) -> list[Outcome]:
    outcomes: list[Outcome] = []
    gpu.run_part("part", listed, limit, out, outcomes)
    return outcomes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    monkeypatch.setattr(gpu, "LEAST", 1.0)


def test_failing_group_does_not_affect_others(tmp_path: Path) -> None:
    listed = [
        code("os.abort()", name="aborts"),
        code("raise SystemExit('a sentence')", name="says"),
        code("1 / 0", name="raises"),
        Group("no such file", ("nowhere.py",)),
        code("row('second', error='bad', headline=True)", name="good"),
        code("row('x', begins='one')\nif len(begun) < 2: os.abort()\nrow('y', done=True)", name="again"),
    ]
    outcomes = run(listed, tmp_path)
    assert [o.status for o in outcomes] == ["crashed", "failed", "failed", "failed", "ok", "crashed"]
    for outcome, message in zip(
        outcomes, ("SIGABRT", "a sentence", "ZeroDivisionError", "nowhere.py", "", "one:")
    ):
        assert message in outcome.why
    assert [row["text"] for row in outcomes[-1].rows].count("x") == 3  # continues after the row that ended it
    lines = gpu.summary({"part": outcomes}).splitlines()
    assert lines[0].startswith("== part: 1 of 6 groups ok")
    assert lines[1].startswith("  aborts: CRASHED")
    assert lines[6] == "  second"  # failures come first
    assert "==== raises" in (tmp_path / "part-raises.log").read_text()


def test_hanging_group_is_killed_with_its_children(tmp_path: Path) -> None:
    text = "import subprocess; child = subprocess.Popen(['sleep', '60']); row(str(child.pid)); time.sleep(60)"
    start = time.time()
    [outcome] = run([code(text, 10.0)], tmp_path)
    assert time.time() - start < 40
    assert outcome.status == "stopped"
    stat = Path(f"/proc/{outcome.rows[1]['text']}/stat")
    for _ in range(50):
        if not stat.is_file() or " Z " in stat.read_text():  # ended, possibly not reaped
            return
        time.sleep(0.1)
    raise AssertionError("the child process is still running")


def test_groups_that_are_not_alone_run_together(tmp_path: Path) -> None:
    meet = "row(group, begins=group)\nwhile open(file).read().count('begins') < 2: time.sleep(0.05)"
    alone = code("row('after', begun=len(begun))", name="c")
    listed = [replace(code(meet, name=name), alone=False) for name in "ab"]
    outcomes = run([*listed, alone], tmp_path)
    assert [o.status for o in outcomes] == ["ok"] * 3
    assert [{row["group"] for row in o.rows} for o in outcomes] == [{"a"}, {"b"}, {"c"}]
    assert outcomes[2].rows[-1]["begun"] == 2


def test_part_ends_in_time(tmp_path: Path) -> None:
    wait = "time.sleep(max(until - time.time(), 0)); row('stopped by itself')"
    outcomes = run([code(wait, 30.0), code(wait, 30.0, "late")], tmp_path, limit=8.0)
    assert [o.status for o in outcomes] == ["ok", "left out"]
    assert outcomes[0].rows[-1]["text"] == "stopped by itself"


def test_terminated_run_keeps_rows_and_reports(tmp_path: Path) -> None:
    driver = f"""
from bench import gpu
gpu.groups = lambda part, cpu: [gpu.Group("a", ("-c", {WRITER + "time.sleep(60)"!r}))]
gpu.main(["steps", "--cpu", "--out", {str(tmp_path)!r}])
"""
    environment = {**os.environ, "PYTHONPATH": str(gpu.ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, env=environment
    )
    for _ in range(1200):
        if (tmp_path / "part.jsonl").is_file():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert json.loads(output.splitlines()[-1])["parts"] == {"steps": {}}
    assert rows.read(tmp_path / "part.jsonl")[0]["text"] == "first"
    with (tmp_path / "part.jsonl").open("a") as file:
        file.write('{"text": "cu')
    assert len(rows.read(tmp_path / "part.jsonl")) == 1


def test_tests_continue_after_a_crashing_test(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    path, plugin = tmp_path / "test_bad.py", tmp_path / "tests.jsonl"
    path.write_text(
        "import os, time\nfrom bench import gpu_tests\ngpu_tests.EACH = 2\n"
        "def test_a(): pass\ndef test_b(): assert 1 == 2\ndef test_c(): os.abort()\n"
        "def test_d(): pass\ndef test_e(): time.sleep(60)\n"
    )
    group = Group("bad", ("-m", "pytest", str(path), "-q", "-p", "bench.gpu_tests", "-p", "no:cacheprovider"))
    outcomes: list[Outcome] = []
    gpu.run_part("tests", [group], 100, tmp_path, outcomes)
    assert outcomes[0].status == "crashed"
    ends = {row["test"][-1]: row["outcome"] for row in rows.read(plugin) if "test" in row}
    assert ends == {"a": "passed", "b": "failed", "d": "passed"}
    assert "test_c: signal SIGABRT" in outcomes[0].why
    assert "test_e" in outcomes[0].why


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


def test_everything_is_left_out_without_time(out: Path) -> None:
    for main, part, arguments in (
        (steps.main, "steps", GRID),
        (kernels.main, "kernels", ["--only", "rms_norm-H576"]),
        (e2e.main, "e2e", [*GRID, "--prompt", "48"]),
    ):
        result = measured(main, part, out, *arguments, "--until", "1")
        assert any("left_out" in row for row in result)
        assert not any("ms" in row or "us" in row or "speedup" in row for row in result)


def cases(*names: str) -> dict[str, Case]:
    return {name: case for case in all_cases() if (name := f"{case.kernel}-{case.label}") in names}


def test_kernels_are_checked_and_timed_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = ["--only", "ngram-B1-L1024", "rms_norm-H576-T1$", "rms_norm-H576", "--repeats", "1"]
    result = [row["case"] for row in measured(kernels.main, "kernels", out, *only) if "case" in row]
    assert len(result) == len(set(result)) == 4
    assert result[0].startswith("B1-L1024")
    monkeypatch.setattr(check, "LIMIT", -1.0)
    with pytest.raises(SystemExit):
        measured(kernels.main, "kernels", out, *only, "--group", "wrong")
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


@pytest.mark.parametrize(
    "name", ["layout-B1-K4", "verify-B1-K4-tree", "rms_norm-H576-T1", "kv_move-llama-3.2-1b-B1"]
)
def test_interpreted_kernels_pass_the_check(name: str) -> None:
    """Also with poisoned memory."""
    [case] = cases(name).values()
    result = check.compare(case.build, "cpu", case.kernel, "naive" if "kv_move" in name else "triton")
    assert not check.is_wrong(result, case.kernel), result
