"""Requests from a JSON-lines file, results to another, written as they complete.

A line of the input is `{"prompt": text or token ids}` or `{"messages": [...]}`, plus any field of
`SamplingParams`. A line of the output carries `index` (the number of the input line, from 0), `text`,
`token_ids`, `finish_reason` and `stats`; with n > 1 also `outputs`, all of them. An interrupted run is
resumed by running it again: lines that the output already holds are not done twice.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..config import SamplingParams
from ..llm import LLM, RequestOutput

PARAMETERS = frozenset(field.name for field in fields(SamplingParams))


def run_batch(llm: LLM, source: str, target: str, defaults: SamplingParams) -> None:
    """Answer the requests in the file `source`, appending to the file `target`.

    Raises ValueError, before anything runs, for a line that is not a valid request.
    """
    requests = read_requests(llm, Path(source), defaults)
    done = finished_lines(Path(target), len(requests))
    todo = [i for i in range(len(requests)) if i not in done]
    with open(target, "a", encoding="utf-8") as file, tqdm(
        total=len(requests), initial=len(done), unit="request", disable=None
    ) as bar:

        def write(position: int, output: RequestOutput) -> None:
            file.write(json.dumps(result_line(todo[position], output), ensure_ascii=False) + "\n")
            file.flush()
            bar.update()

        if todo:
            llm.generate([requests[i][0] for i in todo], [requests[i][1] for i in todo], write)


def read_requests(
    llm: LLM, path: Path, defaults: SamplingParams
) -> list[tuple[list[int], SamplingParams]]:
    """(prompt ids, parameters) of each line."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            raise ValueError(f"{path} line {number} is empty; every line must be a JSON object.")
        try:
            requests.append(_request(llm, json.loads(line), defaults))
        except (ValueError, TypeError, KeyError) as error:  # JSONDecodeError is a ValueError
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
    """Indices that the output file holds already. A torn last line is removed from the file."""
    if not path.is_file():  # not there, or no file to be read again
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        done = {int(json.loads(line)["index"]) for line in whole.splitlines()}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} exists and does not hold results of this program; name another.") from None
    if done and not 0 <= min(done) <= max(done) < total:
        raise ValueError(f"{path} holds the result of line {max(done)}, but the input has {total} lines.")
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return done


def result_line(index: int, output: RequestOutput) -> dict[str, Any]:
    """The line written for a finished request."""
    line = {"index": index, **output.outputs[0].to_dict()}
    if len(output.outputs) > 1:
        line["outputs"] = [completion.to_dict() for completion in output.outputs]
    return line
