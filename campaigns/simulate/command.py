"""The command line of the simulation.

python -m campaigns.simulate --seeds 1000            seeds 0 to 999
python -m campaigns.simulate --seeds 5000:6000       seeds 5000 to 5999
python -m campaigns.simulate --replay FILE           replay a failed scenario
python -m campaigns.simulate --seeds 20 --as triton  short requests with Triton kernels, interpreted
python -m campaigns.simulate --seeds 20 --as http    requests to a server
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from campaigns.simulate.driver import simulate
from campaigns.simulate.limit import within
from campaigns.simulate.scenario import Scenario
from campaigns.simulate.shrink import failure, place_of, shrink
from nanospec.kernels import launch
from tests.interpreted import order_programs_by

AT_ONCE = 25  # seeds per task of a process
SECONDS = 120.0  # time limit per seed; most take less than a second


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.simulate", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=_seeds, default="100", metavar="N|A:B", help="number of seeds, or a range"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    parser.add_argument("--as", dest="way", choices=("engine", "triton", "http"), default="engine")
    parser.add_argument("--replay", type=_scenario, metavar="FILE", help="run the scenario in a file")
    args = parser.parse_args(argv)
    try:
        return _replay(args.replay, args.way) if args.replay else _simulate(args.seeds, args.way, args.jobs)
    except KeyboardInterrupt:
        return 130


def _seeds(text: str) -> range:
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    seeds = range(int(found[1] or 0), int(found[2])) if found else range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(f"expected N or A:B with A < B, got {text!r}")
    return seeds


def _scenario(path: str) -> Scenario:
    try:
        return Scenario.from_json(Path(path).read_text())
    except (OSError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{path} is not a valid scenario: {error}") from None


def _replay(scenario: Scenario, way: str) -> int:
    _run(scenario, way)
    print("Passed.")
    return 0


def _simulate(seeds: range, way: str, jobs: int) -> int:
    """Run seeds in parallel processes until one fails."""
    parts = [seeds[i : i + AT_ONCE] for i in range(0, len(seeds), AT_ONCE)]
    seen: Counter[str] = Counter()
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        for done, (part, failed) in enumerate(pool.map(partial(_run_all, way), parts), 1):
            seen += part
            for seed, error in failed:
                pool.shutdown(wait=False, cancel_futures=True)
                return tell(seed, way, error)
            if sys.stderr.isatty():
                print(f"\r{done * AT_ONCE} seeds", end="", file=sys.stderr)
    took = time.perf_counter() - start
    print(f"{len(seeds)} seeds in {took:.0f} s: " + ", ".join(f"{n:,} {what}" for what, n in seen.items()))
    return 0


def scenario_of(seed: int, way: str) -> Scenario:
    """Return the scenario of a seed; for Triton's interpreter, reduced to few and short requests."""
    scenario = Scenario.drawn(seed, text=way == "http")
    if way == "triton":
        scenario.jobs = scenario.jobs[:3]
        scenario.faults = [fault for fault in scenario.faults if fault.get("job", 0) < len(scenario.jobs)]
        for job in scenario.jobs:
            most = job["params"]["max_tokens"] = min(job["params"]["max_tokens"] or 6, 6)
            job["params"]["min_tokens"] = min(job["params"].get("min_tokens", 0), most)
    return scenario


def _run(scenario: Scenario, way: str) -> Counter[str]:
    order_programs_by(str(scenario.seed))
    if way == "http":
        from campaigns.simulate.served import simulate_served

        return simulate_served(scenario)
    with launch.forced("triton" if way == "triton" else "auto"):
        return simulate(scenario)


def _run_all(way: str, seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run seeds until one fails. Return the counts of events, and the failed seed with its traceback."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            with within(SECONDS):
                seen += _run(scenario_of(seed, way), way)
        except BaseException:
            return seen, [(seed, traceback.format_exc())]
    return seen, []


def tell(seed: int, way: str, first: str) -> int:
    """Report a failed seed and save the smallest scenario that fails in the same way. Saves the original
    scenario first, because a failure that depends on the clock may not reproduce."""

    def run(scenario: Scenario) -> None:
        with within(SECONDS):
            _run(scenario, way)

    print(f"Seed {seed} failed:\n{first}Looking for a smaller scenario ...", file=sys.stderr)
    path = Path(f"simulate-{seed}.json")
    path.write_text(scenario_of(seed, way).to_json())
    smaller = shrink(scenario_of(seed, way), run)
    error = failure(smaller, run)
    if error is None:
        print("Not reproducible: the failure depends on the clock or the machine.", file=sys.stderr)
    else:
        path.write_text(smaller.to_json())
        traceback.print_exception(error)
        print(place_of(error), file=sys.stderr)
    print(f"To reproduce: {sys.executable} -m campaigns.simulate --as {way} --replay {path}", file=sys.stderr)
    return 1
