"""Inject an exception at any line, like Ctrl-C, a failed allocation or a signal handler."""

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
    """Counts the executed lines of the package and raises at line number `at`.

    Attributes:
        lines: the number of executed lines.
        where: the file and line where the exception was raised, "" if it was not.
    """

    def __init__(self, at: int, error: Callable[[], BaseException]) -> None:
        self.at, self.error, self.lines, self.where = at, error, 0, ""
        self._within: set[tuple[int, int]] = set()  # (frame, line) of entered `with` statements

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._within = {(known, line) for known, line in self._within if known != id(frame)}
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _is_with_exit(self, frame: FrameType) -> bool:
        """Return whether the line event is the exit of a `with` block, where Python handles no signals."""
        name, place = frame.f_code.co_filename, (id(frame), frame.f_lineno)
        if not linecache.getline(name, frame.f_lineno).lstrip().startswith("with "):
            return False
        self._within ^= {place}
        return place not in self._within

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        # `locking.py` is safe against signals only.
        skipped = self.error is not KeyboardInterrupt and frame.f_code.co_filename.endswith("locking.py")
        if event != "line" or self._is_with_exit(frame) or skipped:
            return self._line
        self.lines += 1
        if self.lines == self.at:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            if self.error is KeyboardInterrupt:  # raised now, or later if it is being deferred
                signal.raise_signal(signal.SIGINT)
            else:
                raise self.error()
        return self._line


@contextmanager
def raising(at: int, error: Callable[[], BaseException] = KeyboardInterrupt) -> Iterator[Injector]:
    """Raise an error once, at line number `at` of the context. If `at` is 0, only count lines."""
    injector = Injector(at, error)
    previous = sys.gettrace()
    sys.settrace(injector._enter)
    try:
        yield injector
    finally:
        sys.settrace(previous)
