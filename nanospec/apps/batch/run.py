"""Answer a file of requests into a file of results, both JSON lines (`docs/batches.md`).

Results are written as requests end. A line begins with the key of its request (`Task.key`), which ties it to
the request's line, parameters and model, so running an interrupted batch again answers only what is missing.
A file that holds anything else is refused and not changed; only a torn last line is removed. One process at a
time writes a file.
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
from ..options import given, in_flags
from ..tasks import Task
from .lines import Defaults, LineError, line_name, read_tasks

if TYPE_CHECKING:
    from ...llm import LLM
    from ...outputs import RequestOutput
    from ...text.tokenizer import Tokenizer

Check = Callable[[Sequence[int], SamplingParams], None]  # raises ValueError for what cannot run
Line = tuple[Task, list[int], SamplingParams]  # the prompt as token ids; the parameters have a seed
MAX_PREFIX = 64  # bytes, enough for any `result_prefix`


@dataclass
class Batch:
    """The requests of a batch and the file of their results."""

    source: str
    output: str
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
                hint = "" if self.output == "-" else "; the same command goes on from there"
                done = len(self.done) + self.written
                raise KeyboardInterrupt(f"{done} of {len(self.tasks)} requests are done{hint}") from None
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
            if self.output == "-":
                raise
            message = f"{error.strerror}; the same command goes on where this one ended"
            raise OSError(error.errno, message, self.output) from None
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


def result_prefix(task: Task) -> bytes:
    """Return the beginning of the result of a task, up to the first `", `."""
    if task.url:
        return f'{{"id": "batch_req_{task.key}", '.encode()
    return f'{{"index": {task.index}, "key": "{task.key}", '.encode()


def result_line(task: Task, output: RequestOutput, model: str, tokenizer: Tokenizer) -> bytes:
    """Return the line of a finished request, in the format of the request."""
    if task.url:
        line = _to_openai(task, output, model, tokenizer)
    else:
        line = {"index": task.index, "key": task.key, **task.names, **output.outputs[0].to_dict()}
        if len(output.outputs) > 1:
            line["outputs"] = [completion.to_dict() for completion in output.outputs]
    text = json.dumps(line, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # JSON's escape for half of a surrogate pair in a name


def _to_openai(task: Task, output: RequestOutput, model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    error = next((done.error for done in output.outputs if done.error), None)
    body = {
        **response_header(task.url, output.request_id, model),
        "choices": [choice(task.url, done, task.params.logprobs, tokenizer) for done in output.outputs],
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
    """Open a file to append to. Raises LineError while another process has it. If the block raises before
    anything is written, a file that was new is removed."""
    is_new = not os.path.lexists(output)
    with open(output, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LineError(f"another process writes {output}; wait for it or name another output.") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield file
        except BaseException:
            if is_new and not os.fstat(file.fileno()).st_size:
                os.unlink(output)
            raise


def indices_done(path: Path, tasks: Sequence[Task]) -> set[int]:
    """Return the indices of the tasks whose results the file holds, and cut off a torn last result. Raises
    LineError, and leaves the file as it is, if it holds anything else."""
    by_prefix = {result_prefix(task): task.index for task in tasks}
    done: set[int] = set()
    if not path.is_file():  # a pipe, for example
        return done
    with path.open("rb") as file:
        for number in count(1):
            line = file.readline(MAX_PREFIX)  # a large file that is not a batch's is not read whole
            index = by_prefix.get(b"".join(line.partition(b'", ')[:2]))
            if index is not None and not line.endswith(b"\n"):
                line += file.readline()
            if not line.endswith(b"\n") and (index is not None or len(line) < MAX_PREFIX):
                break
            if index is None or index in done or not line.endswith(b"}\n"):
                reason = "a second result" if index in done else "no result of this input, model, options"
                raise LineError(f"{path} line {number} is {reason}; name another output.")
            done.add(index)
    if line and not any(line.startswith(prefix) or prefix.startswith(line) for prefix in by_prefix):
        raise LineError(f"{path} ends with what is no result of this input; name another output.")
    if line:
        os.truncate(path, path.stat().st_size - len(line))
    return done


@contextmanager
def open_batch(args: argparse.Namespace, params: SamplingParams) -> Iterator[Batch]:
    """Read the requests and open the results, without a model. Raises ValueError or OSError, and changes
    nothing, for a bad line, and for an output that cannot be written, that another process writes, or that
    holds anything but results of these requests."""
    source, output = args.input, args.output
    if os.path.isfile(output) and os.path.isfile(source) and os.path.samefile(source, output):
        raise LineError(f"--input {source} and --output {output} are the same file; name another output.")
    sampling = given(args, "SamplingParams")
    tasks = read_tasks(source, Defaults(params, sampling, args.system, args.raw, _fingerprint(args)))
    with nullcontext(sys.stdout.buffer) if output == "-" else results_file(output) as file:
        done = set() if output == "-" else indices_done(Path(output), tasks)
        yield Batch(source, output, tasks, done, file)


def _fingerprint(args: argparse.Namespace) -> str:
    """Return a fingerprint of the options and the model files that change results; of weights the sizes."""
    spec, engine = given(args, "SpecConfig"), given(args, "EngineConfig")
    lossy = sorted(spec.items()) if spec.get("acceptance", "exact") != "exact" else []
    settings = [engine.get("dtype", "auto"), engine.get("max_model_len"), lossy]
    digest = hashlib.sha256(repr(settings).encode())
    for path in sorted(args.folder.iterdir()):
        if path.suffix in (".json", ".jinja"):
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def run_batch(llm: LLM, batch: Batch, model: str) -> dict[str, Any]:
    """Answer the requests without results and return statistics. Raises LineError, before anything runs, for
    a line that the model cannot take, and KeyboardInterrupt with a message."""
    lines = prepare_lines(batch, llm.tokenizer, llm.engine.check, llm.engine.max_model_len, llm.config.seed)

    def write(position: int, output: RequestOutput) -> None:
        line = result_line(lines[position][0], output, model, llm.tokenizer)
        batch.write(line, num_tokens(output))

    with batch.running():
        if lines:
            llm.generate([ids for _, ids, _ in lines], [params for _, _, params in lines], write)
    return batch.figures()


def prepare_lines(batch: Batch, tokenizer: Tokenizer, check: Check, window: int, seed: int) -> list[Line]:
    """Return the requests without results, with the seeds that an engine of this `seed` gives them. Raises
    LineError if `check` refuses one or its prompt is too long for `window` tokens."""
    print_prompt_mode(tokenizer, batch.todo)
    lines, params = list[Line](), seeded_params(batch.tasks, seed)
    for task in batch.todo:
        messages, prompt = task.messages, task.prompt
        if isinstance(prompt, str) and not task.raw and tokenizer.has_chat_template:
            messages = [{"role": "user", "content": prompt}]
        try:
            if messages is not None:
                text = tokenizer.apply_chat_template(messages)
                ids = tokenizer.encode_prompt(text, window, add_special_tokens=False)
            else:
                ids = tokenizer.encode_prompt(prompt, window) if isinstance(prompt, str) else prompt or []
            check(ids, task.params)
        except ValueError as error:
            raise line_error(batch.source, task.index, str(error)) from None
        lines.append((task, ids, params[task.index]))
    return lines


def line_error(source: str, index: int, reason: str) -> LineError:
    """Return the error for a line that the model cannot take."""
    return LineError(f"{line_name(source, index + 1)}: {in_flags(reason, (EngineConfig,))}")


def seeded_params(tasks: Sequence[Task], seed: int) -> dict[int, SamplingParams]:
    """Return the parameters of each task by its index. A task without a seed gets the one that an engine of
    this `seed` gives it when it runs all tasks in order, so the results of a resumed batch are the same."""
    from ...engine.request import seed_of  # imports torch

    first = accumulate((task.params.n for task in tasks), initial=seed + 1)
    seeds = {task.index: seed_of(task.params.seed, 0, number) for task, number in zip(tasks, first)}
    return {task.index: replace(task.params, seed=seeds[task.index]) for task in tasks}


def print_prompt_mode(tokenizer: Tokenizer, todo: Sequence[Task]) -> None:
    """Print whether the chat template is applied to texts."""
    texts = [task for task in todo if isinstance(task.prompt, str) and not task.url]
    if texts and texts[0].raw:
        print("Prompts are continued as they are (--raw).", file=sys.stderr)
    elif texts and tokenizer.has_chat_template:
        print("Prompts are answered as chats; --raw continues them as they are.", file=sys.stderr)
    elif texts:
        print("The model has no chat template: prompts are continued as they are.", file=sys.stderr)


def num_tokens(output: RequestOutput) -> int:
    """Return the number of tokens of all outputs of a request."""
    return sum(len(done.token_ids) for done in output.outputs)


def batch_summary(figures: dict[str, Any]) -> str:
    """Return one line of statistics about a batch."""
    todo = figures["requests"] - figures["done_before"]
    if not todo:
        return "All requests were done before."
    text = f"{todo} request{'s' * (todo != 1)} in {figures['seconds']:.1f} s, "
    if "replicas" in figures:
        text += f"{figures['replicas']} replica{'s' * (figures['replicas'] != 1)}, "
    text += f"{figures['tokens_per_second']:.0f} tok/s"
    return text + (f"; {figures['done_before']} were done before" if figures["done_before"] else "")
