"""One engine for callers in several threads.

All requests run as one batch: whoever waits for results has the engine for one step in turn, and that step
is everybody's. Unfinished requests are touched in a turn only. What is cut short in the engine, by Ctrl-C or
a failure, ends all requests, at the latest in the next turn: Ctrl-C may come twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, RLock
from typing import TypeVar

from ..device.out_of_memory import explained, in_a_step, ran_out
from ..text.checks import shown
from .engine import Engine
from .request import Request

Result = TypeVar("Result")


class SharedEngine:
    """Turns at an engine. A thread must not begin one within its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next, self._lock = Lock(), RLock()  # reentrant only to know whose it is
        self._abandoned: deque[Request] = deque()
        self._cut_short: str | None = None  # what to tell those whose requests end with it

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """Have the engine for oneself. One thread waits for it, the others for being next: with one lock
        alone, a thread that gives it back and wants it again at once gets it before all others."""
        try:
            with self._next:
                self._lock.acquire()
            self._mend()
            yield self.engine
        finally:
            self._give_back()
            self._end_abandoned()

    def step(self) -> list[Request]:
        """One engine step, in a turn; returns the requests that got tokens or ended. What interrupts it,
        Ctrl-C included, ends all requests: a step cut short leaves the device in an unknown state."""
        return self._whole(self.engine.step)

    def _whole(self, action: Callable[[], Result]) -> Result:
        """Have the engine do something, all of it."""
        self._mend()
        self._cut_short = "A step was cut short, and all requests with it; run them again."
        try:
            result = action()
        except BaseException as error:
            self._cut_short = f"A step ended with {shown(error)}, and all requests with it; run them again."
            if ran_out(error):
                self._cut_short = f"Memory ran out in a step, and all requests ended; {self._remedy()}."
            self._mend()
            with explained("a step, and all requests ended", self._remedy()):
                raise
        self._cut_short = None
        return result

    def _remedy(self) -> str:
        return in_a_step(self.engine.config)

    def _mend(self) -> None:
        """End all requests if something was cut short."""
        if self._cut_short is not None:
            self.engine.abort_all(self._cut_short)
            self._cut_short = None

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

    @contextmanager
    def owning(self, groups: Sequence[Sequence[Request]], leave: bool = False) -> Iterator[None]:
        """Abort what has not ended behind the block: twice, as Ctrl-C may cut the first time short. `leave`:
        this thread cannot be within a turn then, but one that Ctrl-C has left open."""
        try:
            try:
                yield
            finally:
                self._end(groups, leave)
        finally:
            self._end(groups, leave)

    def _end(self, groups: Sequence[Sequence[Request]], leave: bool) -> None:
        if leave:
            self._give_back()
        self.abort(request for group in groups for request in group if not request.is_finished)

    def _end_abandoned(self) -> None:
        while self._abandoned and not self._is_ours():
            try:
                if not self._lock.acquire(blocking=False):
                    return
                while self._abandoned:
                    self._whole(lambda: self.engine.abort(self._abandoned.popleft()))
            finally:
                self._give_back()

    def _give_back(self) -> None:
        """Release the lock if this thread has it: Ctrl-C may come right before or behind its acquisition, or
        before this, and then a turn is given back with the next one."""
        while self._is_ours():
            self._lock.release()

    def _is_ours(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]
