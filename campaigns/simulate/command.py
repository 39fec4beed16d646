"""Run random scenarios, and shrink the first one that fails.

python -m campaigns.simulate --seeds 1000            seeds 0 to 999
python -m campaigns.simulate --seeds 5000:6000       seeds 5000 to 5999
python -m campaigns.simulate --replay FILE           replay a failed scenario
python -m campaigns.simulate --seeds 20 --as triton  short requests with Triton kernels, interpreted
python -m campaigns.simulate --seeds 20 --as http    requests to a server
"""

from __future__ import annotations

import argparse
import os
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

MODES = ("engine", "triton", "http")
CHUNK_SIZE = 25  # seeds per task of the process pool
TIME_LIMIT = 120.0  # seconds per seed; most take less than a second


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=_seeds, default="100", metavar="N|A:B", help="a number, or a range")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    parser.add_argument("--as", dest="mode", choices=MODES, default=MODES[0], help="what runs the requests")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the scenario in a file")
    args = parser.parse_args(argv)
    if args.replay is None:
        return _simulate(args.seeds, args.mode, args.jobs)
    _run(Scenario.from_json(args.replay.read_text()), args.mode)
    print("Passed.")
    return 0


def _seeds(text: str) -> range:
    first, _, end = text.rpartition(":")
    return range(int(first or 0), int(end))


def _simulate(seeds: range, mode: str, jobs: int) -> int:
    """Run seeds in parallel processes until one fails."""
    chunks = [seeds[i : i + CHUNK_SIZE] for i in range(0, len(seeds), CHUNK_SIZE)]
    seen: Counter[str] = Counter()
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        for counts, failed in pool.map(partial(_run_all, mode), chunks):
            seen += counts
            if failed is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                return report_failure(failed[0], mode, failed[1])
    seconds = time.perf_counter() - start
    print(f"{len(seeds)} seeds in {seconds:.0f} s: " + ", ".join(f"{n:,} {name}" for name, n in seen.items()))
    return 0


def scenario_of(seed: int, mode: str) -> Scenario:
    """Return the scenario of a seed. In mode "triton", keep three short requests: the interpreter is slow."""
    scenario = Scenario.from_seed(seed, text=mode == "http")
    if mode == "triton":
        scenario.jobs = scenario.jobs[:3]
        scenario.faults = [fault for fault in scenario.faults if fault.get("job", 0) < len(scenario.jobs)]
        for job in scenario.jobs:
            limit = job["params"]["max_tokens"] = min(job["params"]["max_tokens"] or 6, 6)
            job["params"]["min_tokens"] = min(job["params"].get("min_tokens", 0), limit)
    return scenario


def _run(scenario: Scenario, mode: str) -> Counter[str]:
    order_programs_by(str(scenario.seed))
    if mode == "http":
        from campaigns.simulate.served import simulate_served

        return simulate_served(scenario)
    with launch.forced("triton" if mode == "triton" else "auto"):
        return simulate(scenario)


def _run_all(mode: str, seeds: range) -> tuple[Counter[str], tuple[int, str] | None]:
    """Run seeds until one fails. Return the counts of events, and the failed seed with its traceback."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            with within(TIME_LIMIT):
                seen += _run(scenario_of(seed, mode), mode)
        except BaseException:
            return seen, (seed, traceback.format_exc())
    return seen, None


def report_failure(seed: int, mode: str, trace: str) -> int:
    """Report a failed seed and save the smallest scenario that fails in the same place. Saves the original
    scenario first, because a failure that depends on the clock may not reproduce."""

    def run(scenario: Scenario) -> None:
        with within(TIME_LIMIT):
            _run(scenario, mode)

    print(f"Seed {seed} failed:\n{trace}Looking for a smaller scenario ...", file=sys.stderr)
    path = Path(f"simulate-{seed}.json")
    path.write_text(scenario_of(seed, mode).to_json())
    smaller = shrink(scenario_of(seed, mode), run)
    error = failure(smaller, run)
    if error is None:
        print("Not reproducible: the failure depends on the clock or the machine.", file=sys.stderr)
    else:
        path.write_text(smaller.to_json())
        traceback.print_exception(error)
        print(place_of(error), file=sys.stderr)
    command = f"{sys.executable} -m campaigns.simulate --as {mode}"
    print(f"Replay: {command} --replay {path}  (or --seeds {seed}:{seed + 1})", file=sys.stderr)
    return 1
