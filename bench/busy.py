"""Decoding beside a neighbour that keeps one core busy: with one thread, with all, and with `threads="auto"`.

    python bench/busy.py [--rounds 3] [--spins 2000]

Every figure is a process of its own, which writes greedily without guesses: tokens per second over some
seconds, after some more in which it may adapt. The cases take turns, round by round. "spins" is for how
many turns PyTorch's threads wait for each other awake, where that is not left to OpenMP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODEL = "smollm2-135m-instruct"
PATHS = {  # dtype, kernels
    "C++, bf16": ("bfloat16", "auto"),
    "PyTorch, fp32": ("float32", "auto"),
    "PyTorch, bf16": ("bfloat16", "naive"),
}
WARM_UP, MEASURED = 4.0, 8.0  # seconds
SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def cases(spins: list[int]) -> list[dict[str, Any]]:
    """What is measured in a round, alone and beside a neighbour."""
    cores, found = len(os.sched_getaffinity(0)), []
    for path in PATHS:
        found += [{"path": path, "threads": n} for n in (1, cores, "auto")]
        if path != "C++, bf16":
            found += [{"path": path, "threads": cores, "spins": n} for n in spins]
    return [{**case, "neighbour": busy} for case in found for busy in (False, True)]


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """A process that keeps the last core busy."""
    if not busy:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", SPIN, str(max(os.sched_getaffinity(0)))]) as process:
        try:
            yield
        finally:
            process.kill()


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """A case in a process of its own, as a row of the result."""
    env = {name: value for name, value in os.environ.items() if name not in OPENMP}
    env["NANOSPEC_KERNELS"] = PATHS[case["path"]][1]
    if "spins" in case:
        env["GOMP_SPINCOUNT"] = str(case["spins"])
    with neighbour(case["neighbour"]):
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(case)], env=env, capture_output=True, text=True
        )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return {**case, **json.loads(done.stdout.splitlines()[-1])}


def decode(case: dict[str, Any]) -> dict[str, Any]:
    """In the process of a case: its rate, and how many threads it ended with."""
    from nanospec import LLM, SamplingParams, SpecConfig

    began = time.perf_counter()
    none = SpecConfig(method="none")
    llm = LLM(MODEL, spec=none, dtype=PATHS[case["path"]][0], threads=case["threads"], max_num_seqs=1)
    start, count = time.perf_counter(), 0
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    for _ in llm.stream_pieces("Once upon a time", params):
        if (now := time.perf_counter()) < start + WARM_UP:
            first = now
            continue
        count += 1
        if now > first + MEASURED:
            break
    rate, threads = count / (now - first), llm.engine.worker.runs()["threads"]
    return {"tokens_per_second": rate, "threads_used": threads, "load_seconds": start - began}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spins", type=int, nargs="*", default=[], help="turns to wait awake, to compare")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(decode(args.case)))
        return
    from bench.common import environment, save  # not above: it imports torch

    found: dict[str, dict[str, Any]] = {}
    for _ in range(args.rounds):
        for case in cases(args.spins):
            row = measured(case)
            print(json.dumps(row), file=sys.stderr)
            kept = found.setdefault(json.dumps(case), {**case, "rates": [], "threads_used": []})
            kept["rates"].append(round(row["tokens_per_second"], 2))
            kept["threads_used"].append(row["threads_used"])
    rows = [{**row, "median": round(statistics.median(row["rates"]), 2)} for row in found.values()]
    save("busy", {**environment(), "model": MODEL, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
