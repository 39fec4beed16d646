"""Write the results of a batch, one line each as requests end, and find those of an earlier run.

A line begins with the key of its request (`Task.key`), which ties it to the request's line, parameters and
model. A file that holds anything else is refused and not changed; only a torn last line is removed. One
process at a time writes a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from ..serve.openai_format import CHAT, choice, usage
from .batch_lines import LineError, Task

if TYPE_CHECKING:
    from ...outputs import RequestOutput

LONGEST_HEAD = 64  # bytes, enough for any `head_of`


@dataclass
class Batch:
    """The requests of a batch and the file of their results."""

    source: str
    target: str
    tasks: list[Task]
    done: set[int]  # indices of the tasks that an earlier run has answered
    file: BinaryIO
    written: int = 0  # results of this run
    tokens: int = 0  # of these results
    seconds: float = 0.0

    @property
    def todo(self) -> list[Task]:
        return [task for task in self.tasks if task.index not in self.done]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show a progress bar and measure the time. Ctrl-C gets a message with the number of results."""
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
        """Append a result. Raises OSError that names the file; the next run removes a torn line."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
            self.file.flush()
        except OSError as error:
            if self.target == "-":
                raise
            said = f"{error.strerror}; the same command goes on where this one ended"
            raise OSError(error.errno, said, self.target) from None
        self.written, self.tokens = self.written + 1, self.tokens + tokens
        self._bar.update()

    def figures(self) -> dict[str, Any]:
        """Return the statistics of this run."""
        return {
            "requests": len(self.tasks),
            "done_before": len(self.done),
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }


def head_of(task: Task) -> bytes:
    """Return the beginning of the result of a task, up to the first `", `."""
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
        line = {"index": task.index, "key": task.key, **task.names, **output.outputs[0].to_dict()}
        if len(output.outputs) > 1:
            line["outputs"] = [completion.to_dict() for completion in output.outputs]
    text = json.dumps(line, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # JSON's escape for half of a surrogate pair in a name


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
        "custom_id": task.names.get("custom_id"),
        "response": None if error else response,
        "error": {"code": "engine_error", "message": error} if error else None,
    }


@contextmanager
def results_file(target: str) -> Iterator[BinaryIO]:
    """Open the file `target`, or standard output for "-", to append to. Raises LineError while another
    process has it."""
    if target == "-":
        yield sys.stdout.buffer
        return
    with open(target, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LineError(f"another process writes {target}; wait for it or name another output.") from None
        except OSError:
            pass  # a file system without locks
        yield file


def finished(path: Path, tasks: Sequence[Task]) -> set[int]:
    """Return the indices of the tasks whose results the file holds, and cut off a torn last result. Raises
    LineError, and leaves the file as it is, if it holds anything else."""
    by_head = {head_of(task): task.index for task in tasks}
    done: set[int] = set()
    if not path.is_file():  # a pipe, for example
        return done
    with path.open("rb") as file:
        for number in count(1):
            line = file.readline(LONGEST_HEAD)  # a large file that is not a batch's is not read whole
            index = by_head.get(b"".join(line.partition(b'", ')[:2]))
            if index is not None and not line.endswith(b"\n"):
                line += file.readline()
            if not line.endswith(b"\n") and (index is not None or len(line) < LONGEST_HEAD):
                break
            if index is None or index in done or not line.endswith(b"}\n"):
                what = "is a second result" if index in done else "is no result of this input, model, options"
                raise LineError(f"{path} line {number} {what}; name another output.")
            done.add(index)
    if line and not any(line.startswith(head) or head.startswith(line) for head in by_head):
        raise LineError(f"{path} ends with what is no result of this input; name another output.")
    if line:
        os.truncate(path, path.stat().st_size - len(line))
    return done
