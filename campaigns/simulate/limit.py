"""Limit the wall-clock time of a block."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """Raised at the time limit. Not an Exception, so that it is not handled as a failed step."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooLong after `seconds`, and again every second. For the main thread."""

    def stop(*_: object) -> None:
        raise TooLong(f"Not finished after {seconds:g} s.")

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
