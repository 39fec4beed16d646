"""What runs on a GPU alone, on tiny shapes with a stand-in for `torch.cuda`: no line runs there first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import check, e2e, gap, gpu_tests, kernels, rows, smoke, stand_in, steps
from bench.cases import Case, all_cases
from bench.events import kernel_events
from bench.gpu_groups import PARTS
from bench.peers import gpu as peers
from nanospec.engine.engine import Engine

pytestmark = pytest.mark.long

GRID = ["--shape", "tiny", "--batches", "1", "2", "--repeats", "1"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install = stand_in.install
    monkeypatch.setattr(stand_in, "install", lambda: install(monkeypatch.setattr))
    monkeypatch.setenv("NANOSPEC_PDL", "1")
    return tmp_path


def run(main: Any, part: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that a script writes in a dry run."""
    main([*arguments, "--cpu", "--out", str(out)])
    return rows.read(out / f"{part}.jsonl")


def test_smoke(out: Path) -> None:
    for what in ("environment", "equality", "waiting", "once"):
        run(smoke.main, "smoke", out, what)
    found = run(smoke.main, "smoke", out, "speed", "--shape", "tiny", "--repeats", "1")
    assert [row["differing"] for row in found if "differing" in row] == [0] * len(smoke.WAYS)
    assert [row["waits"] for row in found if "waits" in row] == [False] * 6
    assert {(row["k"], row["pdl"]) for row in found if "ms" in row} == {
        (0, True),
        (4, True),
        (0, False),
        (4, False),
    }
    assert stand_in.SYNC_MODES[-2:] == ["error", "default"]
    [memory] = run(smoke.main, "steps", out, "memory", "--shape", "tiny", "--part", "steps")
    assert memory["gib"]["cache"] > 0


