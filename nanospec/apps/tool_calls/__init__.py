"""Tool calls: the parts of an output that calls functions, and the parsers of the formats that models use.

A parser splits the text of one output into text and calls while it is generated. Each format is one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol


class Text(NamedTuple):
    """Text for the user."""

    text: str


class CallStart(NamedTuple):
    """The start of call `number` (from 0) of the output: its id and the name of the function."""

    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next part of the arguments, as JSON text, of call `number`."""

    number: int
    text: str


Part = Text | CallStart | CallArguments


class Parser(Protocol):
    """Splits the text of one output into parts."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes, holding back text that may be the start of a call."""

    def flush(self) -> list[Part]:
        """Return the rest at the end of the output. A call that is not valid is returned as text."""


class Call(NamedTuple):
    """A complete call."""

    id: str
    name: str
    arguments: str  # JSON


def parse(text: str, make: Callable[[], Parser] | None) -> tuple[str, list[Call]]:
    """Return the text for the user and the calls of a whole output, with a new parser of `make`, if any."""
    if make is None:
        return text, []
    parser = make()
    return join([*parser.push(text), *parser.flush()])


def join(parts: Iterable[Part]) -> tuple[str, list[Call]]:
    """Join the parts of an output: its text and its calls."""
    text, calls = "", dict[int, Call]()
    for part in parts:
        if isinstance(part, Text):
            text += part.text
        elif isinstance(part, CallStart):
            calls[part.number] = Call(part.id, part.name, "")
        else:
            call = calls[part.number]
            calls[part.number] = call._replace(arguments=call.arguments + part.text)
    return text, list(calls.values())
