"""Share an engine between threads.

Requests of all threads are batched: a thread that waits for results locks the engine and runs one step for
all. Holding the lock is a *turn*: unfinished requests are accessed only in turns; Ctrl-C waits for the end.
If a step fails, the device is in an unknown state, so all requests are aborted. Requests whose stream was
closed are aborted in the next turn.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ..device.hardware import compute_info
from ..device.memory import explain_oom, is_oom, oom_remedy
from ..text.validation import shown
from .engine import Engine
from .request import Request

Result = TypeVar("Result")


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the `with` block. A second Ctrl-C interrupts the block, in case it hangs."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous or signal.SIG_DFL)
        if received:
            signal.raise_signal(signal.SIGINT)


class SharedEngine:
    """Gives threads exclusive turns at an engine. Turns must not be nested."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._abandoned: deque[Request] = deque()
        self._failure: str | None = None  # error message for requests that are still to be aborted

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """Lock the engine. Waiting threads queue at `_next`, the first of them at `_lock`: with one lock, a
        thread that releases the engine and locks it again at once would starve the others."""
        with deferred_interrupt():
            with self._next:
                self._lock.acquire()
            try:
                self._abort_all()
                while self._abandoned:
                    self._guarded(lambda: self.engine.abort(self._abandoned.popleft()))
                yield self.engine
            finally:
                self._lock.release()

    def report(self) -> dict[str, object]:
        """Return the engine's counters, seconds per stage, memory use, and the measured step times."""
        with self.turn() as engine:
            worker, stats = engine.worker, engine.metrics.to_dict() | {"num_compiled": engine.num_compiled}
            stats["stage_seconds"] = {name: round(stage.seconds, 6) for name, stage in worker.stages.items()}
            stats |= {"compute": compute_info(worker.model), "memory": worker.memory}
            if worker.graphs is not None:
                stats["captured_steps"] = {"count": len(worker.graphs.captures)}
            return stats | (engine.policy.costs.report() if engine.policy.costs else {})

    def step(self) -> list[Request]:
        """Run one engine step; return the requests that got tokens or finished. To be called in a turn."""
        return self._guarded(self.engine.step)

    def _guarded(self, action: Callable[[], Result]) -> Result:
        """Run an action of the engine; abort all requests if it fails."""
        try:
            return action()
        except BaseException as error:
            remedy = oom_remedy(self.engine.config)
            self._failure = f"A step failed with {shown(error)}, and all requests were aborted; retry them."
            if is_oom(error):
                self._failure = f"Ran out of memory in a step, and all requests were aborted; {remedy}."
            self._abort_all()
            with explain_oom("a step, and all requests were aborted", remedy):
                raise

    def _abort_all(self) -> None:
        """Abort all requests if a step has failed. If this is interrupted, the next turn tries again."""
        if self._failure is not None:
            self.engine.abort_all(self._failure)
            self._failure = None

    def wait(self, requests: Iterable[Request]) -> list[Request]:
        """Return the finished `requests`. If none has finished, run one step first; [] if still none."""
        with self.turn():
            finished = [r for r in requests if r.is_finished]  # in a step that another thread ran
            if not finished:
                self.step()
                finished = [r for r in requests if r.is_finished]
        return finished

    def abort(self, requests: Iterable[Request]) -> None:
        """Mark requests to be aborted in the next turn. Never blocks: a stream may be garbage-collected at
        any time, even during a step of the same thread."""
        self._abandoned.extend(request for request in requests if not request.is_finished)

    @contextmanager
    def abort_on_exit(self, requests: Sequence[Request]) -> Iterator[None]:
        """Abort unfinished requests at the end of the `with` block."""
        try:
            try:
                yield
            finally:
                self.abort(requests)
        finally:  # again, as Ctrl-C may interrupt the first call before it starts
            self.abort(requests)
