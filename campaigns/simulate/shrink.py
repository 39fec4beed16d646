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
        yield _changed(scenario, "faults", i)
    if scenario.threads:
        yield _changed(scenario, "threads", to=0)
    for name, value in PLAIN.items():
        if scenario.engine[name] != value:
            yield _changed(scenario, "engine", name, to=value)
    for i, job in enumerate(scenario.jobs):
        params = job["params"]
        for name in sorted(params.keys() - {"seed", "max_tokens", "temperature"}):
            yield _changed(scenario, "jobs", i, "params", name)
        half = job["prompt"][: (len(job["prompt"]) + 1) // 2]
        for name, value in (("arrives", 0), ("ends", None), ("prompt", half)):
            if job[name] != value:
                yield _changed(scenario, "jobs", i, name, to=value)
        fewer = max((params["max_tokens"] or scenario.engine["window"]) - 1, params.get("min_tokens", 0), 1)
        for name, value in (("temperature", 0.0), ("max_tokens", fewer)):
            if params[name] != value:
                yield _changed(scenario, "jobs", i, "params", name, to=value)


def _with_fewer_jobs(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios without half of the jobs, a quarter of them, ..., one of them."""
    count = size = len(scenario.jobs)
    while (size := size // 2) and count > 1:
        for first in range(0, count, size):
            kept = [i for i in range(count) if not first <= i < first + size]
            faults = [fault for fault in scenario.faults if fault.get("job", kept[0]) in kept]
            moved = [f | ({"job": kept.index(f["job"])} if "job" in f else {}) for f in faults]
            yield replace(scenario, jobs=[scenario.jobs[i] for i in kept], faults=moved)


REMOVED = object()


def _changed(scenario: Scenario, *path: Any, to: Any = REMOVED) -> Scenario:
    """Return a copy with another value at a path, or without it."""
    data = asdict(scenario)
    inner = reduce(getitem, path[:-1], data)
    if to is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return Scenario(**data)
