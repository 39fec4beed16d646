"""A request to answer, of the server or of a batch, by the names of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..config import SamplingParams
from ..extras.grammar.response_format import checked
from ..text import shown
from .openai_format import normalize_messages
from .options import did_you_mean

ONE_OF = 'a request is a JSON object with either "prompt" or "messages"'


@dataclass
class Task:
    """A request: a `prompt` (a text or token ids) or `messages`. `index`, `names`, `url` and `key` are of the
    line of a batch."""

    index: int  # number of the line, from 0
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False  # continue the text instead of applying the chat template
    names: Mapping[str, Any] = field(default_factory=dict)  # its custom_id and id
    url: str = ""  # of a line in OpenAI's format, which its result has too; "" in nanospec's format
    key: str = ""  # fingerprint of the line, its parameters and the model


def parse_task(
    request: Mapping[str, Any],
    params: SamplingParams,
    system: str | None = None,
    raw: bool = False,
    known: tuple[str, ...] = (),
) -> Task:
    """Parse a request by the names of `SamplingParams`; `params` holds its defaults. Raises
    ValueError, which may suggest one of `known` for an unknown field."""
    if ("prompt" in request) == ("messages" in request):
        raise ValueError(ONE_OF + (f"; this has {shown(list(request))}." if request else "."))
    sampling = {name: value for name, value in request.items() if name not in ("prompt", "messages")}
    parameters = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(sampling.keys() - parameters):
        names = {"prompt", "messages", *known, *parameters}
        hint = did_you_mean(unknown[0], names) or f"; known are {', '.join(sorted(names))}."
        raise ValueError(f"unknown field {shown(unknown[0])}{hint}")
    if "response_format" in sampling:
        sampling["response_format"] = checked(sampling["response_format"])
    task = Task(0, replace(params, **sampling), request.get("prompt"), raw=raw)
    if "messages" in request:
        task.messages = with_system(normalize_messages(request["messages"]), system)
    elif isinstance(prompt := task.prompt, str):
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError('"prompt" holds half of a surrogate pair, not a character; remove it.')
        if system and not raw:
            message = {"role": "user", "content": prompt}
            task.prompt, task.messages = None, with_system([message], system)
    elif not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise ValueError('"prompt" must be a text or a list of token ids.')
    return task


def with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Put a system message in front of a conversation that has none."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]
