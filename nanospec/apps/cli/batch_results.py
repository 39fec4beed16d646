"""The results of a batch: a line each, written as requests end, and what an earlier run has left there.

A line begins with the key of its request (`Task.key`), by which it is known to belong to the same line,
parameters and model. A file that holds anything else is refused and left alone; all that is ever removed is
the beginning of a result behind the last line, torn when a run was killed. One process at a time writes a
file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from ..serve.openai_format import CHAT, choice, usage
from .batch_lines import LineError, Task

if TYPE_CHECKING:
    from ...outputs import RequestOutput

RESULT = re.compile(rb'\{"index": \d+, "key": "[0-9a-f]{16}", |\{"id": "batch_req_[0-9a-f]{16}", ')
LONGEST_HEAD = 64  # bytes, at least those of what `RESULT` matches


@dataclass
class Batch:
    """What is to be done, and where results go.

    Attributes:
        done: indices of the tasks whose results are there already.
        written, tokens: results that this run has added, and their tokens.
        seconds: that it took.
    """

    source: str
    target: str
    tasks: list[Task]
    done: set[int]
    file: BinaryIO
    written: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def todo(self) -> list[Task]:
        return [task for task in self.tasks if task.index not in self.done]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show how many results there are. Ctrl-C becomes a sentence."""
        start = time.perf_counter()
        with tqdm(total=len(self.tasks), initial=len(self.done), unit="request", disable=None) as self._bar:
            try:
                yield
            except KeyboardInterrupt:
                again = "" if self.target == "-" else "; the same command goes on from there"
                done = len(self.done) + self.written
                raise KeyboardInterrupt(f"{done} of {len(self.tasks)} requests are done{again}") from None
            finally:
                self.seconds = time.perf_counter() - start

    def write(self, line: bytes, tokens: int) -> None:
        """Append a result, whole or not at all. Raises OSError if that fails, and LineError if the file no
        longer has its name, so that the result is lost."""
        size, rest = 0 if self.target == "-" else os.fstat(self.file.fileno()).st_size, memoryview(line)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
            self.file.flush()
        except OSError as error:
            if self.target == "-":
                raise
            with suppress(OSError):  # of what is no file but a pipe, say
                os.ftruncate(self.file.fileno(), size)
            said = f"{error.strerror}; the same command goes on where this one ended"
            raise OSError(error.errno, said, self.target) from None
        if self.target != "-" and not _has_name(self.file, self.target):
            raise LineError(f"{self.target} was removed or replaced while results were written; try again.")
        self.written, self.tokens = self.written + 1, self.tokens + tokens
        self._bar.update()

    def figures(self) -> dict[str, Any]:
        """Return figures for a summary."""
        return {
            "requests": len(self.tasks),
            "done_before": len(self.done),
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }


def head_of(task: Task) -> bytes:
    """Return how the line of a task's result begins."""
    ours = f'{{"index": {task.index}, "key": "{task.key}", '
    return (f'{{"id": "batch_req_{task.key}", ' if task.url else ours).encode()


def result_line(
    task: Task, output: RequestOutput, model: str, bytes_of: Callable[[int], bytes] | None = None
) -> bytes:
    """Return the line of a finished request, in the format of the request. `bytes_of`: see
    `openai_format.logprobs`."""
    if task.url:
        line = _to_openai(task, output, model, bytes_of)
    else:
        line = {"index": task.index, "key": task.key, **(task.names or {}), **output.outputs[0].to_dict()}
        if len(output.outputs) > 1:
            line["outputs"] = [completion.to_dict() for completion in output.outputs]
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in a name: JSON can hold it, UTF-8 cannot
        return json.dumps(line).encode() + b"\n"


def _to_openai(
    task: Task, output: RequestOutput, model: str, bytes_of: Callable[[int], bytes] | None
) -> dict[str, Any]:
    error = next((done.error for done in output.outputs if done.error), None)
    body = {
        "id": output.request_id,
        "object": "chat.completion" if task.url == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice(task.url, done, task.params.logprobs, bytes_of) for done in output.outputs],
        "usage": usage(len(output.prompt_token_ids), output.outputs, len(output.outputs)),
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {
        "id": f"batch_req_{task.key}",
        "custom_id": (task.names or {}).get("custom_id"),
        "response": None if error else response,
        "error": {"code": "engine_error", "message": error} if error else None,
    }


@contextmanager
def results_file(target: str) -> Iterator[BinaryIO]:
    """Yield the file `target`, or standard output for "-", to append to. Raises LineError while another
    process has it. A file that was not there is removed after an error before the first result."""
    if target == "-":
        yield sys.stdout.buffer
        return
    new = not os.path.exists(target)
    with open(target, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LineError(f"another process writes {target}; wait for it or name another output.") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield file
        except BaseException:
            if new and _has_name(file, target) and not os.path.getsize(target):
                os.unlink(target)
            raise


def _has_name(file: BinaryIO, target: str) -> bool:
    """Return whether the open file is the one of this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(target))
    except OSError:
        return False


def finished(path: Path, tasks: Sequence[Task]) -> set[int]:
    """Return the indices of the tasks whose results the file holds, and cut off the beginning of a result
    behind the last line. Raises LineError, and leaves the file as it is, if it holds anything else."""
    by_head = {head_of(task): task.index for task in tasks}
    done: set[int] = set()
    if not path.is_file():  # a pipe, say
        return done
    with path.open("rb") as file:
        for number in count(1):
            line = file.readline(LONGEST_HEAD)  # of a large file that is no output of ours, no more is read
            begin = RESULT.match(line)
            line += file.readline() if begin and not line.endswith(b"\n") else b""
            if not line.endswith(b"\n"):
                break
            if begin is None or not _is_json(line):
                raise LineError(f"{path} line {number} is no result of this program; name another output.")
            index = by_head.get(begin[0])
            if index is None or index in done:
                what = "a second result" if index in done else "the result of another input, model or option"
                raise LineError(f"{path} line {number} is {what}; name another output.")
            done.add(index)
    if line and not any(line.startswith(head) or head.startswith(line) for head in by_head):
        raise LineError(f"{path} ends with what is no result of this input; name another output.")
    if line:
        os.truncate(path, path.stat().st_size - len(line))
    return done


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True
