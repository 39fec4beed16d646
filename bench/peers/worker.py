"""The process of one system, in that system's own environment: loads the model, then runs what it is told.

    PYTHON_OF_THE_SYSTEM bench/peers/worker.py ADAPTER WORK.json

Each line on its standard input is {"cases": [names], "out": file}; the file is written and DONE printed.
Needs nothing but the standard library; the adapter (see `__init__.py`) imports what it measures.

WORK.json: `prompts` (name to lists of token ids), `warm_tokens`, `cases`, and what adapters read: `model`,
`gguf`, `guess` (one of its GUESSES), `max_num_seqs`, `max_model_len`, `cache_tokens` (held at once, at most).
A case: `name`, `prompts` (which), `batch`, `waves` (how many times so many prompts at once), `max_tokens`,
`temperature`, and where wanted `seed`, `ignore_eos`, `first` (the time to the first tokens is measured too,
in calls of its own).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

Json = dict[str, Any]
DONE = "the worker is done"  # on a line of its own, among whatever libraries print


def since_process_start() -> float:
    """Seconds since this process was started."""
    started = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - started / os.sysconf("SC_CLK_TCK")


def family(first: int | None = None) -> list[int]:
    """A process, this one if none is named, and all that descend from it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has just ended
            continue
    found = [first or os.getpid()]
    for process in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == process]
    return found


def peak_mb() -> float:
    """Largest resident size since the start, summed over the processes (what they share counts in each)."""
    total = 0
    for process in family():
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return round(total / 1024, 1)


def make_waves(prompts: list[list[int]], batch: int, count: int) -> list[list[list[int]]]:
    """`count` times `batch` prompts, from the first again when all have had their turn."""
    return [[prompts[(w * batch + i) % len(prompts)] for i in range(batch)] for w in range(count)]


def run_case(generate: Any, prompts: list[list[int]], case: Json) -> Json:
    """Seconds and outputs of a case, wave by wave."""
    outputs: list[list[int]] = []
    seconds = first = 0.0
    for wave in make_waves(prompts, case["batch"], case["waves"]):
        if case.get("first"):
            start = time.perf_counter()
            generate(wave, {**case, "max_tokens": 1})
            first += time.perf_counter() - start
        start = time.perf_counter()
        outputs += generate(wave, case)
        seconds += time.perf_counter() - start
    found = {"seconds": seconds, "outputs": outputs}
    return {**found, **({"first_seconds": first} if case.get("first") else {})}


def load(name: str) -> Any:
    """The adapter of that name, without this folder in the path of what it imports."""
    spec = importlib.util.spec_from_file_location(f"adapter_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    return adapter


def main() -> None:
    name, asked = sys.argv[1:]
    del sys.path[0]
    adapter = load(name)
    work: Json = json.loads(Path(asked).read_text())
    generate = adapter.start(work)
    ready = since_process_start()
    generate([next(iter(work["prompts"].values()))[0]], {"max_tokens": 4, "temperature": 0.0})
    about: Json = {
        "start_seconds": round(ready, 3),
        "first_answer_seconds": round(since_process_start(), 3),
        "versions": {package: metadata.version(package) for package in adapter.PACKAGES},
        "python": platform.python_version(),
    }
    cases, warm = {case["name"]: case for case in work["cases"]}, set()
    print(f"\n{DONE}", flush=True)
    for line in sys.stdin:
        told, runs = json.loads(line), {}
        for wanted in told["cases"]:
            case = cases[wanted]
            prompts = work["prompts"][case["prompts"]]
            if wanted not in warm:  # what is compiled or measured at its first use is not timed
                [wave] = make_waves(prompts, case["batch"], 1)
                generate(wave, {**case, "max_tokens": min(case["max_tokens"], work["warm_tokens"])})
                warm.add(wanted)
            runs[wanted] = run_case(generate, prompts, case)
        notes = adapter.notes() if hasattr(adapter, "notes") else {}
        found = {**about, "peak_mb": peak_mb(), "notes": notes, "runs": runs}
        Path(told["out"]).write_text(json.dumps(found))
        print(f"\n{DONE}", flush=True)


if __name__ == "__main__":
    main()
