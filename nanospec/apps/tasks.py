"""Parse the requests of the server and of batches into prompts and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..config import SamplingParams
from ..extras.grammar.response_format import validate
from ..text import shown
from .openai_format import normalize_messages
from .options import did_you_mean
from .tool_calls import Parser
from .tool_calls.offer import ToolSet

ONE_OF = 'a request must be a JSON object with either "prompt" or "messages"'


@dataclass
class Task:
    """A request: a `prompt` (text or token ids) or `messages`. `index`, `names`, `url` and `key` describe its
    line in a batch."""

    index: int  # line number, from 0
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: ToolSet | None = None  # only in OpenAI's format
    parser: Callable[[], Parser] | None = None  # set with the model, if there are tools
    raw: bool = False  # continue the text instead of applying the chat template
    names: Mapping[str, Any] = field(default_factory=dict)  # the line's custom_id and id
    url: str = ""  # endpoint of a line in OpenAI's format, also that of its result; "" in nanospec's format
    key: str = ""  # fingerprint of the line, its parameters and the model


def parse_task(
    request: Mapping[str, Any], params: SamplingParams, system: str | None = None, raw: bool = False,
    known: tuple[str, ...] = (),
) -> Task:  # fmt: skip
    """Parse a request; `params` holds the defaults of its sampling fields. Raises ValueError, which for an
    unknown field may suggest one of `known`."""
    if ("prompt" in request) == ("messages" in request):
        raise ValueError(ONE_OF + (f", got {shown(list(request))}." if request else "."))
    others = {name: value for name, value in request.items() if name not in ("prompt", "messages")}
    sampling = {name: value for name, value in others.items() if not isinstance(value, ToolSet)}
    parameters = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(sampling.keys() - parameters):
        names = {"prompt", "messages", *known, *parameters}
        hint = did_you_mean(unknown[0], names) or f"; known fields are {', '.join(sorted(names))}."
        raise ValueError(f"unknown field {shown(unknown[0])}{hint}")
    if "response_format" in sampling:
        sampling["response_format"] = validate(sampling["response_format"])
    task = Task(0, replace(params, **sampling), request.get("prompt"), tools=request.get("tools"), raw=raw)
    if "messages" in request:
        task.messages = with_system(normalize_messages(request["messages"]), system)
    elif isinstance(prompt := task.prompt, str):
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError('"prompt" contains an unpaired surrogate, which is not a character; remove it.')
        if system and not raw:
            message = {"role": "user", "content": prompt}
            task.prompt, task.messages = None, with_system([message], system)
    elif not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise ValueError('"prompt" must be a string or a list of token ids.')
    return task


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Prepend a system message to a conversation without one."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]
