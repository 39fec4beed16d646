"""A limit of real time, for what would go on for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """No Exception, so that nobody takes it for a failed step and goes on."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooLong in the main thread after so long, and every second from then on; nothing in others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TooLong(f"It has not ended within {seconds:g} s.")

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
