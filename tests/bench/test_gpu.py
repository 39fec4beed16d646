"""`bench/gpu.py`: groups suit the card, and failing ones do not affect others; and its benchmarks on tiny
shapes with a mock of `torch.cuda`."""

import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import check, e2e, gpu, kernels, rows, stand_in, steps, sweep
from bench.card import GIB, Card
from bench.cases import Built, all_cases
from bench.gpu import Group, Outcome
from nanospec.config import EngineConfig, SpecConfig
from nanospec.device import graphs
from nanospec.drafters import Target
from nanospec.drafters.methods import load_drafters
from nanospec.engine.engine import Engine
from nanospec.kernels import launch
from tests.drive import Job, greedy, run
from tests.kernels.conftest import ordered_dot  # noqa: F401
from tests.no_gpu import TapeCapture
from tests.tiny import tiny_model
from tests.util import eventually

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
AGAIN = "row('x', begins='one')\nif not begun: os.abort()\nrow('y', done=True)"
ENDS = {  # by name: code, status and reason
    "aborts": ("os.abort()", "crashed", "SIGABRT"),
    "raises": ("1 / 0", "failed", "ZeroDivisionError"),
    "good": ("row('second', error='bad', headline=True)", "ok", ""),
    "again": (AGAIN, "crashed", "one:"),
    "hangs": (HANG, "stopped", "time limit"),
    "large": ("1 / 0", "skipped", "9 GiB"),
    "late": ("", "left out", "out of time"),
}


def code(name: str, text: str) -> Group:
    skip = "needs 9 GiB" if name == "large" else ""
    return Group(name, ("-c", WRITER + text), 2.0 if text == HANG else 30.0, skip=skip)


@pytest.mark.slow
def test_groups_do_not_affect_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    outcomes: list[Outcome] = []
    *listed, late = [code(name, text) for name, (text, _, _) in ENDS.items()]
    gpu.run_part("part", listed, 300, tmp_path, outcomes)
    outcomes.append(gpu.run_group(late, "part", tmp_path, time.time()))
    for outcome, (name, (_, status, why)) in zip(outcomes, ENDS.items(), strict=True):
        assert (outcome.name, outcome.status) == (name, status), outcome.why
        assert why in outcome.why
        assert {row["group"] for row in outcome.rows} <= {name}
    again, hangs = outcomes[3:5]
    assert [row["text"] for row in again.rows].count("x") == 2  # continues after the row that ended it
    assert gpu.summary({"part": outcomes}).startswith("== part: 1 of 7 groups ok")
    assert "==== raises" in (tmp_path / "part-raises.log").read_text()
    stat = Path(f"/proc/{hangs.rows[1]['text']}/stat")  # of its child process
    eventually(lambda: not stat.is_file() or " Z " in stat.read_text(), 5)  # ended, possibly not reaped


@pytest.mark.parametrize(
    ("arch", "memory", "largest"),
    [("sm_86", 4.0, "smollm2-135m"), ("sm_86", 7.5, "llama-3.2-1b"), ("sm_89", 23.1, "qwen3-8b"),
     ("sm_121", 79.0, "qwen3-8b")],
)  # fmt: skip
def test_groups_suit_the_card(arch: str, memory: float, largest: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    card = Card("GPU", arch, 80 * GIB, int(memory * GIB), launch.GPUS["sm_86"])
    commands = [group.command for group in gpu.groups("smoke", card)]
    assert [c[c.index("--shape") + 1] for c in commands if "--shape" in c] == [largest] * 2
    for part in ("smoke", *gpu.PARTS):
        found = gpu.groups(part, card)
        assert found[0].name == "compile"
        assert len({group.name for group in found}) == len(found)
        if part in ("steps", "e2e"):
            fitting = {group.command[2] for group in found if group.name != "compile" and not group.skip}
            assert ("qwen3-8b" in fitting, "qwen3-0.6b" in fitting) == (memory > 20, memory > 6)
    assert card.num_test_processes() == max(int(memory / 1.25), 1)
    assert (f"{arch} is not among" in card.lines()[-1]) == (arch == "sm_121")


@pytest.mark.slow
def test_smoke_selects_existing_items() -> None:
    names = [f"{case.kernel}-{case.label}" for case in all_cases()]
    for pattern in (*gpu.SMOKE_CASES.split()[1:], *gpu.COMPARED.split()[3:], *gpu.SMOKE_COMPILED):
        assert any(re.search(pattern, name) for name in names), pattern
    nodes = [f"{gpu.TESTS}/{test}" for test in gpu.SMOKE_TESTS]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *nodes]
    assert f"{len(nodes)} tests collected" in subprocess.check_output(command, cwd=gpu.ROOT, text=True)


