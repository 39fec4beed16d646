"""Fault injection into method calls, as specified by a scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Injected(Exception):
    """Raised by the fault "error"."""


class Panic(BaseException):
    """Raised by the fault "panic". Not an Exception, like the panics of Rust libraries."""


RAISED: dict[str, type[BaseException]] = {
    "interrupt": KeyboardInterrupt, "error": Injected, "memory": MemoryError, "panic": Panic,
}  # fmt: skip


class Faults:
    """The faults of one run.

    Attributes:
        over: if true, no more faults are injected.
        raised: the exceptions injected so far.
    """

    over = False

    def __init__(
        self,
        faults: Sequence[dict[str, Any]],
        seen: Counter[str],
        act: Callable[[dict[str, Any] | None], None],
    ) -> None:
        """Create the faults. `act` is called with each fault and applies those that raise nothing. It is also
        called with None in the middle of each watched call."""
        self._faults, self._seen, self._act = faults, seen, act
        self._calls: Counter[str] = Counter()
        self.raised: list[BaseException] = []

    def watch(self, owner: Any, name: str) -> None:
        """Wrap a method so that its faults are injected before or after the specified calls."""
        call, faults = getattr(owner, name), [fault for fault in self._faults if fault.get("call") == name]

        def called(*args: Any) -> Any:
            number = self._calls[name]
            self._calls[name] += 1
            now = [fault for fault in faults if fault["number"] == number and not self.over]
            self._happen(now, late=False)
            self._act(None)
            result = call(*args)
            self._happen(now, late=True)
            return result

        setattr(owner, name, called)

    @contextmanager
    def expected(self, elsewhere: bool) -> Iterator[None]:
        """Suppress exceptions that were injected or caused by one. If other threads are running `elsewhere`,
        also suppress the errors that a fault in another thread causes here."""
        try:
            yield
        except tuple(RAISED.values()) as error:
            cause: BaseException | None = error
            while cause is not None and cause not in self.raised:
                cause = cause.__cause__ or cause.__context__
            if cause is None and not (elsewhere and self.raised):
                raise AssertionError(f"{error!r} was not injected") from error

    def _happen(self, faults: Sequence[dict[str, Any]], late: bool) -> None:
        for fault in faults:
            if fault["late"] == late:
                self._seen[fault["kind"]] += 1
                self._act(fault)
                if fault["kind"] in RAISED:
                    self.raised.append(RAISED[fault["kind"]]("injected error"))
                    raise self.raised[-1]
