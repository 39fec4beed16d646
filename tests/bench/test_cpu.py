"""The comparison on a CPU without its peers: what is run, in which order, and what is said about it."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from bench import cpu
from bench.peers import plan, system, tables, worker
from bench.peers.plan import SHORT, Task, cases_of, make_groups, make_work
from tests.tiny import checkpoint

PROMPTS = {str(SHORT): [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]}
ADAPTERS = sorted(set(plan.ADAPTERS.values()))


def groups(part: str, batches: list[int], systems: tuple[str, ...] = ("nanospec", "vllm")) -> Any:
    limits = {"nanospec": 64, "vllm": 64, "transformers": 1}
    return make_groups(part, systems, batches, 2, 8, limits.__getitem__)


def ran(outputs: list[list[int]], seconds: float, **more: Any) -> dict[str, Any]:
    return {"outputs": outputs, "seconds": seconds, "peak_mb": 1.0, "waves": 1, **more}


# ---- what is run ---------------------------------------------------------------------------------


def test_groups_hold_what_is_compared() -> None:
    found = groups("short", [1, 4], ("nanospec", "vllm", "transformers"))
    names = [[(task.label, task.case["batch"]) for task in group] for group in found]
    assert names == [
        [("nanospec plain", 1), ("vllm plain", 1), ("transformers plain", 1)],
        [("nanospec n-gram", 1), ("vllm n-gram", 1), ("transformers n-gram", 1)],
        [("nanospec plain", 4), ("vllm plain", 4)],
        [("nanospec n-gram", 4), ("vllm n-gram", 4)],
    ]
    assert all(task.case["waves"] * task.case["batch"] >= 2 for group in found for task in group)


@pytest.mark.parametrize("part", [part for part in plan.PARTS if part != "starts"])
def test_every_part_has_cases(part: str) -> None:
    tasks = [task for group in groups(part, [1, 64]) for task in group]
    names = {(task.label, task.case["name"]) for task in tasks}
    assert len(names) == len(tasks) > 0
    assert part != "long" or {task.case["batch"] for task in tasks} == {1}


def test_work_survives_its_file(tmp_path: Path) -> None:
    cases = cases_of(groups("sampled", [1, 4]), "vllm")
    assert len(cases) == 2  # one of each batch size, with guessing and without
    work = make_work(cases, {**PROMPTS, "4000": [[1] * 4000]}, model="a folder", guess=None)
    (tmp_path / "work.json").write_text(json.dumps(work))
    assert json.loads((tmp_path / "work.json").read_text()) == work
    assert list(work["prompts"]) == [str(SHORT)]  # no case asks for the long ones
    assert work["max_num_seqs"] == 4
    assert work["max_model_len"] >= 8 + 8
    assert work["cache_tokens"] >= 4 * (8 + 8)


def test_waves_begin_again() -> None:
    assert worker.make_waves([[1], [2], [3]], 2, 2) == [[[1], [2]], [[3], [1]]]


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_import_only_what_they_measure(name: str) -> None:
    """And that only when they start, as their environment may have nothing else."""
    tree = ast.parse((Path(worker.__file__).parent / f"{name}.py").read_text())
    known = {"__future__", "collections.abc", "json", "os", "pathlib", "typing"}
    assert {node.module for node in tree.body if isinstance(node, ast.ImportFrom)} <= known
    assert {n.name for node in tree.body if isinstance(node, ast.Import) for n in node.names} <= known
    adapter = worker.load(name)
    assert adapter.PACKAGES
    assert adapter.GUESSES
    assert adapter.LARGEST_BATCH >= 1
    assert all(isinstance(v, str) for v in adapter.environment(Path(sys.executable), [0, 1]).values())


# ---- what is said --------------------------------------------------------------------------------


def test_rates() -> None:
    run = ran([[1, 2, 3], [4]], 2.0, first_seconds=0.5)
    assert tables.rate(run) == 2
    assert tables.decode_rate(run) == pytest.approx(2 / 1.5)
    assert tables.decode_rate(ran([[1]], 2.0)) is None


def test_equal_outputs_are_counted() -> None:
    assert tables.equal([[1, 2], [3], []], [[1, 2], [4], []]) == 2
    with pytest.raises(ValueError):
        tables.equal([[1]], [])


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is half as fast in the second round changes no ratio."""
    rounds: list[tables.Round] = []
    for slowness in (1, 2):
        rounds.append({
            ("nanospec plain", "a"): ran([[1, 2]], 1.0 * slowness),
            ("nanospec n-gram", "a"): ran([[1, 2]], 0.5 * slowness, guess="auto"),
            ("vllm plain", "a"): ran([[1, 3]], 2.0 * slowness),
            ("vllm n-gram", "a"): ran([[1, 2]], 2.0 * slowness, guess=(4, 1, 8)),
        })  # fmt: skip
    found = {(row["system"], row["way"]): row for row in tables.rows(rounds)}
    assert found["vllm", "plain"]["nanospec_ratio"] == {"median": 2, "min": 2, "max": 2}
    assert found["vllm", "n-gram"]["nanospec_ratio"]["median"] == 4
    assert found["vllm", "n-gram"]["equal_to_plain"] == [0, 1]
    assert found["nanospec", "n-gram"]["equal_to_plain"] == [1, 1]
    assert found["nanospec", "n-gram"]["plain_ratio"]["max"] == 2
    lines = tables.markdown(list(found.values())).splitlines()
    assert lines[2] == "| plain, a | 2 | 1 | 2.00 (2.00–2.00) |"
    assert lines[3] == "| n-gram, a | 3, equal 1 of 1 | 1 (K = 4, 1–8), equal 0 of 1 | 4.00 (4.00–4.00) |"


