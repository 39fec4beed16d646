"""The results of a batch: a line each, written as they complete, and what an earlier run has left there.

A line begins with the key of its request (`batch_lines.Task`), by which it is known to belong to the same
line, parameters and model. A file that holds anything else is refused and left alone; all that is ever
removed is the beginning of a result behind the last line, torn when a run was killed. One process at a time
writes a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .batch_lines import LineError, Task
from .batch_openai import to_openai

if TYPE_CHECKING:
    from ...outputs import RequestOutput

RESULT = re.compile(rb'\{"index": \d+, "key": "[0-9a-f]{16}", |\{"id": "batch_req_[0-9a-f]{16}", ')

LONGEST_HEAD = 64  # bytes, at least those of what `RESULT` matches


def head_of(task: Task) -> bytes:
    """How the line of a task's result begins."""
    ours = f'{{"index": {task.index}, "key": "{task.key}", '
    return (f'{{"id": "batch_req_{task.key}", ' if task.url else ours).encode()


def result_line(
    task: Task, output: RequestOutput, model: str, bytes_of: Callable[[int], bytes] | None = None
) -> bytes:
    """The line written for a finished request, in the format of the request."""
    if task.url:
        line = to_openai(task, output, model, bytes_of)
    else:
        line = {"index": task.index, "key": task.key, **(task.names or {}), **output.outputs[0].to_dict()}
        if len(output.outputs) > 1:
            line["outputs"] = [completion.to_dict() for completion in output.outputs]
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in a name: JSON can hold it, UTF-8 cannot
        return json.dumps(line).encode() + b"\n"


@contextmanager
def results_file(target: str) -> Iterator[BinaryIO]:
    """The file `target`, or standard output for "-", to append to. Raises ValueError while another process
    has it. A file that was not there is not there either after an error before the first result."""
    if target == "-":
        yield sys.stdout.buffer
        return
    new = not os.path.exists(target)
    with open(target, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"another process writes {target}; wait for it or name another output."
            raise LineError(busy) from None
        except OSError:
            pass  # a file system without locks
        if not os.path.exists(target):  # it was there when it was opened
            raise LineError(f"another process has just removed {target}; try again.")
        try:
            yield file
        except BaseException:
            if new and _is_kept(file, target) and not os.path.getsize(target):
                os.unlink(target)
            raise


def append(file: BinaryIO, line: bytes, target: str) -> None:
    """Write a line, whole or not at all. Raises OSError, and LineError if nobody would find it."""
    size, rest = 0 if target == "-" else os.fstat(file.fileno()).st_size, memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        file.flush()
    except OSError as error:
        if target == "-":
            raise
        with suppress(OSError):  # of what is no file but a pipe, say
            os.ftruncate(file.fileno(), size)
        said = f"{error.strerror}; the same command goes on where this one ended"
        raise OSError(error.errno, said, target) from None
    check_kept(file, target)


def check_kept(file: BinaryIO, target: str) -> None:
    """LineError if the file that is written is not the one of its name any more: what goes there is lost."""
    if target != "-" and not _is_kept(file, target):
        raise LineError(f"{target} was removed or replaced while results were written to it; try again.")


def _is_kept(file: BinaryIO, target: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(target))
    except OSError:
        return False


def finished(path: Path, tasks: Sequence[Task]) -> set[int]:
    """Indices of the tasks whose results the file holds. The beginning of a result behind the last line is
    removed.

    Raises LineError, and leaves the file as it is, if it holds anything else.
    """
    if not path.is_file():  # no file to be read again, such as a pipe
        return set()
    by_head = {head_of(task): task.index for task in tasks}
    done: set[int] = set()
    rest = b""
    for number, line in enumerate(_lines(path), 1):
        if not line.endswith(b"\n"):
            rest = line
            break
        begin = RESULT.match(line)
        if begin is None or not _is_whole(line):
            raise LineError(f"{path} line {number} is no result of this program; name another output.")
        index = by_head.get(begin[0])
        if index is None:
            raise LineError(
                f"{path} line {number} is the result of another input, model or option; with those it can be "
                "continued, else name another output."
            )
        if index in done:
            raise LineError(f"{path} line {number} is a second result of one request; name another output.")
        done.add(index)
    if rest and not any(rest.startswith(head) or head.startswith(rest) for head in by_head):
        raise LineError(f"{path} ends with what is no result of this input; name another output.")
    if rest:
        os.truncate(path, path.stat().st_size - len(rest))
    return done


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their ends. Of one that does not begin as results do, that is somebody's large
    file, only the beginning."""
    with path.open("rb") as file:
        while head := file.readline(LONGEST_HEAD):
            is_result = head.endswith(b"\n") or len(head) < LONGEST_HEAD or RESULT.match(head)
            yield head + (file.readline() if is_result and not head.endswith(b"\n") else b"")


def _is_whole(line: bytes) -> bool:
    try:
        found: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict)
