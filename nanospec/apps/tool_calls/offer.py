"""The functions that a request offers to the model, and earlier calls in its messages, in OpenAI's format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...text.validation import shown

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")  # of a request
NAME = re.compile("[A-Za-z0-9_.-]{1,128}")
TOOL = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "..."}}'
CHOICES = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True)
class ToolSet:
    """The functions that a request offers."""

    tools: list[dict[str, Any]]  # for the chat template
    functions: list[dict[str, Any]]  # "name", "parameters" and "strict" of those that may be called
    required: bool  # the output must be a call
    parallel: bool  # an output may contain several calls


def read_tools(request: Mapping[str, Any]) -> ToolSet | None:
    """Read the `FIELDS` of a request; return None if there are no tools. Raises ValueError."""
    tools, choice, parallel = map(request.get, FIELDS)
    tools, choice = [] if tools is None else tools, "auto" if choice is None else choice
    if not isinstance(parallel, bool | None):
        raise ValueError(f"parallel_tool_calls={shown(parallel)} must be true or false.")
    functions = [_function(tool) for tool in (tools if isinstance(tools, list) else [tools])]
    names = [function["name"] for function in functions]
    if choice == "required" and not tools:
        raise ValueError("tool_choice='required' needs tools, but the request has none.")
    if choice not in ("auto", "none", "required"):
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            raise ValueError(f"tool_choice={shown(choice)} must be {CHOICES} with the name of one of tools.")
        functions = [functions[names.index(name)]]
    if not tools:
        return None
    functions = [] if choice == "none" else functions
    tools = [{**t, "function": {k: v for k, v in t["function"].items() if k != "strict"}} for t in tools]
    return ToolSet(tools, functions, choice not in ("auto", "none"), parallel is not False)


def _function(tool: Any) -> dict[str, Any]:
    """Return the name, parameters and strict of a tool. Raises ValueError."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ValueError(f"tools contains {shown(tool)}, but it must be a list of {TOOL}.")
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        rule = "must consist of 1 to 128 letters, digits, '_', '-' and '.'"
        raise ValueError(f"tools: the name {shown(name)} of a function {rule}.")
    schema = {"additionalProperties": False} if (given := function.get("parameters")) is None else given
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise ValueError(f"tools: parameters={shown(schema)} of {name} must be a JSON schema of an object.")
    return {"name": name, "parameters": {**schema, "type": "object"}, "strict": bool(strict)}


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """Return `tool_calls` of a message for a chat template, which expects arguments as an object. Arguments
    that are not a JSON object, as a model may generate, are unchanged. Raises ValueError."""
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        text = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(text, str | dict) or "name" not in function:
            raise ValueError(f'"messages" contains the call {shown(call)}, but each must be {CALL}.')
        value = read_object(text or "{}") if isinstance(text, str) else text
        read.append({**call, "function": {**function, "arguments": text if value is None else value}})
    return read


def call_object(id: str, name: str, arguments: str = "") -> dict[str, Any]:
    """Return a call in OpenAI's format."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object that a model wrote, which may repeat keys; return None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