def test_bandwidth_is_of_the_same_round() -> None:
    def at(seconds: float, rate: float) -> dict[str, Any]:
        return ran([[1, 2, 3]], 1.0 + seconds, first_seconds=1.0, read_rate=rate)

    [row] = tables.rows([{("nanospec plain", "a"): at(s, r)} for s, r in ((1.0, 40.0), (2.0, 20.0))], 10)
    assert row["bandwidth_share"] == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_best_guess_is_found_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is a guess too, and what is best for no case has no process."""
    some = tuple(guess for guess in system.adapter("vllm").GUESSES if guess)
    seconds = {(some[1], 1): 1.0, (None, 4): 1.0}
    race, order = cpu.Race(groups("short", [1, 4]), PROMPTS, {}, fresh=False), []

    class Closable:
        def close(self) -> None: ...

    def run(lane: cpu.Lane, task: Task) -> dict[str, Any]:
        race._running[lane] = Closable()  # type: ignore[assignment]
        order.append((*lane, task.case["batch"]))
        return ran([[1]], seconds.get((lane[1], task.case["batch"]), 2.0), guess=lane[1])

    monkeypatch.setattr(race, "_run", run)
    race.choose()
    assert set(race._running) == {("vllm", None), ("vllm", some[1])}
    assert race.tried["vllm B=4, 200"]["K = 0"] == 1
    del order[:]
    race.round(0)
    race.round(1)
    first, second = order[:8], order[8:]
    assert first[:4] == [
        ("nanospec", None, 1), ("vllm", None, 1), ("nanospec", "auto", 1), ("vllm", some[1], 1)
    ]  # fmt: skip
    assert first[6:] == [("nanospec", "auto", 4), ("vllm", None, 4)]
    assert second[:2] == [("vllm", None, 1), ("nanospec", None, 1)]
    assert sorted(map(str, first)) == sorted(map(str, second))


def test_parts_replace_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(part: str, args: Any) -> dict[str, Any]:
        return {"table": tables.rows([{("nanospec plain", part): ran([[1]], 1.0)}])}

    monkeypatch.setattr(cpu, "measure", run)
    for parts in (["short", "long"], ["long"]):
        monkeypatch.setattr(sys, "argv", ["cpu.py", "--out", str(tmp_path), "--peers", "--parts", *parts])
        cpu.main()
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert list(found) == ["short", "long"]
    assert [row["case"] for row in tables.all_rows(found)] == ["short", "long"]


def test_a_peer_that_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--out", str(tmp_path), "--peers", "transformers"])
    with pytest.raises(SystemExit, match="`make peers PEER=hf` installs transformers"):
        cpu.main()
    assert not list(tmp_path.iterdir())


# ---- our own adapter, in a process ---------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = checkpoint(tmp_path / "tiny", "llama", vocab_size=64, max_position_embeddings=1024)
    words = {f"<{i}>": i for i in range(64)}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    return folder


def test_our_process_does_what_it_is_told(model: Path) -> None:
    cases, outputs = cases_of(groups("short", [1, 2], ("nanospec",)), "nanospec"), []
    for guess in (None, "auto"):
        work = make_work(cases, PROMPTS, model=str(model), gguf=None, guess=guess, dtype="float32")
        process = system.System("nanospec", work)
        names = [case["name"] for case in cases]
        result = process.run(names)
        process.close()
        assert list(result["runs"]) == names
        assert all(run["seconds"] > 0 for run in result["runs"].values())
        assert result["first_answer_seconds"] >= result["start_seconds"] > 0
        assert result["peak_mb"] > 50
        assert result["notes"]["stage_ms"]["forward"] > 0
        outputs.append({name: result["runs"][name]["outputs"] for name in names})
    assert outputs[0] == outputs[1]
    assert [len(found) for found in outputs[0].values()] == [2, 2]


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    work = make_work([], PROMPTS, model=str(tmp_path / "nothing"), gguf=None, guess=None)
    with pytest.raises(RuntimeError, match="nothing"):
        system.System("nanospec", work)
