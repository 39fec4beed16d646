"""Run a batch: read a file of requests and write a file of results, both JSON Lines (`docs/batches.md`).

Results are written to a locked file as requests finish. Each starts with the key of its request (`Task.key`),
a fingerprint of the line, parameters and model, so rerunning an interrupted batch only runs requests without
a result. A file with other content is rejected and left unchanged; only an incomplete last line is removed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from ...config import EngineConfig, SamplingParams
from ..options import fields_set, in_flags
from ..tasks import Task, encode
from .lines import Defaults, LineError, line_name, num_tokens, read_tasks, result_line, result_prefix

if TYPE_CHECKING:
    from ...llm import LLM
    from ...outputs import RequestOutput

Line = tuple[Task, list[int]]  # a task with a seed, and its prompt as token ids


@dataclass
class Batch:
    """The requests of a batch and the file for their results."""

    source: str
    output: str
    tasks: list[Task]
    done: set[int]  # indices of the tasks with a result from an earlier run
    file: BinaryIO
    tokens: int = 0  # number of tokens in the results of this run
    seconds: float = 0.0

    @property
    def todo(self) -> list[Task]:
        return [task for task in self.tasks if task.index not in self.done]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show a progress bar and measure the time."""
        start = time.perf_counter()
        with tqdm(total=len(self.tasks), initial=len(self.done), unit="request", disable=None) as self._bar:
            yield
        self.seconds = time.perf_counter() - start

    def write(self, line: bytes, tokens: int) -> None:
        """Append a result. Raises OSError with the file's name; the next run removes an incomplete line."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
            self.file.flush()
        except OSError as error:
            if self.output == "-":
                raise
            message = f"{error.strerror}; rerun the command to continue"
            raise OSError(error.errno, message, self.output) from None
        self.tokens += tokens
        self._bar.update()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of this run."""
        return {
            "requests": len(self.tasks), "done_before": len(self.done), "seconds": round(self.seconds, 3),
            "tokens": self.tokens, "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }  # fmt: skip


@contextmanager
def results_file(output: str) -> Iterator[BinaryIO]:
    """Open and lock a file for appending. Raises LineError if another process has locked it. If the block
    raises before anything was written, a newly created file is removed."""
    is_new = not os.path.lexists(output)
    with open(output, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LineError(f"another process is writing {output}; wait or use another output.") from None
        except OSError:
            pass  # the file system does not support locks
        try:
            yield file
        except BaseException:
            if is_new and not os.fstat(file.fileno()).st_size:
                os.unlink(output)
            raise


def indices_done(path: Path, tasks: Sequence[Task]) -> set[int]:
    """Return the indices of the tasks with results in a file, and remove an incomplete last line. Raises
    LineError, without changing the file, if it contains anything else."""
    by_prefix = {result_prefix(task): task.index for task in tasks}
    done: set[int] = set()
    if not path.is_file():  # for example, a pipe
        return done
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            index = by_prefix.get(line[: line.find(b'", ') + 3])
            if line.endswith(b"}\n") and index is not None and index not in done:
                done.add(index)
            elif not line.endswith(b"\n") and any(p[: len(line)] == line[: len(p)] for p in by_prefix):
                os.truncate(path, path.stat().st_size - len(line))
            else:
                reason = "is not a result of this input, model and options, or is a duplicate"
                raise LineError(f"{path} line {number} {reason}; use another output.")
    return done


@contextmanager
def open_batch(args: argparse.Namespace, params: SamplingParams) -> Iterator[Batch]:
    """Read the requests and open the results file, before the model is loaded. Raises ValueError or OSError,
    without changing anything, for an invalid line, or if the output is not writable, is locked by another
    process, or contains anything but results of these requests."""
    source, output = args.input, args.output
    sets_max_tokens = "max_tokens" in fields_set(args, "SamplingParams")
    tasks = read_tasks(source, Defaults(params, sets_max_tokens, args.system, args.raw, _fingerprint(args)))
    with nullcontext(sys.stdout.buffer) if output == "-" else results_file(output) as file:
        done = set() if output == "-" else indices_done(Path(output), tasks)
        yield Batch(source, output, tasks, done, file)


def _fingerprint(args: argparse.Namespace) -> str:
    """Return a fingerprint of the options and model files that affect results (for weights, their sizes)."""
    spec, engine = fields_set(args, "SpecConfig"), fields_set(args, "EngineConfig")
    lossy = sorted(spec.items()) if spec.get("acceptance", "exact") != "exact" else []
    settings = [engine.get("dtype", "auto"), engine.get("quantization"), engine.get("max_model_len"), lossy]
    digest = hashlib.sha256(repr(settings).encode())
    for path in sorted(args.folder.iterdir()):
        if path.suffix in (".json", ".jinja"):
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".gguf"):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def run_batch(llm: LLM, batch: Batch, model: str) -> dict[str, Any]:
    """Run the requests without results and return statistics. Raises LineError, before any request runs, for
    a line that the model does not support."""
    lines = prepare_lines(batch.source, batch.tasks, batch.done, llm)

    def write(position: int, output: RequestOutput) -> None:
        batch.write(result_line(lines[position][0], output, model, llm.tokenizer), num_tokens(output))

    with batch.running():
        llm.generate([ids for _, ids in lines], [task.params for task, _ in lines], write)
    return batch.statistics()


def prepare_lines(source: str, tasks: Sequence[Task], done: Set[int], llm: LLM) -> list[Line]:
    """Return the requests that are not `done`. A request without a seed gets the one that the engine would
    assign if it ran all tasks in order, so that resuming a batch does not change its results. Raises
    LineError for a request that the model does not support."""
    from ...engine.request import derive_seed  # imports torch

    lines: list[Line] = []
    numbers = accumulate((task.params.n for task in tasks), initial=llm.config.seed + 1)
    for task, number in zip(tasks, numbers):
        if task.index not in done:
            if isinstance(task.prompt, str) and not task.raw and llm.tokenizer.has_chat_template:
                task.messages = [{"role": "user", "content": task.prompt}]
            try:
                ids = encode(task, llm.tokenizer, llm.engine.max_model_len)
                params = llm.engine.check(ids, task.params)
            except ValueError as error:
                reason = in_flags(str(error), (EngineConfig,))
                raise LineError(f"{line_name(source, task.index + 1)}: {reason}") from None
            task.params = replace(params, seed=derive_seed(params.seed, 0, number))
            lines.append((task, ids))
    return lines


def batch_summary(statistics: dict[str, Any]) -> str:
    """Return one line of statistics of a batch."""
    requests = f"{statistics['requests'] - statistics['done_before']} of {statistics['requests']} requests"
    return f"{requests} in {statistics['seconds']:.1f} s, {statistics['tokens_per_second']:.0f} tok/s"
