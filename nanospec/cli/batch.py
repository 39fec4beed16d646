"""A batch: requests from a file of JSON lines, results to another, as they complete.

`docs/batches.md` describes the lines. An interrupted batch is resumed by running it again: requests whose
results are there are not answered twice.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from ..config import EngineConfig, SamplingParams
from ..text.chat import as_message
from .batch_lines import Defaults, LineError, Task, identity, place, read_tasks
from .batch_results import finished, result_line, results_file
from .options import given, in_flags

if TYPE_CHECKING:
    from ..llm import LLM
    from ..outputs import RequestOutput


@dataclass
class Batch:
    """What is to be done, and where results go; `done` are the tasks whose results are there already."""

    source: str
    target: str
    tasks: list[Task]
    done: set[int]
    file: BinaryIO

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
    sampling = {**given(args, "SamplingParams"), "extra_args": params.extra_args}
    defaults = Defaults(params, sampling, args.system, args.raw, model)
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
    todo = [task for task in batch.tasks if task.index not in batch.done]
    _say_how(llm, todo)
    prompts = [_prompt_ids(llm, task, batch.source) for task in todo]
    outputs: list[RequestOutput] = []
    start, steps = time.perf_counter(), llm.engine.metrics.num_forward_steps
    total, before = len(batch.tasks), len(batch.done)
    with tqdm(total=total, initial=before, unit="request", disable=None) as bar:

        def write(position: int, output: RequestOutput) -> None:
            batch.file.write(result_line(todo[position], output, model))
            batch.file.flush()
            outputs.append(output)
            bar.update()

        try:
            llm.generate(prompts, [task.params for task in todo], write) if todo else None
        except KeyboardInterrupt:
            again = "" if batch.target == "-" else "; the same command goes on from there"
            raise KeyboardInterrupt(f"{before + len(outputs)} of {total} requests are done{again}") from None
    seconds = time.perf_counter() - start
    tokens = sum(len(done.token_ids) for output in outputs for done in output.outputs)
    from .savings import saved_seconds

    saved = saved_seconds(llm, outputs, llm.engine.metrics.num_forward_steps - steps, seconds)
    return {
        "requests": total,
        "done_before": before,
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        **({} if saved is None else {"saved_seconds_estimate": round(saved, 3)}),
    }


def batch_summary(figures: dict[str, Any]) -> str:
    """One line about a batch."""
    todo = figures["requests"] - figures["done_before"]
    if not todo:
        return "All requests were done before."
    text = f"{todo} request{'s' * (todo != 1)} in {figures['seconds']:.1f} s, "
    text += f"{figures['tokens_per_second']:.0f} tok/s"
    if figures.get("saved_seconds_estimate", 0) >= 0.1:
        text += f", saved about {figures['saved_seconds_estimate']:.1f} s by guessing (an estimate)"
    return text + (f"; {figures['done_before']} were done before" if figures["done_before"] else "")


def _say_how(llm: LLM, todo: list[Task]) -> None:
    """How texts are taken, as it cannot be seen from them."""
    texts = [task for task in todo if isinstance(task.prompt, str) and not task.url]
    if not texts:
        return
    if texts[0].raw:
        print("Prompts are continued as they are (--raw).", file=sys.stderr)
    elif llm.tokenizer.has_chat_template:
        print("Prompts are answered as chats; --raw continues them as they are.", file=sys.stderr)
    else:
        print("The model has no chat template: prompts are continued as they are.", file=sys.stderr)


def _prompt_ids(llm: LLM, task: Task, source: str) -> list[int]:
    try:
        if task.messages is not None:
            ids = llm.chat_prompt(task.messages)
        elif isinstance(task.prompt, str):
            chat = not task.raw and llm.tokenizer.has_chat_template
            ids = llm.chat_prompt(as_message(task.prompt)) if chat else llm.tokenizer.encode(task.prompt)
        else:
            ids = task.prompt or []
        llm.engine.check(ids, task.params)
    except ValueError as error:
        where = place(source, task.index + 1)
        raise LineError(f"{where}: {in_flags(str(error), (EngineConfig,))}") from None
    return ids
