"""CPU comparisons (`bench/cpu.py`, `bench/serve.py`): alternation, ratios within a round, parsing of
answers."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cpu, serve
from bench.peers import worker

CASES = [{"name": f"B={batch}, 200", "batch": batch, "prompts": [[1]] * 4} for batch in (1, 4)]
SPEEDS: dict[tuple[str, Any], float] = {  # tokens per second by system and speculation settings
    ("nanospec", None): 60.0,
    ("nanospec", "auto"): 100.0,
    **{("vllm", setting): 30.0 for setting in worker.SPEC_SETTINGS["vllm"]},
    ("vllm", (4, 1, 8)): 50.0,
    **{("transformers", setting): 10.0 for setting in worker.SPEC_SETTINGS["transformers"]},
}


class FakeRace(cpu.Race):
    """A race without processes. In the second round, an output with speculation differs."""

    def __init__(self) -> None:
        super().__init__("short", CASES, list(dict.fromkeys(system for system, _ in SPEEDS)), {})
        self.turns, self.last = list[str](), 2

    def run(self, lane: cpu.Lane, case: dict[str, Any]) -> dict[str, Any]:
        self.running.setdefault(lane, self)  # type: ignore[arg-type]
        self.turns.append(lane[0])
        second = self.last if lane[1] else 2
        return {"outputs": [[1] * 10, [second] * 10], "seconds": 20 / SPEEDS[lane]}

    def close(self) -> None:
        """Do nothing, as there is no process."""


def test_peers_use_fastest_settings_and_systems_alternate() -> None:
    race = FakeRace()
    race.choose()
    assert race.best["vllm", "B=4, 200"] == (4, 1, 8)
    assert ("transformers", "B=4, 200") not in race.best  # runs one request at a time
    race.turns.clear()
    rounds = [race.round(0)]
    race.last = 3
    rounds.append(race.round(1))
    assert race.turns[:6] == ["nanospec", "vllm", "transformers"] * 2
    assert race.turns[10:13] == ["vllm", "transformers", "nanospec"]  # B=1 in the second round
    rows = {(row["case"], row["system"], row["way"]): row for row in cpu.table(rounds)}
    row = rows["B=1, 200", "vllm", "n-gram"]
    assert row["setting"] == "K = 4, 1–8"
    assert row["nanospec_ratio"]["median"] == pytest.approx(2.0)
    assert row["plain_ratio"]["median"] == pytest.approx(50 / 30, abs=1e-3)
    assert row["equal_to_plain"] == [1, 2]  # equal in all rounds, of all outputs


def test_worker_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(worker.__file__).read_text())
    names = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).split(".")[0] for name in names} <= sys.stdlib_module_names


def test_arrival_times() -> None:
    assert serve.times("burst:2", 10.0, 5, 0) == [0.0, 0.0, pytest.approx(1 / 3), pytest.approx(1 / 3)]
    at = serve.times("poisson:0.5", 10.0, 2000, 0)
    assert at == sorted(serve.times("poisson:0.5", 10.0, 2000, 0))
    assert at[-1] == pytest.approx(2000 / 5, rel=0.1)


def test_read_answer_from_stream() -> None:
    def event(**fields: Any) -> bytes:
        return b"data: " + json.dumps(fields).encode() + b"\n"

    def piece(**delta: str) -> bytes:
        return event(choices=[{"delta": delta}])

    lines = [
        (0.1, piece(role="assistant")),
        (0.2, piece(content="a")),
        (0.2, b"\n"),
        (0.5, piece(content="b c")),
    ]
    lines += [(0.6, event(choices=[], usage={"completion_tokens": 4})), (0.6, b"data: [DONE]\n")]
    result = serve.read_answer(lines)
    assert result == serve.Answer(None, 0.2, 0.5, 4, "ab c")
    assert result.per_token == pytest.approx(0.1)  # more than `serve.TOKEN`
    assert serve.read_answer(lines[:-1]).error == "the stream ended early"
    assert "in the stream" in str(serve.read_answer([(0.1, event(error={"message": "no"}))]).error)
    row = serve.figures([result, serve.Answer("no answer")], [0.0, 1.0])
    assert (row["failed"], row["goodput"], row["tokens_per_second"]) == (1, 0.0, 8.0)
