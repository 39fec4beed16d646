"""Calls that fail, or meanwhile others act, as a scenario has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Injected(Exception):
    """What an "error" raises."""


class Panic(BaseException):
    """What a "panic" raises: no Exception, as what a library in Rust raises is none."""


RAISED: dict[str, type[BaseException]] = {
    "interrupt": KeyboardInterrupt, "error": Injected, "memory": MemoryError, "panic": Panic,
}  # fmt: skip


class Faults:
    """Of one run.

    Attributes:
        over: nothing fails any more.
        raised: what has been raised so far.
    """

    over = False

    def __init__(
        self,
        faults: Sequence[dict[str, Any]],
        seen: Counter[str],
        act: Callable[[dict[str, Any] | None], None],
    ) -> None:
        """`act` is told of each fault, and does what one says that raises nothing; it is called in the middle
        of each call too."""
        self._faults, self._seen, self._act = faults, seen, act
        self._calls: Counter[str] = Counter()
        self.raised: list[BaseException] = []

    def watch(self, owner: Any, name: str) -> None:
        """Have a method fail at its calls of these numbers, before or behind what it does."""
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
        """What was injected, as it is or behind what says more, is no failure; with threads `elsewhere`,
        what another's fault reads as is none either."""
        try:
            yield
        except tuple(RAISED.values()) as error:
            behind: BaseException | None = error
            while behind is not None and behind not in self.raised:
                behind = behind.__cause__ or behind.__context__
            if behind is None and not (elsewhere and self.raised):
                raise AssertionError(f"nobody has injected {error!r}") from error

    def _happen(self, faults: Sequence[dict[str, Any]], late: bool) -> None:
        for fault in faults:
            if fault["late"] == late:
                self._seen[fault["kind"]] += 1
                self._act(fault)
                if fault["kind"] in RAISED:
                    self.raised.append(RAISED[fault["kind"]]("a fault of the simulation"))
                    raise self.raised[-1]
