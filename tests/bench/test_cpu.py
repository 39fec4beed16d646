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


def groups(kinds: list[str], batches: list[int], systems: tuple[str, ...] = ("nanospec", "vllm")) -> Any:
    limits = {"nanospec": 64, "vllm": 64, "transformers": 1}
    return make_groups(kinds, systems, batches, [SHORT], 2, 8, limits.__getitem__)


def ran(outputs: list[list[int]], seconds: float, **more: Any) -> dict[str, Any]:
    return {"outputs": outputs, "seconds": seconds, "peak_mb": 1.0, "waves": 1, **more}


# ---- what is run ---------------------------------------------------------------------------------


def test_groups_hold_what_is_compared() -> None:
    found = groups(["plain", "ngram"], [1, 4], ("nanospec", "vllm", "transformers"))
    names = [[(task.label, task.case["batch"]) for task in group] for group in found]
    assert names == [
        [("nanospec plain", 1), ("vllm plain", 1), ("transformers plain", 1)],
        [("nanospec n-gram", 1), ("vllm n-gram", 1), ("transformers n-gram", 1)],
        [("nanospec plain", 4), ("vllm plain", 4)],
        [("nanospec n-gram", 4), ("vllm n-gram", 4)],
    ]
    assert all(task.case["waves"] * task.case["batch"] >= 2 for group in found for task in group)


def test_every_kind_is_run_by_someone() -> None:
    for kind in plan.KINDS:
        assert groups([kind], [1]), kind


def test_work_survives_its_file(tmp_path: Path) -> None:
    cases = cases_of(groups(["plain", "sampled"], [1, 4]), ("vllm", False))
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
            ("vllm n-gram", "a"): ran([[1, 2]], 2.0 * slowness, guess=4),
        })  # fmt: skip
    found = {(row["system"], row["way"]): row for row in tables.rows(rounds)}
    assert found["vllm", "plain"]["nanospec_ratio"] == {"median": 2, "min": 2, "max": 2}
    assert found["vllm", "n-gram"]["nanospec_ratio"]["median"] == 4
    assert found["vllm", "n-gram"]["equal_to_plain"] == [0, 1]
    assert found["nanospec", "n-gram"]["equal_to_plain"] == [1, 1]
    assert found["nanospec", "n-gram"]["plain_ratio"]["max"] == 2
    lines = tables.markdown(list(found.values())).splitlines()
    assert lines[2] == "| plain, a | 2 | 1 | 2.00 (2.00–2.00) |"
    assert lines[3] == "| n-gram, a | 3, equal 1 of 1 | 1 (K = 4), equal 0 of 1 | 4.00 (4.00–4.00) |"


def test_policy_is_held_against_no_guessing() -> None:
    pair = plan.policy_tasks(4, 1, 8)
    taken = dict(zip((task.case["name"] for task in pair), (2.0, 1.0)))
    rounds = [{("nanospec n-gram", name): ran([[1], [2]], seconds) for name, seconds in taken.items()}]
    [row] = tables.policy_rows(rounds)
    assert (row["batch"], row["ratio"]["median"], row["equal"]) == (4, 2, [2, 2])


def test_best_guess_is_found_case_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    race = cpu.Race(groups(["plain", "ngram"], [1, 4]), PROMPTS, {}, fresh=False)
    seconds = {(2, 1): 3.0, (4, 1): 1.0, (8, 1): 2.0, (2, 4): 1.0, (4, 4): 2.0, (8, 4): 3.0}
    order: list[tuple[str, Any, int]] = []

    def run(lane: cpu.Lane, task: Task) -> dict[str, Any]:
        order.append((*lane, task.case["batch"]))
        return ran([[1]], seconds.get((lane[1], task.case["batch"]), 1.0), guess=lane[1])

    monkeypatch.setattr(race, "_run", run)
    race.choose()
    del order[:]
    race.round(0)
    race.round(1)
    first, second = order[:8], order[8:]
    assert first[:4] == [("nanospec", None, 1), ("vllm", None, 1), ("nanospec", "auto", 1), ("vllm", 4, 1)]
    assert first[6:] == [("nanospec", "auto", 4), ("vllm", 2, 4)]
    assert second[:2] == [("vllm", None, 1), ("nanospec", None, 1)]
    assert sorted(map(str, first)) == sorted(map(str, second))


# ---- our own adapter, in a process ---------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = checkpoint(tmp_path / "tiny", "llama", vocab_size=64, max_position_embeddings=1024)
    words = {f"<{i}>": i for i in range(64)}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    return folder


def test_our_process_does_what_it_is_told(model: Path) -> None:
    tasks = [groups([kind], [1, 2], ("nanospec",)) for kind in ("plain", "ngram")]
    outputs = []
    for found, guess in zip(tasks, (None, "auto")):
        cases = cases_of(found, ("nanospec", guess is not None))
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
