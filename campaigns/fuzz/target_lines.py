"""Fuzz batch files: they must give tasks, or an error message with the line. Also fuzz results to resume."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from nanospec.apps.batch.lines import Defaults, LineError, read_tasks, result_prefix
from nanospec.apps.batch.run import indices_done
from nanospec.apps.tasks import Task
from nanospec.config import SamplingParams

from .mutation import mutate_bytes as mutate  # noqa: F401
from .refusal import answer
from .target_bodies import BODIES, MESSAGES, as_statement

OURS: list[dict[str, Any]] = [
    {"prompt": "a", "custom_id": "x"},
    {"messages": MESSAGES[:1], "id": 5, "seed": 3},
]
URL = {False: "/v1/completions", True: "/v1/chat/completions"}
THEIRS: list[dict[str, Any]] = [
    {"custom_id": str(i), "method": "POST", "url": URL["messages" in body], "body": body}
    for i, body in enumerate(BODIES)
]
RESULT = b'{"index": 0, "key": "0123456789abcdef", "a": 1}\n{"id": "batch_req_0123456789abcdef", "a": 1}\n'
FILES: list[list[dict[str, Any]]] = [OURS, THEIRS, [*OURS, *THEIRS]]
SEEDS = [b"".join(json.dumps(line).encode() + b"\n" for line in lines) for lines in FILES]
SEEDS += [b"\xef\xbb\xbf" + SEEDS[0] + b"\n \n", RESULT]


def read(source: str) -> list[Task]:
    """Read the tasks of a file. Raises ValueError with the message for the user."""
    try:
        return read_tasks(source, Defaults(SamplingParams(temperature=0), model="m"))
    except LineError as error:
        raise ValueError(as_statement(str(error))) from None


def one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as path:
        source, target = Path(path) / "requests.jsonl", Path(path) / "results.jsonl"
        source.write_bytes(data)
        target.write_bytes(data)
        tasks = answer(read, str(source)) or []
        for task in tasks:
            assert isinstance(task.prompt, str | list) != bool(task.messages)
        try:
            indices_done(target, tasks)
        except LineError:
            assert target.read_bytes() == data
        else:
            assert data.startswith(target.read_bytes())
        target.write_bytes(b"".join(result_prefix(task) + b'"a": 1}\n' for task in tasks))
        assert indices_done(target, tasks) == {task.index for task in tasks}
