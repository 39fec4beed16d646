"""Answer a file of requests into a file of results, both JSON lines (`docs/batches.md`).

Running an interrupted batch again resumes it: requests that have results are not answered twice.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import EngineConfig, SamplingParams
from .batch_lines import Defaults, LineError, Task, place, read_tasks
from .batch_results import Batch, finished, result_line, results_file
from .options import given, in_flags

if TYPE_CHECKING:
    from ...llm import LLM
    from ...outputs import RequestOutput
    from ...text.tokenizer import Tokenizer

Check = Callable[[Sequence[int], SamplingParams], None]  # raises ValueError for what cannot run


@contextmanager
def open_batch(args: argparse.Namespace, params: SamplingParams) -> Iterator[Batch]:
    """Read the requests and open the results, without a model. Raises ValueError or OSError, and changes
    nothing, for a bad line, and for an output that cannot be written, that another process writes, or that
    holds anything but results of these requests."""
    source, target = args.input, args.output
    if os.path.isfile(target) and os.path.isfile(source) and os.path.samefile(source, target):
        raise LineError(f"--input {source} and --output {target} are the same file; name another output.")
    sampling = given(args, "SamplingParams")
    tasks = read_tasks(source, Defaults(params, sampling, args.system, args.raw, _identity(args)))
    with results_file(target) as file:
        done = set() if target == "-" else finished(Path(target), tasks)
        yield Batch(source, target, tasks, done, file)


def _identity(args: argparse.Namespace) -> str:
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
    todo = batch.todo
    say_how(llm.tokenizer, todo)
    check, window = llm.engine.check, llm.engine.max_model_len
    prompts = [prompt_ids(llm.tokenizer, check, window, task, batch.source) for task in todo]
    params = seeded(batch.tasks, llm.config.seed)

    def write(position: int, output: RequestOutput) -> None:
        line = result_line(todo[position], output, model, llm.tokenizer.bytes_of)
        batch.write(line, num_tokens(output))

    with batch.running():
        if todo:
            llm.generate(prompts, [params[task.index] for task in todo], write)
    return batch.figures()


def prompt_ids(tokenizer: Tokenizer, check: Check, window: int, task: Task, source: str) -> list[int]:
    """Return the token ids of a line's prompt. Raises LineError if `check` refuses the request or the prompt
    is too long for `window` tokens."""
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
        raise refused(source, task.index, str(error)) from None
    return ids


def refused(source: str, index: int, why: str) -> LineError:
    """Return the error for a line that the model cannot take."""
    return LineError(f"{place(source, index + 1)}: {in_flags(why, (EngineConfig,))}")


def seeded(tasks: Sequence[Task], seed: int) -> list[SamplingParams]:
    """Return the parameters of each task. A task without a seed gets the one that an engine of this `seed`
    gives it when it runs all tasks in order, so the results of a resumed batch are the same."""
    from ...engine.request import seed_of  # imports torch

    first = accumulate((task.params.n for task in tasks), initial=seed + 1)
    return [
        task.params if task.params.seed is not None else replace(task.params, seed=seed_of(None, 0, number))
        for task, number in zip(tasks, first)
    ]


def say_how(tokenizer: Tokenizer, todo: Sequence[Task]) -> None:
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
