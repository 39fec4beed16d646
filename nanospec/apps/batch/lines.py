"""Parse the requests of a batch and format its results, in nanospec's format or OpenAI's (`docs/batches.md`).

Lines end at "\\n" alone. All lines are read and checked before a model is loaded.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO

from ...config import SamplingParams
from ...text.validation import shown
from ..json_input import strict_json
from ..openai_format import CHAT, COMPLETIONS, choice, response_header, translate_request, usage
from ..tasks import ONE_OF, Task, parse_task

if TYPE_CHECKING:
    from ...outputs import RequestOutput
    from ...text.tokenizer import Tokenizer

MAX_LINE = 32 << 20  # bytes; several times the longest context lengths
NAMES = ("custom_id", "id")  # the user's names for a request, copied to its result


class LineError(ValueError):
    """A line of a file is invalid; the message names the line."""


@dataclass(frozen=True)
class Defaults:
    """Defaults for lines that do not set a parameter."""

    params: SamplingParams
    sets_max_tokens: bool = False  # whether max_tokens also applies to lines in OpenAI's format
    system: str | None = None
    raw: bool = False
    model: str = ""  # fingerprint of the model and the options that affect results


def open_input(source: str) -> AbstractContextManager[BinaryIO]:
    """Open a file for reading, or standard input for "-". Raises ValueError if standard input is closed."""
    if source != "-":
        return open(source, "rb")
    if sys.stdin is None:
        raise ValueError("standard input is closed.")
    return nullcontext(sys.stdin.buffer)


def line_name(source: str, number: int) -> str:
    """Return the name of a line for messages."""
    return f"{'standard input' if source == '-' else source} line {number}"


def read_tasks(source: str, defaults: Defaults) -> list[Task]:
    """Parse all requests of a file. Raises LineError."""
    tasks: list[Task] = []
    by_custom_id: dict[str, Task] = {}
    for number, line in read_lines(source):
        name = line_name(source, number)
        try:
            request = strict_json(line)
        except ValueError as error:
            raise LineError(f"{name} is not valid JSON: {error}.") from None
        try:
            task = _task(number - 1, request, defaults)
            custom_id = json.dumps(task.names.get("custom_id"))
            first = by_custom_id.setdefault(custom_id, task)  # identifies results in OpenAI's format
            if custom_id != "null" and first is not task and (task.url or first.url):
                other = f"line {first.index + 1}"
                raise ValueError(f"custom_id {custom_id} is also used by {other}, but must be unique.")
        except (ValueError, TypeError) as error:
            raise LineError(f"{name}: {error}") from None
        tasks.append(task)
    return tasks


def read_lines(source: str) -> Iterator[tuple[int, bytes]]:
    """Yield the nonblank lines of a file with their numbers, from 1, without a byte-order mark. Raises
    LineError for a line longer than `MAX_LINE`, without reading all of it."""
    with open_input(source) as file:
        for number in count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                limit = f"{MAX_LINE >> 20} MB, the limit for a request"
                raise LineError(f"{line_name(source, number)} is longer than {limit}.")
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
        task = parse_task(request, defaults.params, defaults.system, defaults.raw, NAMES)
    task.index, task.names = index, names
    content = [defaults.model, index, names, task.raw, task.prompt, task.messages, asdict(task.params)]
    content += [task.template_options] if task.template_options else []
    content += [asdict(task.tools)] if task.tools else []
    task.key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return task


def _from_openai(line: Mapping[str, Any], defaults: Defaults) -> Task:
    url, method, body = line.get("url"), line.get("method", "POST"), line.get("body")
    if url not in [CHAT, COMPLETIONS] or method != "POST":
        wrong = f"{shown(url)} with {shown(method)}"
        raise ValueError(f'"url" must be "{CHAT}" or "{COMPLETIONS}" and "method" "POST", not {wrong}.')
    if not isinstance(body, dict):
        raise ValueError('"body" must be a JSON object, the body of a request to the "url".')
    if unknown := sorted(line.keys() - {*NAMES, "method", "url", "body"}):
        raise ValueError(f'unknown field {shown(unknown[0])}; request parameters belong in "body".')
    try:
        request = translate_request(url, body)
    except ValueError as error:
        raise ValueError(f'in "body": {error}') from None
    params = defaults.params
    if not defaults.sets_max_tokens:
        params = replace(params, max_tokens=None if url == CHAT else SamplingParams.max_tokens)
    return replace(parse_task(request, params, defaults.system, raw=True, known=NAMES), url=url)


def result_prefix(task: Task) -> bytes:
    """Return the start of a task's result, up to and including the first `", `."""
    if task.url:
        return f'{{"id": "batch_req_{task.key}", '.encode()
    return f'{{"index": {task.index}, "key": "{task.key}", '.encode()


def result_line(task: Task, output: RequestOutput, model: str, tokenizer: Tokenizer) -> bytes:
    """Return the result of a request as a line in the request's format."""
    if task.url:
        line = _to_openai(task, output, model, tokenizer)
    else:
        line = {"index": task.index, "key": task.key, **task.names, **output.outputs[0].to_dict()}
        if len(output.outputs) > 1:
            line["outputs"] = [completion.to_dict() for completion in output.outputs]
    text = json.dumps(line, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # unpaired surrogates in a name become JSON escapes


def _to_openai(task: Task, output: RequestOutput, model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    error, number = next((done.error for done in output.outputs if done.error), None), task.params.logprobs
    body = {
        **response_header(task.url, output.request_id, model),
        "choices": [choice(task.url, done, number, tokenizer, task.parser) for done in output.outputs],
        "usage": usage(len(output.prompt_token_ids), output.outputs, len(output.outputs)),
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {
        "id": f"batch_req_{task.key}",
        "custom_id": task.names.get("custom_id"),
        "response": None if error else response,
        "error": {"code": "engine_error", "message": error} if error else None,
    }


def num_tokens(output: RequestOutput) -> int:
    """Return the total number of tokens in the outputs of a request."""
    return sum(len(done.token_ids) for done in output.outputs)
