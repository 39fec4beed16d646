"""Reduce a failing scenario while it fails in the same place."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from campaigns.simulate.limit import TooLong
from campaigns.simulate.scenario import Scenario

ROOT = Path(__file__).parent.parent.parent
PLAIN = {
    "trace": False, "captured": False, "async_scheduling": False, "caching": True, "acceptance": "exact",
    "k": 2, "method": "ngram", "tree_width": 1, "dtype": "float32", "block_size": 16, "budget": 2048,
    "rows": 2, "blur": 0.0, "surprise": 1.0,
}  # fmt: skip


def place_of(error: BaseException) -> str:
    """Return the type of an error and the innermost line of this repository in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)] or frames
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}, {ours[-1].name}: {ours[-1].line}"


def failure(scenario: Scenario, run: Callable[[Scenario], object]) -> BaseException | None:
    """Run a scenario and return its exception, or None if it passes."""
    try:
        run(scenario)
    except BaseException as error:
        return error
    return None


def shrink(scenario: Scenario, run: Callable[[Scenario], object], tries: int = 400) -> Scenario:
    """Return the smallest scenario found in `tries` runs that fails in the same place."""
    error = failure(scenario, run)
    if error is None or isinstance(error, TooLong):  # each run would take as long
        return scenario
    place, reduced = place_of(error), True
    while reduced:
        reduced = False
        for smaller in _smaller(scenario):
            tries -= 1
            if tries < 0:
                return scenario
            error = failure(smaller, run)
            if error is not None and place_of(error) == place:
                scenario, reduced = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield smaller scenarios that may also fail, starting with the largest reductions."""
    yield from _with_fewer_jobs(scenario)
    for i in range(len(scenario.faults)):
        yield _without(scenario, "faults", i)
    if scenario.threads:
        yield _with(scenario, 0, "threads")
    for name, value in PLAIN.items():
        if scenario.engine[name] != value:
            yield _with(scenario, value, "engine", name)
    for i, job in enumerate(scenario.jobs):
        for name in sorted(job["params"].keys() - {"seed", "max_tokens", "temperature"}):
            yield _without(scenario, "jobs", i, "params", name)
        half = job["prompt"][: (len(job["prompt"]) + 1) // 2]
        for name, value in (("arrives", 0), ("ends", None), ("prompt", half)):
            if job[name] != value:
                yield _with(scenario, value, "jobs", i, name)
        limit = job["params"]["max_tokens"] or scenario.engine["window"]
        fewer = {"temperature": 0.0, "max_tokens": max(limit - 1, job["params"].get("min_tokens", 0), 1)}
        for name, value in fewer.items():
            if job["params"][name] != value:
                yield _with(scenario, value, "jobs", i, "params", name)


def _with_fewer_jobs(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios without half of the jobs, a quarter of them, ..., one of them."""
    count = size = len(scenario.jobs)
    while (size := size // 2) and count > 1:
        for first in range(0, count, size):
            kept = [i for i in range(count) if not first <= i < first + size]
            faults = [fault for fault in scenario.faults if fault.get("job", kept[0]) in kept]
            moved = [f | ({"job": kept.index(f["job"])} if "job" in f else {}) for f in faults]
            yield replace(scenario, jobs=[scenario.jobs[i] for i in kept], faults=moved)


def _with(scenario: Scenario, value: Any, *path: Any) -> Scenario:
    """Return a copy with another value at a path."""
    data = asdict(scenario)
    reduce(getitem, path[:-1], data)[path[-1]] = value
    return Scenario(**data)


def _without(scenario: Scenario, *path: Any) -> Scenario:
    """Return a copy without the item at a path."""
    data = asdict(scenario)
    del reduce(getitem, path[:-1], data)[path[-1]]
    return Scenario(**data)
