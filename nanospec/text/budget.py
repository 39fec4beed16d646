"""How much one rendering of a chat template may take; what would be too much is known before it is made.

A value weighs as many characters as it would have if it were written out: a list that holds the same list
twice, and so on for sixty levels, takes little memory and ends no `tojson`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, MappingView
from typing import Any

SECONDS = 2.0  # of the processor: on a busy machine, nothing else is refused than on an idle one
LARGEST = 1 << 23  # characters and elements of one value
IN_ALL = 1 << 28  # of all values together
WRITTEN = 1 << 26  # characters put out, those of macros and blocks again where these are
BITS = 4096  # of an integer
LONGEST = 1 << 16  # characters of a template
ELEMENT = 16  # what an element weighs beside its content
STEPS = 1 << 30  # of one search
CONTAINERS = (list, tuple, dict, set, frozenset, Mapping, MappingView)
SIZED = (str, *CONTAINERS)


class TooMuch(Exception):
    """A limit is reached; says which."""


class Budget:
    """What is left for one rendering."""

    def __init__(self) -> None:
        self.begun = time.thread_time()
        self.deadline = time.monotonic() + SECONDS
        self.made = self.written = 0
        self.known: dict[int, tuple[object, int]] = {}  # by id: a container, so that it lives, and its weight

    def tick(self, written: int = 0) -> None:
        self.written += written
        if self.written > WRITTEN:
            raise TooMuch(f"it puts out more than {WRITTEN} characters")
        if time.monotonic() > self.deadline:
            left = SECONDS - (time.thread_time() - self.begun)
            if left <= 0:
                raise TooMuch(f"it takes more than {SECONDS:g} seconds")
            self.deadline = time.monotonic() + left  # others had the processor meanwhile

    def weight(self, value: object) -> int:
        """Characters of a value, written out, and `ELEMENT` for each element."""
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, CONTAINERS):
            return 1
        found = self.known.get(id(value))
        if found is None:
            parts: Any = value.items() if isinstance(value, Mapping) else value
            many = len(value) * ELEMENT > LARGEST  # no need to look into it
            found = value, LARGEST + 1 if many else 1 + sum(ELEMENT + self.weight(part) for part in parts)
            self.known[id(value)] = found
        return found[1]

    def fits(self, weight: int) -> None:
        if weight > LARGEST:
            raise TooMuch(f"it makes a value of more than {LARGEST} characters or elements")

    def keep(self, value: Any) -> Any:
        """A new value, if it is within the limits; what would give its elements one by one as a list."""
        if not isinstance(value, str):
            if isinstance(value, int) and value.bit_length() > BITS:
                raise TooMuch(f"it makes an integer of more than {BITS} bits")
            if isinstance(value, Iterator):
                value = list(self._counted(value))
            self.fits(self.weight(value))
        elif len(value) > LARGEST:
            self.fits(len(value))
        self.made += len(value) if isinstance(value, SIZED) else 1
        if self.made > IN_ALL:
            raise TooMuch(f"it makes values of more than {IN_ALL} characters and elements in all")
        self.tick()
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        total = 0
        for value in values:
            total += ELEMENT + self.weight(value)
            self.fits(total)
            self.tick()
            yield value


class Local(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.budget = Budget()


now = Local()


def check(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter, or of a method of the text that is the first, unless these would make it
    give far more than it is given, or take far longer."""
    budget, values = now.budget, [*args, *named.values()]
    texts = [len(value) for value in values if isinstance(value, str)]
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "batch" | "slice" | "round" | "truncate" | "indent":
            lines = 1 + str(args[0]).count("\n") if name == "indent" else 1
            widest = max((abs(value) for value in values[1:] if isinstance(value, int)), default=0)
            budget.fits(lines * max(widest, *texts, 0))
            if name == "round" and widest > BITS:
                raise TooMuch(f"it rounds to {widest} digits")
        case "join":
            args = (args[0], list(args[1]), *args[2:]) if isinstance(args[0], str) and args[1:] else args
            items = max(args[:2], key=lambda value: isinstance(value, CONTAINERS))
            between = max(texts, default=0)
            budget.fits(budget.weight(items) + between * (len(items) if hasattr(items, "__len__") else 1))
        case "replace":
            old = 1 if named or len(texts) < 3 else max(1, texts[1])
            budget.fits((max(texts[:1], default=0) // old + 1) * max(texts[1:], default=0))
        case "strip" | "lstrip" | "rstrip" | "trim" | "rfind" | "rindex" | "rsplit" | "rpartition":
            if texts and texts[0] * max(texts[1:], default=0) > STEPS:
                raise TooMuch(f"it searches in more than {STEPS} steps")
        case "format":
            check_format(str(args[0]), "%", (args[1:], named))
        case "sum":
            if any(isinstance(value, CONTAINERS) for value in values[1:]):
                raise TooMuch("it adds up lists")
    return args


def check_format(form: str, mark: str, values: Any) -> None:
    """Raise TooMuch where a format asks for great widths, or many times for great values."""
    computed = r"%[-#0 +]*(\d*\.)?\*" if mark == "%" else r"\{[^{}]*\{"
    if re.search(computed, form.replace("{{", "") if mark == "{" else form):
        raise TooMuch("it computes the width of a format")
    widths = sum(int(digits[:9]) for digits in re.findall(r"\d+", form))
    now.budget.fits(len(form) + widths + form.count(mark) * now.budget.weight(values))
