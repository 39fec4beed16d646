"""One engine for callers in several threads.

All requests run as one batch: a thread that waits for results takes a turn at the engine and runs a step for
all threads. Unfinished requests are touched in a turn only. Ctrl-C waits for the end of a turn. A step that
fails leaves the device in an unknown state, so it ends all requests. Requests without a reader are ended in
the next turn.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ..device.resources import compute_info, explained, in_a_step, ran_out
from ..text import shown
from .engine import Engine
from .request import Request

Result = TypeVar("Result")


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block. A second Ctrl-C interrupts the block, in case it hangs."""
    if threading.current_thread() is not threading.main_thread():  # the main thread alone gets signals
        yield
        return
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)


class SharedEngine:
    """Turns at an engine. A thread must not begin one within its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._abandoned: deque[Request] = deque()
        self._failure: str | None = None  # the error of requests that are still to be ended

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """Hold the engine. One thread waits for it, the others wait to be next: with one lock alone, a thread
        that releases the engine and wants it again at once gets it before all others."""
        with deferred_interrupt():
            with self._next:
                self._lock.acquire()
            try:
                self._end_all()
                while self._abandoned:
                    self._whole(lambda: self.engine.abort(self._abandoned.popleft()))
                yield self.engine
            finally:
                self._lock.release()

    def report(self) -> dict[str, object]:
        """Return the engine's counters, the seconds of each stage, and the measured times of steps."""
        with self.turn() as engine:
            worker, found = engine.worker, engine.metrics.to_dict()
            found["stage_seconds"] = {name: round(stage.seconds, 6) for name, stage in worker.stages.items()}
            found |= {"runs": compute_info(worker.model), "memory": worker.memory}
            if worker.graphs is not None:
                found["recorded_steps"] = {"count": len(worker.graphs.captures)}
            return found | (engine.policy.costs.report() if engine.policy.costs else {})

    def step(self) -> list[Request]:
        """Run one engine step, in a turn; return the requests that got tokens or ended. An exception ends all
        requests."""
        return self._whole(self.engine.step)

    def _whole(self, action: Callable[[], Result]) -> Result:
        """Run an action of the engine; end all requests if it fails."""
        try:
            return action()
        except BaseException as error:
            remedy = in_a_step(self.engine.config)
            self._failure = f"A step ended with {shown(error)}, and all requests with it; run them again."
            if ran_out(error):
                self._failure = f"Memory ran out in a step, and all requests ended; {remedy}."
            self._end_all()
            with explained("a step, and all requests ended", remedy):
                raise

    def _end_all(self) -> None:
        """End all requests after a failure, at the latest in the next turn."""
        if self._failure is not None:
            self.engine.abort_all(self._failure)
            self._failure = None

    def wait(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that have ended; if none has, those that have after one more step."""
        with self.turn():
            ended = [r for r in requests if r.is_finished]  # in a step that another thread ran
            if not ended:
                self.step()
                ended = [r for r in requests if r.is_finished]
        return ended

    def abort(self, requests: Iterable[Request]) -> None:
        """Have requests ended in the next turn. Never waits: a stream without a reader is garbage-collected
        anywhere, also in the middle of a step of the same thread."""
        self._abandoned.extend(request for request in requests if not request.is_finished)

    @contextmanager
    def owning(self, requests: Sequence[Request]) -> Iterator[None]:
        """Abort the requests that have not ended behind the block."""
        try:
            try:
                yield
            finally:
                self.abort(requests)
        finally:  # again, as Ctrl-C may come before the first time begins
            self.abort(requests)
