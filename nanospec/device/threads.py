"""How many threads compute on a CPU beside what else runs there.

Our C++ shares a core with a neighbour well: its threads take over each other's tasks. PyTorch's get equal
parts of every operation, so that all wait for the one with a neighbour on its core, and they wait awake, on
the very core that it could have. Therefore there should be no more of them than free cores. (That they sleep
early, by GOMP_SPINCOUNT, helps beside a neighbour less than that, and costs a fifth to a quarter where there
is none: `bench/busy.py --spins 2000`.)
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from .quota import heed_quota

Adapts = Literal["never", "at first", "always"]
PERIOD, BRIEF = 1.0, 0.2  # seconds between looks, and at least until the first
BUSY = 0.5  # of a core's time: what others may take unnoticed


def fitting(most: int, cores: int, others: float) -> int:
    """How many of at most `most` threads compute fastest where others use so many of the cores."""
    return min(most, max(round(cores - others), 1))


class Usage(NamedTuple):
    """Seconds so far: that the processors which this process may use were busy, and it used of these."""

    busy: float
    own: float
    at: float

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> Usage:
        """OSError or ValueError where the system does not say."""
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        columns = [line.split() for line in stat.read_text().splitlines()]
        fields = [[int(ticks) for ticks in rest] for name, *rest in filter(None, columns) if name in mine]
        idle_and_guests = 3, 4, 8, 9  # idle, waiting for disks; guests are counted under user and nice
        ticks = sum(n for line in fields for i, n in enumerate(line) if i not in idle_and_guests)
        own = sum(os.times()[:4])  # with that of children that have ended, such as a compiler
        return cls(ticks / os.sysconf("SC_CLK_TCK"), own, time.monotonic())

    def others_until(self, later: Usage) -> float:
        """Cores' worth of time that other processes used."""
        return max(later.busy - self.busy - (later.own - self.own), 0) / (later.at - self.at)


class Crowd:
    """Notices others, says so once, and, if it may, changes PyTorch's number of threads. Where the system
    does not tell, and where there is one thread, or as many as the user has set, it does nothing.

    Attributes:
        most: PyTorch's number of threads where nobody else computes.
    """

    def __init__(self) -> None:
        self.most, self._said, self._is_first = torch.get_num_threads(), False, True
        self._seen: Usage | None = None
        if self.most > 1 and "OMP_NUM_THREADS" not in os.environ:
            with suppress(OSError, ValueError, AttributeError):  # not on Linux
                self._seen = Usage.now()

    def look(self, adapts: Adapts) -> None:
        """What others used since the last look, if that is long enough ago."""
        first, self._is_first = self._is_first, False
        if self._seen is None or time.monotonic() < self._seen.at + (BRIEF if first else PERIOD):
            return
        before, self._seen = self._seen, Usage.now()
        cores, others = len(os.sched_getaffinity(0)), before.others_until(self._seen)
        if adapts != "at first" or first:
            threads = self.most if adapts == "never" else fitting(self.most, cores, others)
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
        if not self._said and others > BUSY and cores - others < self.most:
            self._said = True
            threads = torch.get_num_threads()
            print(
                f"Other programs use {others:.1f} of {cores} cores; going on beside them with {threads} "
                f"thread{'s' * (threads > 1)}.",
                file=sys.stderr,
            )


_crowd: Crowd | None = None
_unasked: int | None = None  # PyTorch's threads before a number was wanted


def use_threads(wanted: int | Literal["auto"]) -> None:
    """Compute with so many threads, PyTorch's and our C++'s, in this process; "auto": with one for each
    processor that it may use, unless OMP_NUM_THREADS is set, and as `look_around` finds."""
    global _crowd, _unasked
    if wanted != "auto":
        _unasked = _unasked or (torch.get_num_threads() if _crowd is None else _crowd.most)
        _crowd = None
        torch.set_num_threads(wanted)
    elif _crowd is None:
        torch.set_num_threads(_unasked or torch.get_num_threads())
        heed_quota()
        _crowd = Crowd()


def look_around(adapts: Adapts) -> None:
    """To be called when a model is loaded, and then now and again before work begins. The number of threads
    shows in the last place of PyTorch's sums, as that of rows does. In fp32 no test has seen that change a
    token; in bf16 it may, so there the number may adapt "at first" only, before this process's first request.
    """
    if _crowd is not None:
        _crowd.look(adapts)
