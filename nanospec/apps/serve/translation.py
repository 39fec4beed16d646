"""Common parts of the APIs whose requests are translated to OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...config import SamplingParams
from ...outputs import Completion, Piece
from ...text.validation import shown
from ..openai_format import IGNORED, MAX_MESSAGES
from ..options import did_you_mean
from ..tool_calls.offer import call_object
from ..tool_calls.parser import Part
from .answers import Format
from .jobs import Delta

# Fields with the same meaning as in a chat completion. Most are extensions of the other APIs.
NOT_SHARED = {"n", "logprobs", "max_tokens", "stop", "response_format"}  # renamed or not supported
SHARED = {field.name for field in fields(SamplingParams)} - NOT_SHARED
SHARED |= {"stream", "chat_template_kwargs", "cache_salt"}
KINDS = {str: "a string", dict: "an object", list: "a non-empty list"}


class Conversation(list[dict[str, Any]]):
    """The messages of a chat completion. Consecutive messages of a role are combined, since templates may
    require alternating roles; those of the assistant without a separator, as they are parts of one output."""

    def add(self, role: str, text: str = "") -> dict[str, Any]:
        """Append text and return its message."""
        if not self or self[-1]["role"] != role:
            self.append({"role": role, "content": ""})
        separator = "" if role == "assistant" else "\n"
        self[-1]["content"] = separator.join(filter(None, (self[-1]["content"], text)))
        return self[-1]

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        self.add("assistant").setdefault("tool_calls", []).append(call_object(call_id, name, arguments))


def shared_fields(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields of a body in `SHARED`. Raises ValueError for others that are not `known`."""
    if unknown := sorted(body.keys() - {*SHARED, *IGNORED, *known}):
        hint = did_you_mean(unknown[0], [*SHARED, *known]) or "."
        raise ValueError(f"unknown field {shown(unknown[0])}{hint}")
    return {name: body[name] for name in SHARED if name in body}


def required(part: Any, name: str, kind: Any = str) -> Any:
    """Return a field of an object. Raises ValueError if it is missing or not of the type `kind`."""
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, kind) or value == []:
        raise ValueError(f'"{name}" must be {KINDS[kind]}, got {shown(value)}.')
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(f"{name} has {len(value)} entries, but the limit is {MAX_MESSAGES}.")
    return value


def tool_fields(
    body: Mapping[str, Any], schema: str, types: Collection[Any], choices: Mapping[str, str]
) -> dict[str, Any]:
    """Return the `tools` and `tool_choice` of a chat completion. Tools have one of the `types` and the field
    `schema`; `choices` renames the types of `tool_choice`, where "function" is that of a named one."""
    tools, choice = [], body.get("tool_choice")
    for tool in required(body, "tools", list) if body.get("tools") else ():
        if not isinstance(tool, dict) or tool.get("type") not in types:
            raise ValueError(f'"tools" contains {shown(tool)}, but only functions are supported.')
        function = {"name": tool.get("name"), "parameters": tool.get(schema)}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    kind: Any = choice.get("type", choice) if isinstance(choice, dict) else choice
    if kind not in [None, *choices]:
        raise ValueError(f'"tool_choice" is {shown(choice)}, but must be one of {", ".join(choices)}.')
    chosen: Any = choices.get(kind)
    if chosen == "function":
        chosen = {"type": "function", "function": {"name": required(choice, "name")}}
    return {"tools": tools, "tool_choice": chosen}


class ItemFormat(Format):
    """The format of an API whose output is a list of items, texts and calls, which are streamed in turn."""

    _response: Callable[[Sequence[Completion]], dict[str, Any]]  # returns the response with all items
    _open: Callable[[Part], Iterator[bytes]]  # appends an item that starts with a part; its first events
    _extend: Callable[[str], bytes]  # returns the event of new text of the last item
    _close: Callable[[], Iterator[bytes]]  # completes the last item, if there is one; its last events

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._items: list[dict[str, Any]] = []  # so far
        self._is_text = False  # whether the last item is a text
        self._text = ""  # of the last item, or the arguments of its call

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        text = Piece(done[0].text, -1)  # `pieces` may lack the end of an incomplete character
        for _ in (*self.update(Delta(0, [text], [], {}, done[0])), *self.end(done)):
            pass  # only the items are needed
        return self._response(done)

    def update(self, delta: Delta) -> Iterator[bytes]:
        for part in self.parts(delta):
            if part.name or (part.call is None and not self._is_text):
                yield from self._close()
                self._is_text, self._text = part.call is None, ""
                yield from self._open(part)
            if part.text:
                self._text += part.text
                yield self._extend(part.text)
