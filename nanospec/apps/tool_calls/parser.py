"""The parser of tool calls, for formats that write the arguments of a call as a JSON object.

Arguments are returned while they are generated, once the text before them shows that this is a call. Those of
an output that is cut off, or of a model that writes invalid JSON, may therefore not parse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple
from uuid import uuid4

from .offer import call_object, read_object

SPACE = " \t\r\n"
SEPARATORS = SPACE + "}],;"  # after the arguments of a call
# The usual start of a call, up to the arguments. Objects with other keys are read once they are complete.
HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    r"|([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{)"  # newer Mistral models
)
NAME_PART = re.compile(r"[\w.\-\[\]]*")  # may become a match of the second alternative


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


class CallFormat(NamedTuple):
    """A format of tool calls."""

    name: str  # for error messages
    template: tuple[str, ...]  # regular expressions found in the chat templates of models that use the format
    begin: str  # marker before calls
    call: tuple[str, str, str]  # text before the name, before the arguments, and after them
    opening: str  # text before all calls; if empty, an output that starts with "{" is a call
    separator: str  # text between calls
    closing: str  # text after all calls
    id_format: str = "call_{:.24}"


class ObjectEnd:
    """Finds the end of a JSON object in text that arrives in parts."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def push(self, text: str) -> int:
        """Return the index in `text` after the last character of the object, or 0 if the object continues."""
        for i, character in enumerate(text, 1):
            if self._in_string:
                self._in_string = character != '"' or self._is_escaped
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    return i
        return 0


class CallParser:
    """Splits an output into text and at most `limit` calls; further calls are dropped.

    Whitespace next to a call is dropped, since chat templates add their own. A state is a method that returns
    the parts at the start of the pending text and sets the next state, or returns None to wait for more text.
    """

    def __init__(self, format: CallFormat, limit: float) -> None:
        self._format, self._limit, self._count = format, limit, 0
        self._text = ""  # pending
        self._begin = ""  # text before the current call, returned if it is not a call
        self._end = format.closing.strip()
        self._state: Callable[[], list[Part] | None] = self._in_text if format.opening else self._at_start

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes, holding back text that may be the start of a call."""
        self._text += text
        parts: list[Part] = []
        while (found := self._state()) is not None:
            parts += found
        return [part for part in parts if isinstance(part, Text) or part.number < self._limit]

    def flush(self) -> list[Part]:
        """Return the rest at the end of the output. A call that is not valid is returned as text."""
        text = self._begin + self._text
        if self._state == self._after_arguments or (self._count and not text.strip()):
            return []
        return _text(text)

    def _at_start(self) -> list[Part] | None:
        if not self._text.strip():
            return None
        if self._text.lstrip().startswith("{"):
            return self._enter_head("")
        self._state = self._in_text
        return []

    def _enter_head(self, begin: str) -> list[Part]:
        self._begin, self._object, self._num_scanned = begin, ObjectEnd(), 0
        self._state = self._in_head
        return []

    def _in_text(self) -> list[Part] | None:
        text, marker = self._text, self._format.begin
        at = text.find(marker)
        lengths = range(min(len(marker) - 1, len(text)), 0, -1)
        held = next((n for n in lengths if text.endswith(marker[:n])), 0)  # may be the start of the marker
        before = text[: at if at >= 0 else len(text) - held].rstrip()
        if at < 0:
            self._text = text[len(before) :]
            return _text(before) or None
        self._text = text[at + len(marker) :]
        self._enter_head(text[len(before) : at + len(marker)])
        return _text(before)

    def _in_head(self) -> list[Part] | None:
        body = self._text.lstrip(SPACE + "[")
        if match := HEAD.match(body):
            self._object = ObjectEnd()
            return [self._start(match[1] or match[2], body[match.end() :], self._in_arguments)]
        if body.startswith("{"):
            if not (end := self._object.push(body[self._num_scanned :])):
                self._num_scanned = len(body)
                return None
            end += self._num_scanned
            call = read_object(body[:end]) or {}
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
            arguments = read_object(arguments) if isinstance(arguments, str) else arguments  # encoded twice
            if isinstance(name, str) and isinstance(arguments, dict):
                start = self._start(name, body[end:], self._after_arguments)
                return [start, CallArguments(start.number, json.dumps(arguments, ensure_ascii=False))]
        elif NAME_PART.fullmatch(body):
            return None
        begin, self._begin = self._begin, ""
        self._state = self._in_text
        return _text(begin)

    def _start(self, name: str, rest: str, state: Callable[[], list[Part] | None]) -> CallStart:
        self._begin, self._text, self._state = "", rest, state
        self._count += 1
        return CallStart(self._count - 1, self._format.id_format.format(uuid4().hex), name)

    def _in_arguments(self) -> list[Part] | None:
        end = self._object.push(self._text)
        text, self._text = self._text[: end or None], self._text[end:] if end else ""
        if end:
            self._state = self._after_arguments
        return [CallArguments(self._count - 1, text)] if text else None

    def _after_arguments(self) -> list[Part] | None:
        rest = self._text.lstrip(SEPARATORS)
        if rest.startswith('"') and "}" in rest:  # more keys, such as an id
            self._text = rest[rest.index("}") :]
            return []
        if rest.startswith('"') or self._end.startswith(rest) or self._format.begin.startswith(rest):
            return None
        self._text = rest.removeprefix(self._end)
        if rest.startswith("{"):
            return self._enter_head("")
        self._state = self._in_text
        return []


def parse(
    pieces: Iterable[str], new_parser: Callable[[], CallParser] | None
) -> tuple[str, list[dict[str, Any]]]:
    """Return the text for the user and the calls, in OpenAI's format, of an output in pieces."""
    if new_parser is None:
        return "".join(pieces), []
    parser, text, calls = new_parser(), "", list[dict[str, Any]]()
    for part in chain(*map(parser.push, pieces), parser.flush()):
        if isinstance(part, Text):
            text += part.text
        elif isinstance(part, CallStart):
            calls.append(call_object(part.id, part.name))
        else:
            calls[-1]["function"]["arguments"] += part.text
    return text, calls


def _text(text: str) -> list[Part]:
    return [Text(text)] if text else []