def test_smoke_says_where_something_waits(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def refusing(engine: Engine) -> Any:
        if stand_in.SYNC_MODES[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return step(engine)

    monkeypatch.setattr(Engine, "step", refusing)
    monkeypatch.setattr(smoke, "REFUSED", 1)
    with pytest.raises(SystemExit):
        run(smoke.main, "smoke", out, "waiting")
    first = rows.read(out / "smoke.jsonl")[0]
    assert first["waits"]
    assert "synchronizing" in first["text"]


def test_steps_and_their_gap(out: Path) -> None:
    grid = [*GRID, "--contexts", "64", "--ks", "0", "2"]
    found = run(steps.main, "steps", out, *grid)
    assert [(row["batch"], row["k"]) for row in found] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert all(row["ms"] > 0 and row["forward_ms"] > 0 and row["share"] > 0 for row in found)
    assert all((row["propose_ms"] > 0) == (row["k"] > 0) for row in found)
    again = run(steps.main, "steps", out, *grid, "--besides")
    assert again == found
    more = run(steps.main, "steps", out, *grid, "--drafters")
    others = {"draft", "medusa", "ngram tree", "medusa tree"}
    assert {row["drafter"] for row in more} == {"ngram", *others}
    both = run(gap.main, "steps", out, *GRID)[len(more) :]
    assert [row["batch"] for row in both if row["what"] == "gap"] == [1, 2]
    [first, _] = [row for row in both if row["what"] == "trace"]
    assert (first["launches"], first["gap_us"], first["idle_inside_us"]) == (2, 190.0, 10.0)


def test_a_step_that_does_not_fit_is_a_row_and_the_rest_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = steps.make_engine

    def make(model: Any, batch: int, *arguments: Any, **options: Any) -> Any:
        if batch == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return real(model, batch, *arguments, **options)

    monkeypatch.setattr(steps, "make_engine", make)
    first, second = run(steps.main, "steps", out, *GRID, "--contexts", "64", "--ks", "0")
    assert "memory" in first["left_out"]
    assert (second["batch"], second["k"]) == (2, 0)


def test_without_time_everything_is_left_out(out: Path) -> None:
    for main, part, arguments in (
        (steps.main, "steps", [*GRID]),
        (gap.main, "steps", [*GRID]),
        (kernels.main, "kernels", ["--only", "rms_norm-H576"]),
        (e2e.main, "e2e", [*GRID]),
    ):
        before = len(rows.read(out / f"{part}.jsonl"))
        found = run(main, part, out, *arguments, "--until", "1")[before:]
        assert any("left_out" in row for row in found)
        assert not any("ms" in row or "us" in row or "speedup" in row for row in found)


def test_kernels_are_checked_and_timed_once(out: Path) -> None:
    only = ["--only", "ngram-B1-L1024", "rms_norm-H576-T1$", "rms_norm-H576", "--repeats", "1"]
    found = run(kernels.main, "kernels", out, *only)
    cases = [row["case"] for row in found if "case" in row]
    assert len(cases) == len(set(cases)) == 4
    assert cases[0].startswith("B1-L1024")
    assert all(row["error"] < 1e-2 and row["differing"] == 0 for row in found if "case" in row)
    again = run(kernels.main, "kernels", out, *only, "--besides")
    assert [row["case"] for row in again if "case" in row] == cases


def cases(*names: str) -> dict[str, Case]:
    return {name: case for case in all_cases() if (name := f"{case.kernel}-{case.label}") in names}


def test_the_check_finds_what_is_wrong() -> None:
    """A result that is off, one that was not written, and an argument that was changed by one side only."""
    x = torch.randn(3, 64, dtype=torch.bfloat16)

    def off() -> torch.Tensor:
        return x + 1 if x.dtype == torch.bfloat16 else x

    def unwritten() -> torch.Tensor:
        return torch.empty_like(x) if x.dtype == torch.bfloat16 else x

    def changed() -> None:
        if x.dtype == torch.bfloat16:
            x.add_(1)

    assert check.compare(lambda: x * 2) == {"error": pytest.approx(0, abs=1e-2), "differing": 0}
    for wrong in (off, unwritten, changed):
        assert check.is_wrong(check.compare(wrong), "any"), wrong.__name__
    assert math.isnan(check.compare(unwritten)["error"])
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", ["layout-B1-K4", "verify-B1-K4-tree", "rms_norm-H576-T1"])
def test_kernels_in_the_interpreter_pass_the_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is poisoned, too."""
    monkeypatch.setattr(check, "_on_gpu", lambda done: True)
    [case] = cases(name).values()
    found = check.compare(case.build("cpu").run, case.kernel)
    assert not check.is_wrong(found, case.kernel), found


def test_the_check_sees_arguments_that_a_kernel_writes() -> None:
    [case] = cases("kv_move-llama-3.2-1b-B1").values()
    run = case.build("cpu").run
    before = [cell.cell_contents for cell in run.__closure__ or ()]
    assert check.compare(run) == {"error": 0, "differing": 0}
    assert all(a is b.cell_contents for a, b in zip(before, run.__closure__ or ()))


def test_peers(out: Path) -> None:
    found = run(peers.main, "peers", out, "plain", "--shape", "tiny", "--repeats", "1")
    assert {row["peer"] for row in found} == {"torch graph", "torch compiled"}
    found = run(peers.main, "peers", out, "attention")
    assert found[-1]["missing"] == "FA3"


def test_a_peer_for_attention(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        assert set(given) == {"cache_seqlens", "causal"}
        return q

    small = cases("attention-smollm2-135m-B8-q5-L4096")
    monkeypatch.setattr(peers, "fa3", lambda: ("a wheel", attend))
    monkeypatch.setattr(peers, "all_cases", lambda: [_named(case) for case in small.values()])
    [row] = run(peers.main, "peers", out, "attention", "--repeats", "1")
    assert set(row["us"]) == {"ours", "FA3"}


def _named(case: Case) -> Case:
    case.label = "qwen3-0.6b-B1-q5-L1024"
    return case


def test_transformers(out: Path) -> None:
    found = run(peers.main, "peers", out, "transformers", "--shape", "tiny")
    assert [row["peer"] for row in found] == [f"transformers {way}" for way in peers.WAYS]
    assert all(row["ms"] > 0 for row in found)


def test_plain_pytorch_computes_what_the_model_does_by_position() -> None:
    """Scoring two tokens at once gives what scoring them one by one gives."""
    from bench import tiny
    from bench.plain import PlainModel
    from nanospec.models.config import ModelConfig

    model = PlainModel(ModelConfig.from_dict(tiny.SHAPE), 2, 32, torch.device("cpu"), torch.float32)
    ids = torch.tensor([[5, 6], [7, 8]])
    together = model.step(ids, torch.tensor([20, 21]))
    alone = [model.step(ids[:, i : i + 1], torch.tensor([20 + i])) for i in range(2)]
    assert torch.equal(together, torch.cat(alone, 1))


def test_e2e(out: Path) -> None:
    found = run(e2e.main, "e2e", out, *GRID, "--max-tokens", "6", "--seconds", "0.1")
    assert found[0]["missing"] == "texts"
    systems = [row for row in found if "system" in row]
    assert len(systems) == 3 * 2 * len(e2e.SYSTEMS)
    assert all(row["simulated"].startswith("synthetic") for row in systems)


def test_files_of_tests_run_to_their_end_whatever_happens(out: Path, tmp_path: Path) -> None:
    path = tmp_path / "test_bad.py"
    path.write_text(
        "import os, time\ndef test_a(): pass\ndef test_b(): assert 1 == 2\n"
        "def test_c(): os.abort()\ndef test_d(): pass\ndef test_e(): time.sleep(60)\n"
    )
    with pytest.raises(SystemExit):
        run(gpu_tests.main, "tests", out, str(path), "--each", "2")
    found = {row["test"].split("::")[1]: row for row in rows.read(out / "tests.jsonl") if "test" in row}
    passed = [name for name, row in found.items() if row["outcome"] == "passed"]
    assert (len(found), passed) == (5, ["test_a", "test_d"])
    assert "SIGABRT" in found["test_c"]["why"]
    assert found["test_e"]["why"] == "over 2 s"


def test_traces_are_read_in_order() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 5, "dur": 1.5, "args": {"correlation": 7}},
        {"ph": "X", "cat": "cpu_op", "name": "no", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": "2.5", "dur": "1", "args": {}},
    ]
    found = kernel_events({"traceEvents": events})
    assert [(event["name"], event["end"], event["launch"]) for event in found] == [
        ("a", 3.5, None),
        ("b", 6.5, 7),
    ]


def test_every_stand_in_is_called_as_torch_has_it() -> None:
    """The groups of a dry run are those of a real one, as far as scripts go."""
    for part, groups in PARTS.items():
        real = {group.command[0] for group in groups(False)} - {"bench/compile.py"}
        assert {group.command[0] for group in groups(True)} == real, part