GRID = ["--shape", "tiny", "--batches", "1", "2", "1000000", "--repeats", "1"]  # the last one does not fit


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
def test_steps_benchmark_covers_the_grid(out: Path) -> None:
    grid = [*GRID, "--contexts", "64", "--ks", "0", "2"]
    _, *result, skipped = measured(steps.main, "steps", out, *grid)
    assert skipped["left_out"] == "tiny B=1000000, 64 tokens (memory)"
    expected = [(b, k, mode) for b in (1, 2) for k in (0, 2) for mode in steps.MODES]
    assert [(row["batch"], row["k"], row["mode"]) for row in result] == expected
    assert all(row["ms"] > 0 and row["share"] > 0 for row in result)


@pytest.mark.long
def test_e2e_benchmark_covers_all_systems(out: Path) -> None:
    result = measured(e2e.main, "e2e", out, *GRID, "--max-tokens", "6", "--prompt", "48", "--seconds", "0.1")
    systems = [row for row in result if "system" in row]
    assert len(systems) == 2 * 2 * len(e2e.SYSTEMS)
    assert all(row["rate"]["median"] > 0 for row in systems)
    assert [row["left_out"] for row in result if "left_out" in row] == ["tiny B=1000000 (memory)"]
    assert [row["wrong"] for row in result if row.get("accepted")] == [False]  # without speculation: equal


@pytest.mark.slow
def test_kernels_are_checked_and_timed_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = ["--only", "ngram-B1-L1024", "rms_norm-H576-T1$", "rms_norm-H576-T1", "--repeats", "1"]
    result = [row["case"] for row in measured(kernels.main, "kernels", out, *only) if "case" in row]
    assert len(result) == len(set(result)) >= 2
    monkeypatch.setattr(check, "LIMIT", -1.0)
    with pytest.raises(SystemExit):
        measured(kernels.main, "kernels", out, *only[:2], *only[-2:], "--group", "wrong")
    assert any(row.get("wrong") for row in rows.read(out / "kernels.jsonl"))


@pytest.mark.long
@pytest.mark.usefixtures("ordered_dot")
def test_all_tilings_have_equal_bits(out: Path) -> None:
    result = measured(sweep.main, "sweep", out, "--shape", "tiny", "--tokens", "96", "--repeats", "1")
    timed = [row for row in result if "way" in row]
    assert {row["way"] for row in timed if not row["same"]} <= {"cublas"}
    assert len({row["way"] for row in timed}) >= 8  # tilings with and without split K, and wide ones
    assert any("True)" in row["way"] for row in timed)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["off", "unwritten"])
def test_check_detects_defects(wrong: str) -> None:
    builds: list[str] = []

    def build(device: str) -> Built:
        x = torch.randn(3, 64, dtype=torch.bfloat16)
        builds.append(device)
        first = len(builds) == 1
        return Built(lambda: x.clone() if not first else x + 1 if wrong == "off" else torch.empty_like(x))

    result = check.compare(build, "cpu", how="naive")
    assert check.is_wrong(result, "any")
    assert math.isnan(result["error"]) == (wrong == "unwritten")


@pytest.mark.slow
def test_replay_outputs_the_reference_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture freezes host values, as a CUDA graph does, unlike that of the stand-in."""
    monkeypatch.setattr(graphs, "EagerCapture", TapeCapture)
    spec, texts = SpecConfig(num_speculative_tokens=2), {(5, 6, 5): [6, 5, 6, 1], (1, 2): [3, 4, 3, 4]}
    config = EngineConfig(spec=spec, max_num_seqs=2, max_model_len=32, enforce_eager=False)
    with launch.forced("triton"):
        model = tiny_model(num_layers=1)
        worker = e2e.ReplayWorker(config, model, load_drafters(spec, Target(model)), texts)
        requests = run(Engine(config, worker), [Job([*prompt], greedy(4)) for prompt in texts])
    assert [request.output_ids for request in requests] == [*texts.values()]
    assert requests[0].stats.num_accepted > 0
