"""The number of CPU threads: a container's quota and busy neighbours lower it.

The C++ operations share a core with another process well, since their threads take over each other's tasks.
PyTorch gives every thread an equal part of an operation, so all of them wait for the one on a busy core:
there the number of threads is lowered to the free cores, once, before the first request. It does not change
afterwards, because in bf16 the number of threads shows in the last bit of PyTorch's sums.
"""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

DEFAULT = torch.get_num_threads()
Usage = tuple[float, float, float]
"""Seconds that the processors of this process were busy, that it used of these, and the time of day."""
_before: Usage | None = None  # when a model began to load; None where the number of threads was given


def use_threads(wanted: int | Literal["auto"]) -> None:
    """Set the number of threads before a model is loaded. "auto" keeps OMP_NUM_THREADS or takes PyTorch's
    default within the container's quota, to be lowered by `settle_threads`."""
    global _before
    _before = None
    if wanted != "auto":
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ:
        quota = cpu_quota()
        torch.set_num_threads(DEFAULT if quota >= DEFAULT else max(math.ceil(quota), 1))
        with suppress(OSError, ValueError):  # no /proc/stat
            _before = usage()


def settle_threads(adapts: bool) -> None:
    """Report other processes that used half a core or more while the model was loaded, and, if the model
    `adapts`, leave the cores to them."""
    global _before
    before, _before = _before, None
    if before is None or (now := usage())[2] - before[2] < 0.2 or torch.get_num_threads() == 1:
        return
    cores = len(os.sched_getaffinity(0))
    others = max(now[0] - before[0] - (now[1] - before[1]), 0.0) / (now[2] - before[2])
    if others < 0.5:
        return
    if adapts:
        torch.set_num_threads(min(torch.get_num_threads(), max(round(cores - others), 1)))
    threads = torch.get_num_threads()
    print(f"Other programs use {others:.1f} of {cores} cores; using {threads} threads.", file=sys.stderr)


def usage(stat: Path = Path("/proc/stat")) -> Usage:
    """Return the `Usage` so far, from the lines of this process's processors in /proc/stat."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = [line.split() for line in stat.read_text().splitlines() if line]
    # Columns 3 and 4 are idle time; guests, 8 and 9, are counted under user and nice as well.
    ticks = sum(sum(map(int, [*line[1:4], *line[6:9]])) for line in lines if line[0] in mine)
    return ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]), time.monotonic()


def cpu_quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the number of processors that control groups (version 2) grant this process, or infinity."""
    quotas = [math.inf]
    with suppress(OSError, ValueError):
        group = root / own.read_text().partition("::")[2].strip().strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / "cpu.max").is_file():
                quota, period = (folder / "cpu.max").read_text().split()
                quotas += [int(quota) / int(period)] if quota != "max" else []
    return min(quotas)
