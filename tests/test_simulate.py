"""The simulation of `campaigns/simulate` finds planted defects and is reproducible; the engine passes it."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from campaigns.simulate.command import report_failure, scenario_of
from campaigns.simulate.defects import DEFECTS
from campaigns.simulate.driver import Simulation, simulate
from campaigns.simulate.limit import TooLong, within
from campaigns.simulate.scenario import Scenario
from campaigns.simulate.served import simulate_served
from campaigns.simulate.shrink import failure, place_of, shrink
from nanospec.apps import openai_format
from nanospec.apps.serve import completions
from nanospec.engine.engine import Engine

NUM_SEEDS = 300
QUICK = (1, 4, 5, 9, 14, 18, 23, 28, 67)  # seeds that cover all features
CHUNKS = 10
# Seeds of small scenarios
FOUND_BY = {
    "reallocated block keeps its hash": 0, "one block too many counts as cached": 0,
    "block is registered too early": 0, "no slots for queued steps": 3, "last draft is not verified": 1,
    "accepted tree nodes are not moved": 59, "stop string across tokens is missed": 28,
    "outputs are aborted without cause": 1,
    "interrupted step aborts no requests": 6, "min_tokens is off by one": 4, "held-back text is lost": 6,
    "prefix cache never hits": 2, "no drafts after preemption": 116, "last request is admitted first": 2,
    "end of stream is lost": 1, "salts are ignored": 0,
    "preempted request counts its own blocks as cached": 4,
    "decoding request is preempted": 0, "released blocks are lost": 0,
}  # fmt: skip


@pytest.mark.slow
def test_seeds_pass_and_cover_their_features() -> None:
    seen: Counter[str] = Counter()
    for seed in QUICK:
        seen += simulate(Scenario.from_seed(seed))
    kinds = "preemptions cached_tokens aborted accepted stopped_by_string guided failed_grammars inexact"
    more = "async_scheduling captured threaded interrupt error abort memory nan panic clock"
    assert not {*kinds.split(), *more.split()} - seen.keys()
    assert seen["drafted"] > seen["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_more_seeds_pass(chunk: int) -> None:
    for seed in {*range(chunk, NUM_SEEDS, CHUNKS)} - {*QUICK}:
        error = failure(Scenario.from_seed(seed), simulate)
        if error is not None:
            raise AssertionError(
                f"Seed {seed} failed: python -m campaigns.simulate --seeds {seed}:{seed + 1}"
            ) from error


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defect_is_found(defect: str) -> None:
    """Without the defect, the seed passes in the tests above."""
    seed = FOUND_BY[defect]
    assert seed < NUM_SEEDS
    with DEFECTS[defect]():
        assert failure(Scenario.from_seed(seed), simulate) is not None


def test_seed_is_reproducible() -> None:
    runs = []
    for _ in range(2):  # with threads and faults
        simulation = Simulation(Scenario.from_json(Scenario.from_seed(12).to_json()))
        seen = simulation.run()
        requests = simulation.requests.items()
        runs.append((seen, simulation.clock.now, [(i, r.output_ids, r.draft_sources) for i, r in requests]))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_shrunk_scenario_fails_in_the_same_place() -> None:
    scenario = Scenario.from_seed(4)
    with DEFECTS["block is registered too early"]():
        result = failure(scenario, simulate)
        assert result is not None
        smaller = shrink(scenario, simulate, tries=60)
        again = failure(smaller, simulate)
        assert again is not None
    assert place_of(again) == place_of(result)
    assert len(smaller.jobs) == 1 < len(scenario.jobs)
    assert not smaller.faults
    assert smaller.threads == 0


def test_flaky_failure_is_reported_and_saved(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert report_failure(5, "engine", "AssertionError: once\n") == 1
    message = capsys.readouterr().err
    assert "Seed 5 failed:\nAssertionError: once\n" in message
    assert message.endswith("-m campaigns.simulate --as engine --replay simulate-5.json  (or --seeds 5:6)\n")
    assert Scenario.from_json(Path("simulate-5.json").read_text()) == Scenario.from_seed(5)


@pytest.mark.slow
def test_replay_with_triton_in_subprocess(tmp_path: Path) -> None:
    path, environment = tmp_path / "small.json", {**os.environ, "PYTHONPATH": "."}
    environment.pop("TRITON_INTERPRET", None)
    path.write_text(scenario_of(1, "triton").to_json())
    command = [sys.executable, "-m", "campaigns.simulate", "--as", "triton", "--replay", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Passed.\n"), done.stderr


def test_endless_scenario_fails() -> None:
    def step(engine: Engine) -> None:
        while True:
            pass

    ends = pytest.raises(TooLong, match=r"Not finished after 0\.3 s")
    with mock.patch.object(Engine, "step", step), ends, within(0.3):
        simulate(Scenario.from_seed(5))


def test_server_passes() -> None:
    for seed in (21, 36):
        assert simulate_served(scenario_of(seed, "http"))["tokens"]


def test_lost_server_logprob_is_found() -> None:
    def shorter(*args: Any) -> dict[str, Any] | None:
        result = logprobs(*args)
        return result and {name: values[:-1] for name, values in result.items()}

    logprobs = openai_format.logprobs
    patches = [mock.patch.object(m, "logprobs", shorter) for m in (openai_format, completions)]
    with patches[0], patches[1]:
        assert failure(scenario_of(1, "http"), simulate_served) is not None
