"""A batch: requests from a file of JSON lines, results to another, as they complete.

`docs/batches.md` describes the lines. An interrupted batch is resumed by running it again: requests whose
results are there are not answered twice.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from ...config import EngineConfig, SamplingParams
from ...text.prompts import as_message, encode
from .batch_lines import Defaults, LineError, Task, identity, place, read_tasks
from .batch_results import append, finished, result_line, results_file
from .options import given, in_flags

if TYPE_CHECKING:
    from ...llm import LLM
    from ...outputs import RequestOutput
    from ...text.tokenizer import Tokenizer

Check = Callable[[Sequence[int], SamplingParams], None]  # raises ValueError for what cannot run


@dataclass
class Batch:
    """What is to be done, and where results go; `done` are the tasks whose results are there already."""

    source: str
    target: str
    tasks: list[Task]
    done: set[int]
    file: BinaryIO

    @property
    def todo(self) -> list[Task]:
        """What is left to do."""
        return [task for task in self.tasks if task.index not in self.done]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return len(self.done) == len(self.tasks)


@contextmanager
def open_batch(args: argparse.Namespace, params: SamplingParams) -> Iterator[Batch]:
    """Read the requests and open the results, without a model.

    Raises ValueError or OSError, and changes nothing, for a line that is not a request, for an output that
    cannot be written, that another process writes, or that holds anything but results of these requests.
    """
    source, target = args.input, args.output
    if os.path.isfile(target) and os.path.isfile(source) and os.path.samefile(source, target):
        raise LineError(f"--input {source} and --output {target} are the same file; name another output.")
    model = identity(args.folder, _what_changes_results(args))
    defaults = Defaults(params, given(args, "SamplingParams"), args.system, args.raw, model)
    tasks = read_tasks(source, defaults)
    with results_file(target) as file:
        done = set() if target == "-" else finished(Path(target), tasks)
        yield Batch(source, target, tasks, done, file)


def _what_changes_results(args: argparse.Namespace) -> list[tuple[str, Any]]:
    """Options beside those of sampling with which results are others."""
    spec, engine = given(args, "SpecConfig"), given(args, "EngineConfig")
    shown = [("dtype", engine.get("dtype", "auto")), ("max_model_len", engine.get("max_model_len"))]
    lossless = spec.get("acceptance", "exact") == "exact"
    return [*shown, *(() if lossless else spec.items())]


def run_batch(llm: LLM, batch: Batch, model: str) -> dict[str, Any]:
    """Answer what is not answered yet; returns figures for a summary. Raises LineError, before anything runs,
    for a line that the model cannot take, and KeyboardInterrupt with a sentence."""
    todo = batch.todo
    say_how(llm.tokenizer, todo)
    check, window = llm.engine.check, llm.engine.max_model_len
    prompts = [prompt_ids(llm.tokenizer, check, window, task, batch.source) for task in todo]
    with Writer(batch) as writer:

        def write(position: int, output: RequestOutput) -> None:
            line = result_line(todo[position], output, model, llm.tokenizer.bytes_of)
            writer.write(line, num_tokens(output))

        params = seeded(batch.tasks, llm.config.seed)
        llm.generate(prompts, [params[task.index] for task in todo], write) if todo else None
    return writer.figures()


class Writer:
    """Appends results as they come, and shows how many. Ctrl-C within it becomes a sentence."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.written, self.tokens, self.seconds = batch, 0, 0, 0.0

    def __enter__(self) -> Writer:
        total, before = len(self.batch.tasks), len(self.batch.done)
        self._bar = tqdm(total=total, initial=before, unit="request", disable=None)
        self._start = time.perf_counter()
        return self

    def write(self, line: bytes, tokens: int) -> None:
        """One result; see `append`. A line that was torn by a kill is cut off by the next run."""
        append(self.batch.file, line, self.batch.target)
        self.written, self.tokens = self.written + 1, self.tokens + tokens
        self._bar.update()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._start
        self._bar.close()
        if kind is KeyboardInterrupt:
            again = "" if self.batch.target == "-" else "; the same command goes on from there"
            done, total = len(self.batch.done) + self.written, len(self.batch.tasks)
            raise KeyboardInterrupt(f"{done} of {total} requests are done{again}") from None

    def figures(self) -> dict[str, Any]:
        """For a summary."""
        return {
            "requests": len(self.batch.tasks),
            "done_before": len(self.batch.done),
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(self.seconds, 1e-9), 1),
        }


def seeded(tasks: Sequence[Task], seed: int) -> list[SamplingParams]:
    """The parameters of each task, those without a seed with the one that an engine of this `seed` gives them
    when it runs all tasks in their order. So it matters neither which of them were done before, nor who runs
    them."""
    from ...engine.request import seed_of  # here, as it needs torch

    first = accumulate((task.params.n for task in tasks), initial=seed + 1)
    return [
        task.params if task.params.seed is not None else replace(task.params, seed=seed_of(None, 0, number))
        for task, number in zip(tasks, first)
    ]


def num_tokens(output: RequestOutput) -> int:
    """Of all outputs of a request."""
    return sum(len(done.token_ids) for done in output.outputs)


def batch_summary(figures: dict[str, Any]) -> str:
    """One line about a batch."""
    todo = figures["requests"] - figures["done_before"]
    if not todo:
        return "All requests were done before."
    text = f"{todo} request{'s' * (todo != 1)} in {figures['seconds']:.1f} s, "
    if "replicas" in figures:
        text += f"{figures['replicas']} replica{'s' * (figures['replicas'] != 1)}, "
    text += f"{figures['tokens_per_second']:.0f} tok/s"
    return text + (f"; {figures['done_before']} were done before" if figures["done_before"] else "")


def say_how(tokenizer: Tokenizer, todo: Sequence[Task]) -> None:
    """How texts are taken, as it cannot be seen from them."""
    texts = [task for task in todo if isinstance(task.prompt, str) and not task.url]
    if not texts:
        return
    if texts[0].raw:
        print("Prompts are continued as they are (--raw).", file=sys.stderr)
    elif tokenizer.has_chat_template:
        print("Prompts are answered as chats; --raw continues them as they are.", file=sys.stderr)
    else:
        print("The model has no chat template: prompts are continued as they are.", file=sys.stderr)


def prompt_ids(tokenizer: Tokenizer, check: Check, window: int, task: Task, source: str) -> list[int]:
    """The token ids of what a line asks. Raises LineError if `check` refuses it, or if it is too long for a
    window of so many tokens."""
    messages, prompt = task.messages, task.prompt
    if isinstance(prompt, str) and not task.raw and tokenizer.has_chat_template:
        messages = as_message(prompt)
    try:
        if messages is not None:
            ids = encode(tokenizer, tokenizer.apply_chat_template(messages), window, add_special_tokens=False)
        else:
            ids = encode(tokenizer, prompt, window) if isinstance(prompt, str) else prompt or []
        check(ids, task.params)
    except ValueError as error:
        raise refused(source, task.index, str(error)) from None
    return ids


def refused(source: str, index: int, why: str) -> LineError:
    """What to raise for a line that the model cannot take."""
    return LineError(f"{place(source, index + 1)}: {in_flags(why, (EngineConfig,))}")
