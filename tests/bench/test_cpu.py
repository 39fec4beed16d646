"""CPU comparisons (`bench/cpu.py`): alternation, and ratios in a round."""

from typing import Any

import pytest

from bench import cpu
from bench.peers import worker

CASES = [{"name": f"B={batch}, 200", "batch": batch, "prompts": [[1]] * 4} for batch in (1, 4)]
SPEEDS: dict[tuple[str, Any], float] = {  # tokens per second by system and speculation settings
    ("nanospec", None): 60.0,
    ("nanospec", "auto"): 100.0,
    **{("vllm", setting): 30.0 for setting in worker.SPEC_SETTINGS["vllm"]},
    ("vllm", (4, 1, 8)): 50.0,
}


class FakeRace(cpu.Race):
    """A race without processes. In the second round, an output with speculation differs."""

    def __init__(self) -> None:
        super().__init__("short", CASES, ["nanospec", "vllm"], {})
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
    race.turns.clear()
    rounds = [race.round(0)]
    race.last = 3
    rounds.append(race.round(1))
    assert race.turns[:4] == ["nanospec", "vllm"] * 2
    assert race.turns[8:10] == ["vllm", "nanospec"]  # the second round
    rows = {(row["case"], row["system"], row["way"]): row for row in cpu.table(rounds)}
    row = rows["B=1, 200", "vllm", "n-gram"]
    assert row["nanospec_ratio"]["median"] == pytest.approx(2.0)
    assert row["plain_ratio"]["median"] == pytest.approx(50 / 30, abs=1e-3)
    assert row["equal_to_plain"] == [1, 2]  # equal in all rounds, of all outputs
