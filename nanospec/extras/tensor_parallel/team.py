"""The other ranks, as the leader knows them: how it speaks to them, and what becomes of the job if one fails.

Messages go over a connection to each rank. Nothing comes back but the sentence of a rank that fails. A rank
that dies, fails, or does not answer in time ends them all: the leader gets one error within a bounded time,
or, where it waits for a device that will never answer, its process ends with that sentence. No process is
left.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

CLOSED = "This model has been closed; make a new LLM."
LOOK = 0.2  # seconds between looks at the clock
GRACE = 10.0  # seconds that a failed job has to end by itself, and ranks have to end when told to


class RankFailed(ConnectionError):
    """A rank died, failed or hangs, and the job with it; says which, and why."""


class Team:
    """The ranks from 1 on.

    Attributes:
        failure: why the job is over, None while it is not.
    """

    def __init__(
        self, connections: Sequence[Connection], processes: Sequence[subprocess.Popen[bytes]], seconds: float
    ) -> None:
        """`processes` are those that were started here, in the order of ranks, which may be none. What takes
        longer than `seconds` has failed."""
        self.connections, self.processes, self.seconds = list(connections), list(processes), seconds
        self.failure: str | None = None
        self.cause: Exception | None = None  # of what failed because of what the user asked
        self._process = os.getpid()
        self.give_up: Callable[[], None] = lambda: None  # what frees the leader from waiting for a device
        self._asked = ""  # of all ranks
        self._until: float | None = None  # when the leader must be done with it
        self._closing = False
        self._watch = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True, name="ranks")
        self._watch.start()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that has started them, and no copy of it."""
        return os.getpid() == self._process

    def tell(self, message: Any) -> None:
        """Send all ranks the same."""
        data = ForkingPickler.dumps(message)
        for connection in self.connections:
            connection.send_bytes(data)

    @contextmanager
    def together(self, message: Any = None) -> Iterator[None]:
        """Do something that all ranks do, after a message to them; without one it is what they do to begin
        with, which takes as long as it takes. Ctrl-C waits until it is done, since a rank that is cut short
        is out of step with the others for good; other errors end the job, as RankFailed."""
        if not self.is_ours:
            raise RankFailed("A forked process cannot use the ranks of its parent; make an LLM of its own.")
        if self._closing:
            raise RuntimeError(CLOSED)
        if self.failure is not None:
            raise self._error()
        self._asked = "" if message is None else message[0]
        self._until = math.inf if message is None else time.monotonic() + self.seconds
        try:
            with _undisturbed():
                if message is not None:
                    self.tell(message)
                yield
                if self.failure is not None:  # so what was computed is worth nothing
                    raise self._error()
        except Exception as error:
            if isinstance(error, RankFailed):
                raise
            self._explain(error)
            raise self._error() from self.cause or error
        finally:
            self._until = None

    def _error(self) -> RankFailed:
        found = RankFailed(self.failure)
        found.__cause__ = self.cause
        return found

    def _explain(self, error: Exception) -> None:
        """End the job: because of what the watch finds, else of what went wrong here."""
        deadline = time.monotonic() + 2
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(LOOK / 10)
        self.fail(f"Rank 0 failed, and the others with it: {told(error)}")

    def fail(self, sentence: str) -> None:
        """The job is over."""
        self.failure = self.failure or sentence
        self._kill()

    def dismiss(self) -> None:
        """Tell the other ranks that this is the end."""
        self._closing = True
        if self.failure is None:
            self.failure = CLOSED
            with suppress(OSError):
                self.tell(("end",))

    def close(self) -> None:
        """End the other ranks."""
        self.dismiss()
        deadline = time.monotonic() + GRACE
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(max(deadline - time.monotonic(), 0))
        self._kill()
        if threading.current_thread() is not self._watch:  # which must not outlive the interpreter's threads
            self._watch.join(GRACE)

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        for connection in self.connections:
            with suppress(OSError):
                connection.close()

    def look(self) -> bool:
        """Whether to go on looking: notes what ranks say, and what takes too long."""
        if self.failure is not None:
            return False
        for connection in wait(self.connections, LOOK):
            rank = self.connections.index(connection) + 1  # type: ignore[arg-type]
            self._failed(self._why(rank, connection))  # type: ignore[arg-type]
            return False
        if self._until is not None and time.monotonic() > self._until:
            self._failed(
                f"A rank has not answered {self._asked!r} for {self.seconds:g} seconds, which is the limit "
                "that distributed_timeout sets; all of them are ended."
            )
            return False
        return True

    def _failed(self, sentence: str) -> None:
        """End the job; where the leader does not notice, its process too."""
        if self._closing:
            return
        self.fail(sentence)
        deadline = time.monotonic() + GRACE
        self.give_up()
        while self._until is not None and time.monotonic() < deadline:
            time.sleep(LOOK)
        if self._until is not None:
            print(sentence, file=sys.stderr, flush=True)
            os._exit(1)

    def _why(self, rank: int, connection: Connection) -> str:
        with suppress(EOFError, OSError):
            sentence, is_asked_for = connection.recv()
            self.cause = ValueError(sentence) if is_asked_for else None
            return f"Rank {rank} failed, and the others with it: {sentence}"
        end = "is gone"
        if rank <= len(self.processes):
            with suppress(subprocess.TimeoutExpired):
                code = self.processes[rank - 1].wait(1)
                end = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"Rank {rank} {end}, and the others with it."


def _watch(team: weakref.ref[Team]) -> None:
    """Look after a team for as long as there is one."""
    while (found := team()) is not None and found.look():
        del found


def is_asked_for(error: BaseException) -> bool:
    """Whether it comes of what the user asked, and says so."""
    return isinstance(error, ValueError | OSError)


def told(error: BaseException) -> str:
    """An error in a sentence."""
    return str(error) if is_asked_for(error) else repr(error)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C wait; only the main thread gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
