"""Parse the lines of a batch, in nanospec's format or OpenAI's (`docs/batches.md`).

Lines end at "\\n" alone. All lines are read and checked before a model is loaded.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from typing import Any, BinaryIO

from ...config import SamplingParams
from ...text.checks import shown
from ...text.prompts import as_message, with_system
from ...text.strict_json import plain
from ..serve.openai_format import CHAT, COMPLETIONS, conversation, in_our_words
from .parser import did_you_mean

MAX_LINE = 32 << 20  # bytes: some times what the longest windows hold
BLANK = b" \t\r\n"  # what JSON takes for white space
NAMES = ("custom_id", "id")  # the user's own names of a request, carried through
ONE_OF = 'a request is a JSON object with either "prompt" or "messages"'


class LineError(ValueError):
    """What is wrong with a line of a file, in the words of that file."""


@dataclass
class Task:
    """What a line asks.

    Attributes:
        index: the number of the line, from 0.
        prompt: a text or token ids, None if it has `messages`.
        raw: a text is to be continued as it is, not answered by the model's chat template.
        names: the user's own names of it.
        url: of OpenAI's format, "" for ours; its result has the same format.
        key: tells this line, with these names and parameters and this model, from others.
    """

    index: int
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False
    names: Mapping[str, Any] | None = None
    url: str = ""
    key: str = ""


@dataclass(frozen=True)
class Defaults:
    """What holds for lines that do not say otherwise.

    Attributes:
        params: of lines in our format.
        given: the sampling that was asked for expressly; it alone holds for lines in OpenAI's format, besides
            the defaults of that.
        system: the system message of conversations that have none.
        raw: texts are continued as they are.
        model: a fingerprint of the model and of what else changes results.
    """

    params: SamplingParams
    given: Mapping[str, Any]
    system: str | None = None
    raw: bool = False
    model: str = ""


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """Yield a file to be read, or standard input for "-". Raises ValueError if that is closed."""
    if source != "-":
        with open(source, "rb") as file:
            yield file
    elif sys.stdin is None:
        raise ValueError("standard input is closed.")
    else:
        yield sys.stdin.buffer


def place(source: str, number: int) -> str:
    """Return what a line is called in messages."""
    return f"{'standard input' if source == '-' else source} line {number}"


def read_tasks(source: str, defaults: Defaults) -> list[Task]:
    """Read what the lines of a file ask. Raises LineError."""
    tasks: list[Task] = []
    named: dict[str, Task] = {}
    for number, line in read_lines(source):
        where = place(source, number)
        try:
            asked = plain(line)
        except ValueError as error:
            raise LineError(f"{where} is no JSON: {error}.") from None
        try:
            task = _task(number - 1, asked, defaults)
            name = json.dumps((task.names or {}).get("custom_id"))
            first = named.setdefault(name, task)  # in OpenAI's format nothing else tells whose a result is
            if name != "null" and first is not task and (task.url or first.url):
                said = f"custom_id {name} is that of line {first.index + 1} too"
                raise ValueError(f"{said}; give each its own.")
        except (ValueError, TypeError) as error:
            raise LineError(f"{where}: {error}") from None
        tasks.append(task)
    return tasks


def read_lines(source: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1. A byte-order mark and blank lines at the end are
    left out. Raises LineError for other blank lines, and for too long a one before all of it is read."""
    blank = 0  # the first of some blank lines, which may be at the end
    with opened(source) as file:
        for number in count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                what = f"is longer than {MAX_LINE >> 20} MB, the limit of a request"
                raise LineError(f"{place(source, number)} {what}.")
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip(BLANK):
                blank = blank or number
            elif blank:
                raise LineError(f"{place(source, blank)} is empty; every line must be a JSON object.")
            else:
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
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or url not in (CHAT, COMPLETIONS) or line.get("method", "POST") != "POST":
        raise ValueError(f'"url" must be "{CHAT}" or "{COMPLETIONS}" and "method" "POST", not {shown(url)}.')
    if not isinstance(body, dict):
        raise ValueError('"body" must be a JSON object, as is sent to the "url".')
    if unknown := sorted(line.keys() - {*NAMES, "method", "url", "body"}):
        raise ValueError(f'unknown field {shown(unknown[0])}; what is asked stands in "body".')
    try:
        request = in_our_words(url, body)
    except ValueError as error:
        raise ValueError(f'in "body": {error}') from None
    params = SamplingParams(**{**({"max_tokens": None} if url == CHAT else {}), **defaults.given})
    task = ask(request, params, defaults.system, raw=True, known=NAMES)
    task.url = url
    return task


def ask(
    request: Mapping[str, Any],
    params: SamplingParams,
    system: str | None = None,
    raw: bool = False,
    known: tuple[str, ...] = (),
) -> Task:
    """Return what a request in our words asks; `params` holds where it says nothing. Raises ValueError, with
    `known` among the fields that an unknown one may have meant."""
    if ("prompt" in request) == ("messages" in request):
        raise ValueError(ONE_OF + (f"; this has {shown(list(request))}." if request else "."))
    options = {name: value for name, value in request.items() if name not in ("prompt", "messages")}
    parameters = {field.name for field in fields(SamplingParams)}
    if unknown := sorted(options.keys() - parameters):
        names = {"prompt", "messages", *known, *parameters}
        said = did_you_mean(unknown[0], names) or f"; known are {', '.join(sorted(names))}."
        raise ValueError(f"unknown field {shown(unknown[0])}{said}")
    task = Task(0, replace(params, **options), raw=raw)
    if "messages" in request:
        task.messages = with_system(conversation(request["messages"]), system)
        return task
    task.prompt = prompt = request["prompt"]
    if isinstance(prompt, str):
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError('"prompt" holds half of a surrogate pair, not a character; remove it.')
        if system and not raw:
            task.prompt, task.messages = None, with_system(as_message(prompt), system)
    elif not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise ValueError('"prompt" must be a text or a list of token ids.')
    return task
