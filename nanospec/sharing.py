"""One engine for callers in several threads.

All requests run as one batch: whoever waits for results has the engine for one step in turn, and that step
is everybody's. Unfinished requests are touched in a turn only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock, RLock

from .engine import Engine
from .request import Request


class SharedEngine:
    """Turns at an engine. A thread must not begin one within its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next, self._lock = Lock(), RLock()  # reentrant only to know whose it is
        self._abandoned: deque[Request] = deque()

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """Have the engine for oneself. One thread waits for it, the others for being next: with one lock
        alone, a thread that gives it back and wants it again at once gets it before all others."""
        try:
            with self._next:
                self._lock.acquire()
            yield self.engine
        finally:
            self._give_back()
            self._end_abandoned()

    def step(self) -> list[Request]:
        """One engine step, in a turn; returns the requests that got tokens or ended. What interrupts it,
        Ctrl-C included, ends all requests: a step cut short leaves the device in an unknown state."""
        try:
            return self.engine.step()
        except BaseException as error:
            self.engine.abort_all(f"A step ended with {error!r}, and all requests with it; run them again.")
            raise

    def wait(self, requests: Iterable[Request]) -> list[Request]:
        """Those that have ended; if none has, after one more step."""
        with self.turn():
            ended = [r for r in requests if r.is_finished]  # in a step that another thread ran
            if not ended:
                self.step()
                ended = [r for r in requests if r.is_finished]
        return ended

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests, now or as soon as the engine is free. Never waits: a stream that nobody reads any
        more is collected as garbage anywhere, in the middle of a step of the same thread, too."""
        self._abandoned.extend(requests)
        self._end_abandoned()

    def _end_abandoned(self) -> None:
        while self._abandoned and not self._is_ours():
            try:
                if not self._lock.acquire(blocking=False):
                    return
                while self._abandoned:
                    self.engine.abort(self._abandoned.popleft())  # nothing if it is finished
            finally:
                self._give_back()

    def _give_back(self) -> None:
        """Release the lock if this thread has it: Ctrl-C may come right before or behind its acquisition."""
        if self._is_ours():
            self._lock.release()

    def _is_ours(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]
