"""The lines of a batch: what each of them asks. `docs/batches.md` describes them.

Lines end at "\\n" alone. All of them are read and checked before a model is loaded.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from ...config import SamplingParams
from ...text.checks import shown
from ...text.prompts import as_message, with_system
from ...text.strict_json import plain
from .batch_openai import from_openai
from .parser import did_you_mean

MAX_LINE = 32 << 20  # bytes: some times what the longest windows hold
BLANK = b" \t\r\n"  # what JSON takes for white space
PARAMETERS = frozenset(field.name for field in fields(SamplingParams))
NAMES = ("custom_id", "id")  # the user's own names of a request, carried through


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
        model: tells the model and what else changes results from others.
        fields: what a request may hold beside `PARAMETERS` and what is to be answered, for hints.
    """

    params: SamplingParams
    given: Mapping[str, Any]
    system: str | None = None
    raw: bool = False
    model: str = ""
    fields: tuple[str, ...] = NAMES


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """A file to be read, or standard input for "-". ValueError if that is closed."""
    if source != "-":
        with open(source, "rb") as file:
            yield file
    elif sys.stdin is None:
        raise ValueError("standard input is closed.")
    else:
        yield sys.stdin.buffer


def read_lines(source: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1. Blank lines at the end are none. Raises LineError for
    others, and for what is too long to be a request before all of it is read."""
    blank = 0  # the first of some blank lines, which may be at the end
    with opened(source) as file:
        for number in count(1):
            line = file.readline(MAX_LINE + 1)
            if len(line) > MAX_LINE:
                what = f"is longer than {MAX_LINE >> 20} MB, the limit of a request"
                raise LineError(f"{place(source, number)} {what}.")
            if not line:
                return
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip(BLANK):
                blank = blank or number
                continue
            if blank:
                raise LineError(f"{place(source, blank)} is empty; every line must be a JSON object.")
            yield number, line.removesuffix(b"\n")


def place(source: str, number: int) -> str:
    """What a line is called in messages."""
    return f"{'standard input' if source == '-' else source} line {number}"


def read_tasks(source: str, defaults: Defaults) -> list[Task]:
    """What the lines ask. A byte-order mark and blank lines at the end do no harm. Raises LineError."""
    tasks = []
    for number, line in read_lines(source):
        where = place(source, number)
        try:
            asked = plain(line)
        except ValueError as error:
            raise LineError(f"{where} is no JSON: {error}.") from None
        try:
            tasks.append(_task(number - 1, asked, defaults))
        except (ValueError, TypeError) as error:
            raise LineError(f"{where}: {error}") from None
    _check_names(tasks, source)
    return tasks


def _check_names(tasks: Iterable[Task], source: str) -> None:
    """In OpenAI's format nothing but its custom_id tells whose a result is."""
    first: dict[str, Task] = {}
    for task in tasks:
        name = json.dumps((task.names or {}).get("custom_id"))
        other = first.setdefault(name, task)
        if name != "null" and other is not task and (task.url or other.url):
            where, before = place(source, task.index + 1), other.index + 1
            raise LineError(f"{where}: custom_id {name} is that of line {before} too; give each its own.")


def _task(index: int, line: Any, defaults: Defaults) -> Task:
    if not isinstance(line, dict):
        raise ValueError('a request is a JSON object with either "prompt" or "messages".')
    names = {name: line[name] for name in NAMES if name in line}
    if "body" in line or "url" in line:
        url, request = from_openai(line)
        given = {**({"max_tokens": None} if "chat" in url else {}), **defaults.given}
        task = ask(index, request, SamplingParams(**given), replace(defaults, raw=True))
        task.url = url
    else:
        request = {name: value for name, value in line.items() if name not in NAMES}
        task = ask(index, request, defaults.params, defaults)
    task.names = names
    asked = [defaults.model, index, names, task.raw, task.prompt, task.messages, asdict(task.params)]
    task.key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return task


def ask(index: int, request: Mapping[str, Any], params: SamplingParams, defaults: Defaults) -> Task:
    """What a request in our words asks; `params` holds where it says nothing. Raises ValueError."""
    if ("prompt" in request) == ("messages" in request):
        has = f"; this has {shown(list(request))}" if request else ""
        raise ValueError(f'a request is a JSON object with either "prompt" or "messages"{has}.')
    options = {name: value for name, value in request.items() if name not in ("prompt", "messages")}
    if unknown := sorted(options.keys() - PARAMETERS):
        known = {"prompt", "messages", *defaults.fields, *PARAMETERS}
        said = did_you_mean(unknown[0], known) or f"; known are {', '.join(sorted(known))}."
        raise ValueError(f"unknown field {shown(unknown[0])}{said}")
    task = Task(index, replace(params, **options), raw=defaults.raw)
    if "messages" in request:
        task.messages = with_system(_checked(request["messages"]), defaults.system)
    else:
        task.prompt = prompt = request["prompt"]
        if not isinstance(prompt, str) and not _are_ids(prompt):
            raise ValueError('"prompt" must be a text or a list of token ids.')
        if isinstance(prompt, str) and any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError('"prompt" holds half of a surrogate pair, not a character; remove it.')
        if isinstance(prompt, str) and defaults.system and not defaults.raw:
            task.prompt, task.messages = None, with_system(as_message(prompt), defaults.system)
    return task


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one {"role": ..., "content": ...}.')
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f'{shown(message)} is no message; it needs a "role" and a "content".')
    return messages


def identity(folder: Path, settings: Iterable[tuple[str, Any]]) -> str:
    """What tells a model and the settings that change its results from others: its small files, and the
    sizes of its weights."""
    digest = hashlib.sha256(repr(sorted(settings, key=lambda named: named[0])).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja"):
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()
