"""Threads for the share of a machine that a container may use.

PyTorch makes a thread for every processor it may run on and knows nothing of quotas (`docker --cpus 2`): with
more threads than these allow, the system stops all of them for most of the time.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

import torch


def heed_quota() -> None:
    """Lower PyTorch's number of threads, and our C++'s, to the quota, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ and (quota := cpu_quota()) < torch.get_num_threads():
        torch.set_num_threads(max(math.ceil(quota), 1))


def cpu_quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Processors' worth of time that control groups (version 2 or 1) grant this process, or infinity."""
    quotas = [math.inf]
    with suppress(OSError, ValueError):  # no such file, or not of this form
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / "cpu" if controllers else root
            group = top / path.strip("/")  # in a container often not there; its own is then `top`
            quotas += [_quota(g) for g in (group, *group.parents) if g.is_relative_to(top)]
    return min(quotas)


def _quota(group: Path) -> float:
    with suppress(OSError, ValueError, ZeroDivisionError):  # no such group; "max"
        if (group / "cpu.max").is_file():
            quota, period = map(int, (group / "cpu.max").read_text().split())
        else:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else math.inf
    return math.inf
