"""The leader's supervision of all ranks: their processes, the time limit of commands, and failures.

If a rank dies, fails or hangs, the job ends and all processes are stopped. The leader raises one error within
a bounded time. If the leader itself hangs on its device, its process prints the error and exits.
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

CLOSED = "This model has been closed; create a new LLM."
FAILURE = "nanospec/failure"  # the store's key for the error of the first rank that fails
POLL = 0.2  # seconds between two checks of the processes and the time limit
GRACE = 10.0  # seconds for the leader to notice a failure, and for followers to exit after the last command


class RankFailed(ConnectionError):
    """Raised when a rank died, failed or timed out. The message names the rank and the reason."""


class Job:
    """The followers' processes and the state of the job.

    Attributes:
        group: the leader's group, once it is connected.
        failure: the error message that ended the job; None while it runs.
    """

    def __init__(
        self, processes: list[subprocess.Popen[bytes]], store: Store, seconds: float, path: str = ""
    ) -> None:
        """Start watching `processes`, ranks 1 and up; empty under torchrun, which stops them itself. A
        command fails after `seconds`. `close` removes the folder that contains `path`."""
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
        """Raise an error if the job has ended, or in a forked process."""
        if os.getpid() != self._process:
            raise RankFailed("A forked process cannot use the ranks of its parent; create a new LLM in it.")
        if self.failure is not None:
            kind = RuntimeError if self.failure == CLOSED else RankFailed
            raise kind(self.failure) from self._cause

    @contextmanager
    def command(self, name: str, seconds: float | None = None) -> Iterator[None]:
        """Wrap a command that all ranks run. An exception in it ends the job and is raised as RankFailed.
        Ctrl-C also ends it, as the ranks are out of step; the engine defers Ctrl-C to the end of a step."""
        self.check()
        self._command = name
        self._deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        try:
            yield
        except Exception as error:
            self._cause = error
            patience = time.monotonic() + 2  # wait for the failure of another rank, which may be the cause
            while self.failure is None and time.monotonic() < patience:
                time.sleep(POLL / 10)
            self.end(_failure(0, error))
        except BaseException:
            self.end(f"{name!r} was interrupted, so all ranks were stopped.")
            raise
        finally:
            self._deadline = -math.inf
        self.check()  # after a failure, the results of the command are invalid

    def end(self, sentence: str) -> None:
        """End the job with an error message, and kill the remaining processes."""
        self.failure = self.failure or sentence
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """Stop the followers and disconnect from them."""
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
        self._remove_store()

    def _remove_store(self) -> None:
        """Remove the store's folder. The leader must not wait for the ranks any more, as using a store
        without a file blocks for minutes."""
        if self.path:
            shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)

    def _watch_ranks(self) -> None:
        """End the job when a rank has failed, and exit the leader's process if it stays blocked."""
        while (failure := self._find_failure()) is None:
            if self._closed.wait(POLL):
                return
        self.end(failure)
        if self.group is not None:
            self.group.close()  # unblocks a leader that waits for its device
        # The command "start" has no deadline: the leader may be loading weights.
        patience = time.monotonic() + (GRACE if self._deadline < math.inf else self.seconds)
        while self._deadline > 0 and time.monotonic() < patience:
            time.sleep(POLL)
        if self._deadline > 0:
            print(failure, file=sys.stderr, flush=True)
            self._remove_store()
            os._exit(1)

    def _find_failure(self) -> str | None:
        """Return the error message of a failed rank or an expired time limit, else None."""
        with suppress(RuntimeError):  # torchrun may have closed its store
            if self.store.check([FAILURE]):
                return self.store.get(FAILURE).decode()
        for rank, process in enumerate(self.processes, 1):
            if (code := process.poll()) is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
                return f"Rank {rank} {how}, so all ranks were stopped."
        if 0 < self._deadline < time.monotonic():
            return (
                f"A rank did not complete {self._command!r} within distributed_timeout={self.seconds:g} "
                "seconds, so all ranks were stopped."
            )
        return None


def report_failure(store: Store, rank: int, error: Exception) -> None:
    """Report a follower's error to the leader, unless another rank has failed before."""
    with suppress(RuntimeError):  # the store is closed if the leader has exited
        store.compare_set(FAILURE, "", _failure(rank, error))


def _failure(rank: int, error: Exception) -> str:
    """Return the error message for a rank's exception. User errors (ValueError, OSError) omit the type."""
    message = str(error) if isinstance(error, ValueError | OSError) else repr(error)
    return f"Rank {rank} failed, so all ranks were stopped: {message}"
