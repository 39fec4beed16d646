"""A lock for which whoever has waited gets it before whoever gives it back."""

from __future__ import annotations

from threading import Lock
from typing import Any


class Turns:
    """`with turns: ...`. One thread waits for the lock, the others for being next: with one lock alone, a
    thread that gives it back and wants it again at once gets it before all others. Not reentrant."""

    def __init__(self) -> None:
        self._next, self._lock = Lock(), Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *exception: Any) -> None:
        self._lock.release()

    def take(self) -> bool:
        """Whether the lock was free, and is taken now; it ends with `__exit__`."""
        return self._lock.acquire(blocking=False)
