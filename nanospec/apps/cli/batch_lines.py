"""Parse the lines of a batch, in nanospec's format or OpenAI's (`docs/batches.md`).

Lines end at "\\n" alone. All lines are read and checked before a model is loaded.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from typing import Any, BinaryIO

from ...config import SamplingParams
from ...extras.grammar.response_format import checked
from ...text import shown
from ..json_input import strict_json
from ..serve.openai_format import CHAT, COMPLETIONS, conversation, in_our_words
from .options import did_you_mean

MAX_LINE = 32 << 20  # bytes: a few times what the longest windows hold
NAMES = ("custom_id", "id")  # the user's own names of a request, copied to its result
ONE_OF = 'a request is a JSON object with either "prompt" or "messages"'


class LineError(ValueError):
    """A line of a file is not usable; the message names the line."""


@dataclass
class Task:
    """The request of one line: a `prompt` (a text or token ids) or `messages`."""

    index: int  # number of the line, from 0
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False  # continue the text instead of applying the chat template
    names: Mapping[str, Any] = field(default_factory=dict)  # those of `NAMES` that the line has
    url: str = ""  # of OpenAI's format, whose results have the same format; "" for ours
    key: str = ""  # fingerprint of the line, its parameters and the model


@dataclass(frozen=True)
class Defaults:
    """Settings of lines that do not set them."""

    params: SamplingParams  # of lines in our format
    given: Mapping[str, Any]  # the sampling options that were set; OpenAI's lines take these alone
    system: str | None = None
    raw: bool = False
    model: str = ""  # fingerprint of the model and of the options that change results


def opened(source: str) -> AbstractContextManager[BinaryIO]:
    """Open a file to read, or standard input for "-". Raises ValueError if that is closed."""
    if source != "-":
        return open(source, "rb")
    if sys.stdin is None:
        raise ValueError("standard input is closed.")
    return nullcontext(sys.stdin.buffer)


def place(source: str, number: int) -> str:
    """Return the name of a line in messages."""
    return f"{'standard input' if source == '-' else source} line {number}"


def read_tasks(source: str, defaults: Defaults) -> list[Task]:
    """Read all requests of a file. Raises LineError."""
    tasks: list[Task] = []
    named: dict[str, Task] = {}
    for number, line in read_lines(source):
        where = place(source, number)
        try:
            asked = strict_json(line)
        except ValueError as error:
            raise LineError(f"{where} is no JSON: {error}.") from None
        try:
            task = _task(number - 1, asked, defaults)
            name = json.dumps(task.names.get("custom_id"))
            first = named.setdefault(name, task)  # results in OpenAI's format have no other name
            if name != "null" and first is not task and (task.url or first.url):
                said = f"custom_id {name} is that of line {first.index + 1} too"
                raise ValueError(f"{said}; give each its own.")
        except (ValueError, TypeError) as error:
            raise LineError(f"{where}: {error}") from None
        tasks.append(task)
    return tasks


def read_lines(source: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank with their numbers, from 1, without a byte-order mark.
    Raises LineError for a line above `MAX_LINE` before all of it is read."""
    with opened(source) as file:
        for number in count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                what = f"is longer than {MAX_LINE >> 20} MB, the limit of a request"
                raise LineError(f"{place(source, number)} {what}.")
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip(b" \t\r\n"):
                yield number, line.removesuffix(b"\n")


def _task(index: int, line: Any, defaults: Defaults) -> Task:
    if not isinstance(line, dict):
        raise ValueError(f"{ONE_OF}.")
    names = {name: line[name] for name in NAMES if name in line}
    if "body" in line or "url" in line:
        task = _from_openai(line, defaults)
    else:
        request = {name: value for name, value in line.items() if name not in NAMES}
        task = ask(request, defaults.params, defaults.system, defaults.raw, NAMES)
    task.index, task.names = index, names
    asked = [defaults.model, index, names, task.raw, task.prompt, task.messages, asdict(task.params)]
    task.key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return task


def _from_openai(line: Mapping[str, Any], defaults: Defaults) -> Task:
    url, method, body = line.get("url"), line.get("method", "POST"), line.get("body")
    if url not in [CHAT, COMPLETIONS] or method != "POST":
        asked = f"{shown(url)} with {shown(method)}"
        raise ValueError(f'"url" must be "{CHAT}" or "{COMPLETIONS}" and "method" "POST", not {asked}.')
    if not isinstance(body, dict):
        raise ValueError('"body" must be a JSON object, as is sent to the "url".')
    if unknown := sorted(line.keys() - {*NAMES, "method", "url", "body"}):
        raise ValueError(f'unknown field {shown(unknown[0])}; what is asked stands in "body".')
    try:
        request = in_our_words(url, body)
    except ValueError as error:
        raise ValueError(f'in "body": {error}') from None
    params = SamplingParams(**{**({"max_tokens": None} if url == CHAT else {}), **defaults.given})
    return replace(ask(request, params, defaults.system, raw=True, known=NAMES), url=url)


def ask(
    request: Mapping[str, Any],
    params: SamplingParams,
    system: str | None = None,
    raw: bool = False,
    known: tuple[str, ...] = (),
) -> Task:
    """Return the task of a request by the names of `SamplingParams`; `params` holds its defaults. Raises
    ValueError, which may suggest one of `known` for an unknown field."""
    if ("prompt" in request) == ("messages" in request):
        raise ValueError(ONE_OF + (f"; this has {shown(list(request))}." if request else "."))
    options = {name: value for name, value in request.items() if name not in ("prompt", "messages")}
    parameters = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(options.keys() - parameters):
        names = {"prompt", "messages", *known, *parameters}
        said = did_you_mean(unknown[0], names) or f"; known are {', '.join(sorted(names))}."
        raise ValueError(f"unknown field {shown(unknown[0])}{said}")
    if "response_format" in options:
        options["response_format"] = checked(options["response_format"])
    task = Task(0, replace(params, **options), request.get("prompt"), raw=raw)
    if "messages" in request:
        task.messages = with_system(conversation(request["messages"]), system)
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
