"""`bench/gpu.py`: a group that breaks is lost alone, time is kept, rows outlive a killed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from bench import gpu, rows
from bench.gpu import Outcome
from bench.gpu_groups import LIMITS, PARTS, Group

WRITER = """
import json, os, sys, time
out, until = sys.argv[sys.argv.index("--out") + 1], float(sys.argv[sys.argv.index("--until") + 1])
def row(text, **figures):
    with open(out + "/part.jsonl", "a") as file:
        file.write(json.dumps({"group": "a", "text": text, **figures}) + "\\n")
row("first", headline=True)
"""


def code(text: str, limit: float = 30.0, name: str = "a") -> Group:
    return Group(name, ("-c", WRITER + text), limit)


def run(groups: list[Group], out: Path, limit: float = 60.0) -> list[Outcome]:
    outcomes: list[Outcome] = []
    gpu.run_part("part", groups, limit, out, outcomes)
    return outcomes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    monkeypatch.setattr(gpu, "LEAST", 1.0)


def test_what_breaks_a_group_does_not_reach_the_next(tmp_path: Path) -> None:
    groups = [
        code("os.abort()", name="aborts"),
        code("raise SystemExit('a sentence')", name="says"),
        code("1 / 0", name="raises"),
        Group("no such file", ("nowhere.py",)),
        code("row('second', left_out='the rest')", name="good"),
    ]
    outcomes = run(groups, tmp_path)
    assert [o.status for o in outcomes] == ["crashed", "failed", "failed", "failed", "ok"]
    assert "SIGABRT" in outcomes[0].why
    assert outcomes[1].why == "a sentence"
    assert "ZeroDivisionError" in outcomes[2].why
    assert "nowhere.py" in outcomes[3].why
    found = rows.read(tmp_path / "part.jsonl")
    assert [row["text"] for row in found].count("first") == 4
    text = gpu.summary({"part": outcomes})
    assert "1 of 5 groups well" in text
    assert "aborts: CRASHED" in text
    assert "left out: the rest" in text
    assert json.loads(gpu.as_json({"part": outcomes}, tmp_path))["wrong"] == 4
    assert "==== raises" in (tmp_path / "part.log").read_text()


def test_a_group_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    text = "import subprocess; child = subprocess.Popen(['sleep', '60']); row(str(child.pid)); time.sleep(60)"
    start = time.time()
    [outcome] = run([code(text, 10.0)], tmp_path)
    assert time.time() - start < 40
    assert (outcome.status, outcome.why) == ("stopped", "over its time")
    assert outcome.rows[0]["text"] == "first"
    stat = Path(f"/proc/{outcome.rows[1]['text']}/stat")
    for _ in range(50):
        if not stat.is_file() or " Z " in stat.read_text():  # ended; whether it was reaped is not ours
            return
        time.sleep(0.1)
    raise AssertionError("the child lives on")


def test_a_group_knows_when_to_stop_and_a_part_ends_in_time(tmp_path: Path) -> None:
    wait = "time.sleep(max(until - time.time(), 0)); row('stopped by itself')"
    start = time.time()
    outcomes = run([code(wait, 30.0), code(wait, 30.0, "late")], tmp_path, limit=8.0)
    assert 7 < time.time() - start < 28
    assert [o.status for o in outcomes] == ["ok", "left out"]
    assert outcomes[0].rows[-1]["text"] == "stopped by itself"
    assert "late: LEFT OUT no time" in gpu.summary({"part": outcomes})


def test_a_run_that_is_ended_keeps_its_rows_and_says_what_it_had(tmp_path: Path) -> None:
    driver = f"""
import sys, signal
from pathlib import Path
from bench import gpu
from bench.gpu_groups import Group
group = Group("a", ("-c", {WRITER + "time.sleep(60)"!r}))
gpu.PARTS, gpu.LIMITS = {{"smoke": lambda cpu: [group]}}, {{"smoke": 60}}
gpu.main(["smoke", "--cpu", "--out", {str(tmp_path)!r}])
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
    assert json.loads(output.splitlines()[-1])["parts"] == {"smoke": {}}
    assert rows.read(tmp_path / "part.jsonl")[0]["text"] == "first"


def test_the_summary_is_short_and_shows_every_part() -> None:
    row = {"text": "x" * 150, "headline": True}
    found = {part: [Outcome("a", "ok", 1.0, rows=[row] * 200)] for part in PARTS}
    text = gpu.summary(found)
    assert len(text) < gpu.SUMMARY + 200
    assert all(f"== {part}: 1 of 1 groups well" in text for part in PARTS)
    assert text.count("more lines in the files") == len(PARTS)


def test_wrong_results_come_first_in_the_summary() -> None:
    good, bad = ({"text": text, "headline": True} for text in ("good", "bad"))
    outcomes = [Outcome("a", "ok", rows=[good]), Outcome("b", "failed", rows=[good, {**bad, "wrong": True}])]
    shown = [line.strip() for line in gpu.summary({"kernels": outcomes}).splitlines()]
    assert shown[-3:] == ["bad", "good", "good"]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"cannot write to .*file/below: Not a directory"):
        gpu.main(["smoke", "--cpu", "--out", str(tmp_path / "file" / "below")])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("part", "lacks"), [("smoke", ["torch", "tokenizers"]), ("tests", ["pytest"])], ids=["any", "tests"]
)
def test_what_is_not_installed_is_named_at_the_start(part: str, lacks: list[str], tmp_path: Path) -> None:
    script = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({lacks}))  # as if they were not there
sys.argv = ["gpu.py", {part!r}, "--cpu", "--out", {str(tmp_path)!r}]
runpy.run_path({str(gpu.ROOT / "bench" / "gpu.py")!r}, run_name="__main__")
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"bench/gpu.py needs {', '.join(lacks)}, which ")


def test_rows_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows.write(path, {"text": "whole"})
    path.write_text(path.read_text() + '{"text": "cu')
    assert rows.read(path) == [{"text": "whole"}]


@pytest.mark.parametrize("cpu", [False, True], ids=["gpu", "dry"])
def test_parts_fit_a_call_and_name_scripts_that_exist(cpu: bool) -> None:
    assert set(LIMITS) == set(PARTS)
    assert all(limit < 540 for limit in LIMITS.values())
    for part, groups in PARTS.items():
        names = [group.name for group in groups(cpu)]
        assert len(names) == len(set(names)), part
        assert all((gpu.ROOT / group.command[0]).is_file() for group in groups(cpu))


def test_pack_takes_texts_and_tokenizer_alone(tmp_path: Path) -> None:
    model, data, carry = tmp_path / "model", tmp_path / "data", tmp_path / "carry"
    model.mkdir()
    data.mkdir()
    for path in (model / "tokenizer.json", model / "model.safetensors", data / "a.jsonl", data / "README.md"):
        path.write_text("x")
    wheel = tmp_path / "peer-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer.py", "x = 1")
    found = gpu.pack(model, data, [wheel], carry)
    assert found["carry_bytes"] > 0
    packed = sorted(str(path.relative_to(carry)) for path in carry.rglob("*") if path.is_file())
    assert packed == ["commit", "data/a.jsonl", "tokenizer/tokenizer.json", f"wheels/{wheel.name}"]
    [folder] = gpu.unpacked(carry)
    assert (Path(folder) / "peer.py").read_text() == "x = 1"
    (data / "a.jsonl").unlink()
    with pytest.raises(SystemExit, match="no texts"):
        gpu.pack(model, data, carry=carry)
