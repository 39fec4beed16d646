"""Common parts of the translations of other APIs' requests to OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...text import shown
from ..options import did_you_mean

# Fields with the same meaning as in a chat completion. Most are extensions of the other APIs.
SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos",
    "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "num_speculative_tokens", "prediction", "chat_template_kwargs", "cache_salt",
)  # fmt: skip
KINDS = {str: "a string", dict: "an object", list: "a list"}


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
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.add("assistant").setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, text: str) -> None:
        self.append({"role": "tool", "tool_call_id": call_id, "content": text})


def shared_fields(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields of a body in `SHARED`. Raises ValueError for other fields that are not `known`."""
    if unknown := sorted(body.keys() - {*SHARED, *known}):
        hint = did_you_mean(unknown[0], [*SHARED, *known]) or "."
        raise ValueError(f"unknown field {shown(unknown[0])}{hint}")
    return {name: body[name] for name in SHARED if name in body}


def required(part: Any, name: str, kind: Any = str) -> Any:
    """Return a field of an object. Raises ValueError if it is missing or not of the type `kind`."""
    if not isinstance(part, dict) or not isinstance(part.get(name), kind):
        raise ValueError(f'{shown(part)} must have the field "{name}", {KINDS[kind]}.')
    return part[name]


def nonempty_list(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field that is a non-empty list. Raises ValueError if it is not."""
    if not isinstance(body.get(name), list) or not body[name]:
        raise ValueError(f'"{name}" must be a non-empty list, got {shown(body.get(name))}.')
    return list(body[name])


def text_of(content: Any, kinds: Collection[str], separator: str = "") -> str:
    """Return a string, or the joined texts of a list of parts of the given `kinds`. Raises ValueError."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise ValueError(f"content must be text, got {shown(part)}.")
    return separator.join(required(part, "text") for part in parts)


def tool_fields(
    body: Mapping[str, Any], schema: str, types: Collection[Any], choices: Mapping[str, str]
) -> dict[str, Any]:
    """Return the `tools` and `tool_choice` of a chat completion. Tools have one of the `types` and the field
    `schema`; `choices` renames the types of `tool_choice`, where "function" is that of a named one."""
    fields: dict[str, Any] = {}
    for tool in (body.get("tools") and nonempty_list(body, "tools")) or ():
        if not isinstance(tool, dict) or tool.get("type") not in types:
            raise ValueError(f'"tools" contains {shown(tool)}, but only functions are supported.')
        function = {"name": required(tool, "name"), "parameters": tool.get(schema)}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        fields.setdefault("tools", []).append({"type": "function", "function": function})
    if (choice := body.get("tool_choice")) is not None:
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind not in [*choices]:
            raise ValueError(f'"tool_choice" is {shown(choice)}, but must be one of {", ".join(choices)}.')
        fields["tool_choice"] = choices[kind]
        if choices[kind] == "function":
            fields["tool_choice"] = {"type": "function", "function": {"name": required(choice, "name")}}
    return fields
