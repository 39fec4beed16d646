"""Run a batch: read a file of requests and write a file of results, both JSON Lines (`docs/batches.md`).

Results are written as requests finish. Each starts with the key of its request (`Task.key`), a fingerprint of
the line, parameters and model, so rerunning an interrupted batch only runs requests without a result. A file
with other content is rejected and left unchanged; only an incomplete last line is removed. The file is locked
against other processes while it is written.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from ...config import EngineConfig, SamplingParams
from ..openai_format import choice, response_header, usage
from ..options import fields_set, in_flags
from ..tasks import Task, encode
from .lines import Defaults, LineError, line_name, read_tasks

if TYPE_CHECKING:
    from ...llm import LLM
    from ...outputs import RequestOutput
    from ...text.tokenizer import Tokenizer

Check = Callable[[Sequence[int], SamplingParams], SamplingParams]  # raises ValueError if a request cannot run
Line = tuple[Task, list[int], SamplingParams]  # task, prompt as token ids, parameters with a seed
MAX_PREFIX = 64  # bytes; longer than any `result_prefix`


@dataclass
class Batch:
    """The requests of a batch and the file for their results."""

    source: str
    output: str
    tasks: list[Task]
    done: set[int]  # indices of the tasks with a result from an earlier run
    file: BinaryIO
    written: int = 0  # number of results of this run
    tokens: int = 0  # number of tokens in these results
    seconds: float = 0.0

    @property
    def todo(self) -> list[Task]:
        return [task for task in self.tasks if task.index not in self.done]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show a progress bar and measure the time. Adds the number of results to a KeyboardInterrupt."""
        start = time.perf_counter()
        with tqdm(total=len(self.tasks), initial=len(self.done), unit="request", disable=None) as self._bar:
            try:
                yield
            except KeyboardInterrupt:
                hint = "" if self.output == "-" else "; rerun the command to continue"
                done = len(self.done) + self.written
                raise KeyboardInterrupt(f"{done} of {len(self.tasks)} requests are done{hint}") from None
            finally:
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
        self.written, self.tokens = self.written + 1, self.tokens + tokens
        self._bar.update()

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of this run."""
        return {
            "requests": len(self.tasks), "done_before": len(self.done), "seconds": round(self.seconds, 3),
            "tokens": self.tokens, "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }  # fmt: skip


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
        for number in count(1):
            line = file.readline(MAX_PREFIX)  # avoids reading all of a large, unrelated file
            index = by_prefix.get(b"".join(line.partition(b'", ')[:2]))
            if index is not None and not line.endswith(b"\n"):
                line += file.readline()
            if not line.endswith(b"\n") and (index is not None or len(line) < MAX_PREFIX):
                break
            if index is None or index in done or not line.endswith(b"}\n"):
                reason = "a duplicate" if index in done else "not a result of this input, model and options"
                raise LineError(f"{path} line {number} is {reason}; use another output.")
            done.add(index)
    if line and not any(line.startswith(prefix) or prefix.startswith(line) for prefix in by_prefix):
        raise LineError(f"{path}: the last line is not a result of this input; use another output.")
    if line:
        os.truncate(path, path.stat().st_size - len(line))
    return done


@contextmanager
def open_batch(args: argparse.Namespace, params: SamplingParams) -> Iterator[Batch]:
    """Read the requests and open the results file, before the model is loaded. Raises ValueError or OSError,
    without changing anything, for an invalid line, or if the output is not writable, is locked by another
    process, or contains anything but results of these requests."""
    source, output = args.input, args.output
    if os.path.isfile(output) and os.path.isfile(source) and os.path.samefile(source, output):
        raise LineError(f"--input {source} and --output {output} are the same file; use another output.")
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
    a line that the model does not support, and KeyboardInterrupt with a message."""
    lines = prepare_lines(batch, llm.tokenizer, llm.engine.check, llm.engine.max_model_len, llm.config.seed)

    def write(position: int, output: RequestOutput) -> None:
        line = result_line(lines[position][0], output, model, llm.tokenizer)
        batch.write(line, num_tokens(output))

    with batch.running():
        if lines:
            llm.generate([ids for _, ids, _ in lines], [params for _, _, params in lines], write)
    return batch.statistics()


def prepare_lines(batch: Batch, tokenizer: Tokenizer, check: Check, window: int, seed: int) -> list[Line]:
    """Return the requests without results, with the seeds that an engine with this `seed` would assign.
    Raises LineError if `check` rejects one, or if a prompt is too long for `window` tokens."""
    print_prompt_mode(tokenizer, batch.todo)
    prompts = []
    for task in batch.todo:
        if isinstance(task.prompt, str) and not task.raw and tokenizer.has_chat_template:
            task.messages = [{"role": "user", "content": task.prompt}]
        try:
            task.params = check(ids := encode(task, tokenizer, window), task.params)
        except ValueError as error:
            raise line_error(batch.source, task.index, str(error)) from None
        prompts.append(ids)
    params = seeded_params(batch.tasks, seed)
    return [(task, ids, params[task.index]) for task, ids in zip(batch.todo, prompts)]


def line_error(source: str, index: int, reason: str) -> LineError:
    """Return the error for a line that the model does not support."""
    return LineError(f"{line_name(source, index + 1)}: {in_flags(reason, (EngineConfig,))}")


def seeded_params(tasks: Sequence[Task], seed: int) -> dict[int, SamplingParams]:
    """Return the parameters by task index. A task without a seed gets the one that an engine with this `seed`
    would assign if it ran all tasks in order, so that resuming a batch does not change its results."""
    from ...engine.request import derive_seed  # imports torch

    first = accumulate((task.params.n for task in tasks), initial=seed + 1)
    seeds = {task.index: derive_seed(task.params.seed, 0, number) for task, number in zip(tasks, first)}
    return {task.index: replace(task.params, seed=seeds[task.index]) for task in tasks}


def print_prompt_mode(tokenizer: Tokenizer, todo: Sequence[Task]) -> None:
    """Print whether the chat template is applied to prompts."""
    texts = [task for task in todo if isinstance(task.prompt, str) and not task.url]
    if texts and texts[0].raw:
        print("Continuing prompts as plain text (--raw).", file=sys.stderr)
    elif texts and tokenizer.has_chat_template:
        print("Applying the chat template to prompts; use --raw to continue them instead.", file=sys.stderr)
    elif texts:
        print("The model has no chat template; continuing prompts as plain text.", file=sys.stderr)


def num_tokens(output: RequestOutput) -> int:
    """Return the total number of tokens in the outputs of a request."""
    return sum(len(done.token_ids) for done in output.outputs)


def batch_summary(statistics: dict[str, Any]) -> str:
    """Return one line of statistics of a batch."""
    todo = statistics["requests"] - statistics["done_before"]
    if not todo:
        return "All requests already have results."
    text = f"{todo} request{'s' * (todo != 1)} in {statistics['seconds']:.1f} s, "
    if "replicas" in statistics:
        text += f"{statistics['replicas']} replica{'s' * (statistics['replicas'] != 1)}, "
    text += f"{statistics['tokens_per_second']:.0f} tok/s"
    return text + (f"; {statistics['done_before']} already had results" if statistics["done_before"] else "")
