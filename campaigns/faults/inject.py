"""An exception at any line: what Ctrl-C, a failed allocation or a signal handler may do."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import nanospec

PACKAGE = str(Path(nanospec.__file__).parent)


class Injector:
    """Counts the lines of the package that run, and raises at the `at`-th of them.

    Attributes:
        lines: how many have run.
        where: the file and line at which it raised, "" if it has not.
    """

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.at, self.error, self.lines, self.where = at, error, 0, ""
        self._within: set[tuple[int, int]] = set()  # frames and lines of their `with`

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._within = {(known, line) for known, line in self._within if known != id(frame)}
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _leaves_with(self, frame: FrameType) -> bool:
        """Whether the line is the end of a `with`: told as a line of its own, but no place for signals."""
        name, place = frame.f_code.co_filename, (id(frame), frame.f_lineno)
        if not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            return False
        self._within ^= {place}
        return place not in self._within

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        # `locking.py` holds against signals alone.
        spared = self.error is not KeyboardInterrupt and frame.f_code.co_filename.endswith("locking.py")
        if event != "line" or self._leaves_with(frame) or spared:
            return self._line
        self.lines += 1
        if self.lines == self.at:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            if self.error is KeyboardInterrupt:  # raised now, or behind a block that defers it
                signal.raise_signal(signal.SIGINT)
            else:
                raise self.error()
        return self._line


@contextmanager
def raising(at: int, error: Callable[[], BaseException] = KeyboardInterrupt) -> Iterator[Injector]:
    """Within the block, at the `at`-th line, once; 0 only counts."""
    injector = Injector(at, error)
    before = sys.gettrace()
    sys.settrace(injector._enter)
    try:
        yield injector
    finally:
        sys.settrace(before)
