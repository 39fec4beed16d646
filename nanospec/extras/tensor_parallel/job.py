"""The job of all ranks, as the leader sees it: its processes, its clock, and why it ended.

A rank that dies, fails or hangs ends the job: the leader gets one error within a bounded time, or, if it
waits for a device that will never answer, its process ends with that sentence. No process is left.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store

from .group import Group

CLOSED = "This model has been closed; make a new LLM."
FAILURE = "nanospec/failure"  # the key in the store of why the first rank to fail did
POLL = 0.2  # seconds between two checks of the processes and the clock
GRACE = 10.0  # seconds that the leader has to notice a failure, and processes have to end when told to


class RankFailed(ConnectionError):
    """A rank died, failed or hangs, which ended the job. The message says which rank, and why."""


class Job:
    """The followers' processes, and whether all ranks can take commands.

    Attributes:
        group: the leader's group, once it is connected.
        failure: why the job has ended, a sentence; None before.
    """

    def __init__(
        self, processes: list[subprocess.Popen[bytes]], store: Store, seconds: float, path: str = ""
    ) -> None:
        """`processes` are the ranks from 1 on, none under torchrun, which ends them itself. A command that
        takes longer than `seconds` has failed. The folder of `path` is removed in the end."""
        self.processes, self.store, self.seconds, self.path = processes, store, seconds, path
        self.group: Group | None = None
        self.failure: str | None = None
        self._cause: Exception | None = None
        self._process = os.getpid()
        self._command, self._deadline = "", -math.inf
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_ranks, daemon=True, name="ranks")
        self._watch.start()

    def check(self) -> None:
        """Raise an error unless all ranks can take a command."""
        if os.getpid() != self._process:
            raise RankFailed("A forked process cannot use the ranks of its parent; make an LLM of its own.")
        if self.failure is not None:
            kind = RuntimeError if self.failure == CLOSED else RankFailed
            raise kind(self.failure) from self._cause

    @contextmanager
    def command(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Run a command of all ranks. An error ends the job and is raised as RankFailed. Ctrl-C ends it too,
        so the engine defers it to the end of its turn: an interrupted rank is out of step with the others."""
        self.check()
        self._command = name
        self._deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        try:
            yield
        except Exception as error:
            self._cause = error
            patience = time.monotonic() + 2  # another rank's failure may have caused it
            while self.failure is None and time.monotonic() < patience:
                time.sleep(POLL / 10)
            self.end(_failure(0, error))
        except BaseException:
            self.end(f"{name!r} was interrupted, and with it all ranks.")
            raise
        finally:
            self._deadline = -math.inf
        self.check()  # without a rank, what was computed is wrong

    def end(self, sentence: str) -> None:
        """End the job, and kill what is left of it."""
        self.failure = self.failure or sentence
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        if self.path:
            shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)

    def close(self) -> None:
        """Have the followers end, and disconnect from them."""
        self._closed.set()
        self._watch.join()
        if self.group is not None:
            with suppress(RuntimeError):
                if self.failure is None:
                    self.group.send(None)
            self.group.close()
        deadline = time.monotonic() + (GRACE if self.failure is None else 0)
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(max(deadline - time.monotonic(), 0))
        self.end(CLOSED)

    def _watch_ranks(self) -> None:
        """End the job when a rank has failed, and the leader's process if it does not notice."""
        while (failure := self._find_failure()) is None:
            if self._closed.wait(POLL):
                return
        self.end(failure)
        if self.group is not None:
            self.group.close()  # frees a leader that waits for its device
        # A leader that starts may be loading weights.
        patience = time.monotonic() + (GRACE if self._deadline < math.inf else self.seconds)
        while self._deadline > 0 and time.monotonic() < patience:
            time.sleep(POLL)
        if self._deadline > 0:
            print(failure, file=sys.stderr, flush=True)
            os._exit(1)

    def _find_failure(self) -> str | None:
        """Return why the job cannot go on, None if it can."""
        with suppress(RuntimeError):  # torchrun's store may be gone
            if self.store.check([FAILURE]):
                return self.store.get(FAILURE).decode()
        for rank, process in enumerate(self.processes, 1):
            if (code := process.poll()) is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
                return f"Rank {rank} {how}, and the others with it."
        if 0 < self._deadline < time.monotonic():
            return (
                f"A rank has not answered {self._command!r} for {self.seconds:g} seconds, which is the limit "
                "that distributed_timeout sets; all of them are ended."
            )
        return None


def report_failure(store: Store, rank: int, error: Exception) -> None:
    """Tell the leader why a follower ends, unless another one has failed before it."""
    with suppress(RuntimeError):  # the leader, and the store with it, may be gone
        store.compare_set(FAILURE, "", _failure(rank, error))


def _failure(rank: int, error: Exception) -> str:
    """Return an error of a rank as a sentence: without its type, if it is one for the user."""
    message = str(error) if isinstance(error, ValueError | OSError) else repr(error)
    return f"Rank {rank} failed, and the others with it: {message}"
