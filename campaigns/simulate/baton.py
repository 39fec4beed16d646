"""Run threads deterministically: one at a time, in an order chosen by a random generator."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence


class Baton:
    """Switches between threads when they call `pause`, and when they acquire or release a `Turns` lock."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._number: dict[int, int] = {}  # thread ident -> number
        self._go: dict[int, threading.Semaphore] = {}
        self._waits_for: dict[int, Turns | None] = {}
        self._back = threading.Semaphore(0)
        self._errors: list[BaseException] = []

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run each body in a thread until all have returned. Raises the first exception of a body."""
        threads = []
        for number, body in enumerate(bodies):
            thread = threading.Thread(target=self._body, args=(number, body), daemon=True)
            thread.start()
            self._back.acquire()  # until the thread is registered and waiting
            threads.append(thread)
        while self._go:
            ready = [i for i, lock in sorted(self._waits_for.items()) if lock is None or lock.owner is None]
            assert ready, "deadlock"
            self._go[self._rng.choice(ready)].release()
            self._back.acquire()
            if self._errors:
                raise self._errors[0]  # the other threads stay blocked
        for thread in threads:
            thread.join()

    def _body(self, number: int, body: Callable[[], None]) -> None:
        self._number[threading.get_ident()] = number
        self._go[number], self._waits_for[number] = threading.Semaphore(0), None
        try:
            self.pause()
            body()
        except BaseException as error:
            self._errors.append(error)
        finally:
            del self._go[number], self._waits_for[number]
            self._back.release()

    def pause(self, lock: Turns | None = None) -> None:
        """Let other threads run, until `lock` is free if given. No effect in threads not started by `run`."""
        number = self._number.get(threading.get_ident())
        if number is not None:
            self._waits_for[number] = lock
            self._back.release()
            self._go[number].acquire()
            self._waits_for[number] = None


class Turns:
    """Replaces `threading.Lock`."""

    owner: int | None = None

    def __init__(self, baton: Baton) -> None:
        self.baton = baton

    def acquire(self, blocking: bool = True) -> bool:
        self.baton.pause()
        while self.owner is not None:
            if not blocking:
                return False
            self.baton.pause(self)
        self.owner = threading.get_ident()
        return True

    def release(self) -> None:
        assert self.owner == threading.get_ident(), "a thread released a lock that it did not hold"
        self.owner = None
        self.baton.pause()

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()
