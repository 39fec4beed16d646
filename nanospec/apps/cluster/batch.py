"""Run a batch on several engines, which are Ray actors; this process writes the results.

    nanospec --input requests.jsonl --output results.jsonl --replicas 2

Formats and resuming are those of `batch/run.py`. If a replica dies, Ray restarts it, runs its lines again,
and returns one result per line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from ...config import EngineConfig, SamplingParams
from ...engine.request import Limits
from ...extras.grammar.grammar import Grammars
from ...llm import LLM
from ...models.families import read_config
from ...outputs import RequestOutput
from ...text.tokenizer import Tokenizer
from ..batch.run import Batch, Line, line_error, num_tokens, prepare_lines, result_line
from ..serve.jobs import JobFailed
from ..serve.loop import EngineLoop
from ..tasks import Task
from .start import Bundle, connect_ray, last_error, load, need_ray

QUEUED = 2  # lines sent to a replica per row, so that the next one is there when one finishes
RETRIES = 3  # of a line whose replica died
RESTARTS = 5  # of a replica


def run_on_ray(
    batch: Batch, folder: Path, model: str, options: dict[str, Any], replicas: int
) -> dict[str, Any]:
    """Run a batch like `batch.run.run_batch`, on `replicas` engines. Raises OSError with a one-sentence
    message if they fail."""
    config = EngineConfig(**options)
    tokenizer, (_, model_config) = Tokenizer(folder), read_config(folder)
    window = config.max_model_len or model_config.max_position_embeddings
    limits = Limits(config, model_config.vocab_size, window, tokenizer)
    grammars = Grammars(tokenizer, model_config.vocab_size)

    def check(ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Check a line as an engine would, without loading one. A replica short of memory may have a smaller
        context length."""
        grammars.check(params)
        limits.check_prompt(ids)
        return limits.check_params(params)

    lines = prepare_lines(batch, tokenizer, check, window, config.seed)
    with batch.running():
        if lines:
            need_ray("ray.util")
            print(f"Starting Ray and {replicas} replicas ...", file=sys.stderr, flush=True)
            with redirect_stdout(StringIO()), connect_ray(replicas, config) as bundle:  # discards Ray's logs
                settings = partial(load, folder.absolute(), model, bundle, options), model, batch.source
                for result in run_lines(lines, settings, bundle, replicas, QUEUED * config.max_num_seqs):
                    batch.write(*result)
    return {**batch.statistics(), "replicas": replicas}


def run_lines(
    lines: Sequence[Line], settings: tuple[Any, ...], bundle: Bundle, replicas: int, at_once: int
) -> Iterator[tuple[bytes, int]]:
    """Yield results as lines finish; each replica runs up to `at_once` lines. Raises LineError for a line
    that the model does not support, ValueError if it cannot be loaded, OSError if replicas die repeatedly."""
    import ray
    from ray.util import ActorPool

    replica = ray.remote(LineEngine).options(
        num_cpus=bundle.cpus, num_gpus=bundle.gpus, max_restarts=RESTARTS, max_task_retries=RETRIES,
        max_concurrency=at_once,
    )  # fmt: skip
    actors = [replica.remote(*settings) for _ in range(replicas)]
    pool = ActorPool(actors * at_once)  # contains each actor once per concurrent line
    try:
        yield from pool.map_unordered(lambda actor, line: actor.answer.remote(*line), lines)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        if cause := last_error(str(error)):
            raise ValueError(cause) from None
        reason = f"a replica died {RESTARTS + 1} times, or {RETRIES + 1} times on one line; see Ray's logs"
        raise OSError(f"{reason}, and rerun the command to continue.") from None


class LineEngine:
    """A replica: an engine that batches its lines."""

    def __init__(self, load: Callable[[], LLM], model: str, source: str) -> None:
        self.llm, self.model, self.source = load(), model, source
        self.loop = EngineLoop(self.llm, sys.maxsize)  # the pool limits the waiting lines

    async def answer(self, task: Task, ids: list[int], params: SamplingParams) -> tuple[bytes, int]:
        """Return the result of a line and its number of tokens. A failed step ends the process."""
        try:
            params = self.llm.engine.check(ids, params)
        except ValueError as error:
            raise line_error(self.source, task.index, str(error)) from None
        self.loop.start()
        job = self.loop.submit([ids], params)
        try:
            done = [delta.done async for delta in job if delta is not None and delta.done is not None]
        except JobFailed:
            os._exit(1)  # the state of the device is unknown
        done.sort(key=lambda each: each.index)
        output = RequestOutput(f"request-{task.index}", None, ids, done)
        return result_line(task, output, self.model, self.llm.tokenizer), num_tokens(output)
