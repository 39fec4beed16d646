"""Choose the device, make it the current one, and choose the number of CPU threads.

A container's quota and busy neighbours lower the number of threads. The C++ operations share a core with
another process well, since their threads take over each other's tasks. PyTorch gives every thread an equal
part of an operation, so all of them wait for the one on a busy core: there the number is lowered to the free
cores, once, before the first request. It does not change afterwards, because in bf16 the number of threads
shows in the last bit of PyTorch's sums.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..models.cpu import computed_by
from ..models.decoder import Model
from ..text.checks import shown

DEFAULT_THREADS = torch.get_num_threads()
Usage = tuple[float, float, float]
"""Seconds that the processors of this process were busy, that it used of these, and the time of day."""
Method = TypeVar("Method", bound=Callable[..., Any])


def resolve_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is a GPU if there is one. A GPU without a number is the current
    one, and has its number from then on, since what is current may change. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", str(name)):
        raise ValueError(f"device={shown(name)} is not supported; use 'auto', 'cpu' or 'cuda'.")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device={shown(name)} needs a GPU that this machine does not have; use 'cpu'.")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(
            f"device='cuda:{index}' is not there: this machine has {count} GPU{'s' * (count > 1)}, counted "
            f"from 0; use at most 'cuda:{count - 1}'."
        )
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one of this thread: that is where Triton launches, and whose streams, events
    and graphs `torch.cuda` deals with. Threads take turns, so it is done for every call."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(method: Method) -> Method:
    """Run a method of an object with a `device` while that is the current one."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with current(self.device):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def compute_info(model: Model) -> dict[str, str | int]:
    """Return how a model is computed, for people."""
    dtype = str(model.dtype).removeprefix("torch.")
    found: dict[str, str | int] = {"device": str(model.device), "dtype": dtype, "by": computed_by(model)}
    return found | ({"threads": torch.get_num_threads()} if model.device.type == "cpu" else {})


def use_threads(wanted: int | Literal["auto"]) -> Usage | None:
    """Set the number of threads before a model is loaded. "auto" keeps OMP_NUM_THREADS or takes PyTorch's
    default within the container's quota; `settle_threads` may lower that, and needs what this returns."""
    if wanted != "auto":
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(math.ceil(min(cpu_quota(), DEFAULT_THREADS)), 1))
        with suppress(OSError, ValueError):  # no /proc/stat
            return usage()
    return None


def settle_threads(before: Usage | None, model: Model) -> None:
    """Report other processes that used half a core or more while the model was loaded, and leave the cores
    to them if PyTorch computes the model."""
    if before is None or torch.get_num_threads() == 1:
        return
    cores = len(os.sched_getaffinity(0))
    busy, own, seconds = (late - early for early, late in zip(before, usage()))
    others = (busy - own) / max(seconds, 1e-9)
    if others < 0.5 or seconds < 0.2:
        return
    if computed_by(model) == "PyTorch":
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
