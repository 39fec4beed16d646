"""Requests from a JSON-lines file, results to another, written as they complete.

A line of the input is `{"prompt": text or token ids}` or `{"messages": [...]}`, plus any field of
`SamplingParams`. A line of the output carries `index` (the number of the input line, from 0), `text`,
`token_ids`, `finish_reason` and `stats`; with n > 1 also `outputs`, all of them. Lines end at "\\n" alone.

An interrupted run is resumed by running it again: lines that the output already holds are not done twice.
A file that holds anything but results is refused; all that is ever removed is the beginning of a result
behind the last line, torn when a run was killed. One process at a time writes an output.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from ..config import SamplingParams
from ..llm import LLM, RequestOutput

BLANK = b" \t\r\n"  # what JSON takes for white space
PARAMETERS = frozenset(field.name for field in fields(SamplingParams))
RESULT = frozenset(("index", "text", "token_ids", "finish_reason"))  # what every result has


def run_batch(llm: LLM, source: str, target: str, defaults: SamplingParams) -> None:
    """Answer the requests in the file `source`, appending to the file `target`.

    Raises ValueError, before anything runs, for a line that is not a valid request, for an output that
    holds anything but results, or more of them than the input has lines, or that another process writes.
    Whether results that are there were made from the same input is not checked.
    """
    if os.path.isfile(target) and os.path.samefile(source, target):
        raise ValueError(f"--input {source} and --output {target} are the same file; name another output.")
    requests = read_requests(llm, Path(source), defaults)
    with locked(target) as file:
        done = finished_lines(Path(target), len(requests))
        todo = [i for i in range(len(requests)) if i not in done]
        with tqdm(total=len(requests), initial=len(done), unit="request", disable=None) as bar:

            def write(position: int, output: RequestOutput) -> None:
                line = json.dumps(result_line(todo[position], output), ensure_ascii=False)
                file.write(line.encode() + b"\n")
                file.flush()
                bar.update()

            if todo:
                llm.generate([requests[i][0] for i in todo], [requests[i][1] for i in todo], write)


@contextmanager
def locked(path: str) -> Iterator[BinaryIO]:
    """The file `path`, to append to. Raises ValueError while another process has it."""
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process writes {path}; wait for it or name another output.") from None
        except OSError:
            pass  # a file system without locks
        yield file


def read_requests(llm: LLM, path: Path, defaults: SamplingParams) -> list[tuple[list[int], SamplingParams]]:
    """(prompt ids, parameters) of each line. A byte-order mark and blank lines at the end do no harm."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8).rstrip(BLANK)
    requests = []
    for number, line in enumerate(data.split(b"\n") if data else (), 1):
        if not line.strip(BLANK):
            raise ValueError(f"{path} line {number} is empty; every line must be a JSON object.")
        try:
            requests.append(_request(llm, json.loads(line.decode()), defaults))
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # JSON's are ValueErrors
            raise ValueError(f"{path} line {number}: {error}") from None
    return requests


def _request(llm: LLM, line: Any, defaults: SamplingParams) -> tuple[list[int], SamplingParams]:
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise ValueError('a request is a JSON object with either "prompt" or "messages".')
    options = {name: value for name, value in line.items() if name not in ("prompt", "messages")}
    if unknown := sorted(options.keys() - PARAMETERS):
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(PARAMETERS))}.")
    params = replace(defaults, **options)
    if "messages" in line:
        prompt = llm.chat_prompt(line["messages"])
    elif isinstance(line["prompt"], str):
        prompt = llm.tokenizer.encode(line["prompt"])
    else:
        prompt = line["prompt"]
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError('"prompt" must be a text or a list of token ids.')
    llm.engine.check(prompt, params)
    return prompt, params


def finished_lines(path: Path, total: int) -> set[int]:
    """Indices of the results in the output file. The beginning of a result behind the last line is removed.

    Raises ValueError, and leaves the file as it is, if it holds anything else.
    """
    if not path.is_file():  # no file to be read again, such as a pipe
        return set()
    *lines, rest = path.read_bytes().split(b"\n")
    done: set[int] = set()
    for number, line in enumerate(lines, 1):
        index = _index(line)
        if index is None or index in done:
            what = "no result of this program" if index is None else f"a second result of index {index}"
            raise ValueError(f"{path} line {number} is {what}; name another output.")
        if index >= total:
            raise ValueError(
                f"{path} holds the result of index {index}, but the input has {total} lines; name another "
                "output."
            )
        done.add(index)
    if not _begins_result(rest):
        raise ValueError(f"{path} ends with what is no result of this program; name another output.")
    if rest:
        os.truncate(path, path.stat().st_size - len(rest))
    return done


def _index(line: bytes) -> int | None:
    """The index of a line that is a whole result, as only this program writes them; else None."""
    try:
        pairs = json.loads(line.decode(), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    result = dict(pairs) if isinstance(pairs, tuple) else {}
    index = result.get("index")
    ours = result.keys() >= RESULT and len(result) == len(pairs) and type(index) is int and index >= 0
    return index if ours else None


def _begins_result(rest: bytes) -> bool:
    """Whether `rest` is the beginning of a result, however short."""
    index = re.match(rb'\{"index": (\d*)', rest)
    begin = b'{"index": %b, "text": "' % (index[1] if index else b"")
    return begin.startswith(rest) or rest.startswith(begin)


def result_line(index: int, output: RequestOutput) -> dict[str, Any]:
    """The line written for a finished request."""
    line = {"index": index, **output.outputs[0].to_dict()}
    if len(output.outputs) > 1:
        line["outputs"] = [completion.to_dict() for completion in output.outputs]
    return line
