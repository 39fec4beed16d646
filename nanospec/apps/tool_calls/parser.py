"""The parser of tool calls, for formats that write the arguments of a call as a JSON object.

Arguments are streamed as soon as the head of the call is complete, so they may be invalid JSON if the output
is cut off or the model errs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


class Part(NamedTuple):
    """A part of an output: text for the user, or, if `call` is set, the next part of the arguments, as JSON
    text, of that call (numbered from 0). The first part of a call has its id and the name of the function."""

    text: str
    call: int | None = None
    id: str = ""
    name: str = ""


class CallFormat(NamedTuple):
    """A format of tool calls."""

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
    the part at the start of the pending text and sets the next state, or returns None to wait for more text.
    """

    def __init__(self, format: CallFormat, limit: float) -> None:
        self._format, self._limit, self._count = format, limit, 0
        self._text = ""  # pending
        self._end = format.closing.strip()
        self._state: Callable[[], Part | None] = self._in_text
        if not format.opening:
            self._enter_head("")

    def push(self, text: str, ended: bool = False) -> list[Part]:
        """Return the parts that `text` completes, holding back text that may be the start of a call until the
        output has `ended`. A call that is not valid is returned as text."""
        self._text += text
        parts = list(iter(lambda: self._state(), None))
        if ended and self._state != self._after_arguments:
            rest = self._begin + self._text
            parts.append(Part(rest if not self._count or rest.strip() else ""))
        return [part for part in parts if (part.text or part.name) and (part.call or 0) < self._limit]

    def _enter_head(self, begin: str) -> None:
        """Start to read a call. `begin` is the text before it, which is returned if it is not a call."""
        self._begin, self._object, self._num_scanned = begin, ObjectEnd(), 0
        self._state = self._in_head

    def _in_text(self) -> Part | None:
        text, marker = self._text, self._format.begin
        self._begin = ""
        before, found, after = text.partition(marker)
        if found:
            self._text = after
            self._enter_head(text[len(before.rstrip()) : len(text) - len(after)])
            return Part(before.rstrip())
        held = next(n for n in range(len(marker) - 1, -1, -1) if text.endswith(marker[:n]))
        before = text[: len(text) - held].rstrip()
        self._text = text[len(before) :]
        return Part(before) if before else None

    def _in_head(self) -> Part | None:
        body, begun = self._text.lstrip(SPACE + "["), bool(self._begin or self._count)
        if (match := HEAD.match(body)) and (match[1] or begun):
            self._object = ObjectEnd()
            return self._start(match[1] or match[2], "", body[match.end() :], self._in_arguments)
        if body.startswith("{"):
            if not (end := self._object.push(body[self._num_scanned :])):
                self._num_scanned = len(body)
                return None
            end += self._num_scanned
            call = read_object(body[:end]) or {}
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
            arguments = read_object(arguments) if isinstance(arguments, str) else arguments  # encoded twice
            if isinstance(name, str) and isinstance(arguments, dict):
                text = json.dumps(arguments, ensure_ascii=False)
                return self._start(name, text, body[end:], self._after_arguments)
        elif not body or (begun and NAME_PART.fullmatch(body)):
            return None
        self._state = self._in_text
        return Part(self._begin)

    def _start(self, name: str, arguments: str, rest: str, state: Callable[[], Part | None]) -> Part:
        self._begin, self._text, self._state = "", rest, state
        self._count += 1
        return Part(arguments, self._count - 1, self._format.id_format.format(uuid4().hex), name)

    def _in_arguments(self) -> Part | None:
        end = self._object.push(self._text)
        text, self._text = self._text[: end or None], self._text[end:] if end else ""
        if end:
            self._state = self._after_arguments
        return Part(text, self._count - 1) if text else None

    def _after_arguments(self) -> Part | None:
        rest = self._text.lstrip(SEPARATORS)
        if rest.startswith('"') and "}" in rest:  # more keys, such as an id
            self._text = rest[rest.index("}") :]
            return Part("")
        if rest.startswith('"') or self._end.startswith(rest) or self._format.begin.startswith(rest):
            return None
        self._text = rest.removeprefix(self._end)
        if rest.startswith("{"):
            self._enter_head("")
        else:
            self._state = self._in_text
        return Part("")


def parse(text: str, new_parser: Callable[[], CallParser] | None) -> tuple[str, list[dict[str, Any]]]:
    """Return the text for the user and the calls, in OpenAI's format, of an output."""
    parts = [Part(text)] if new_parser is None else new_parser().push(text, ended=True)
    calls = [call_object(part.id, part.name) for part in parts if part.name]
    for part in parts:
        if part.call is not None:
            calls[part.call]["function"]["arguments"] += part.text
    return "".join(part.text for part in parts if part.call is None), calls
