"""Run a batch on several engines, which are Ray actors; this process writes the results.

Formats and resuming are those of `batch/run.py`. If a replica dies, Ray restarts it, runs its lines again,
and returns one result per line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence, Set
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from ...config import EngineConfig
from ...llm import LLM
from ...outputs import RequestOutput
from ..batch.lines import num_tokens, result_line
from ..batch.run import Batch, Line, prepare_lines
from ..serve.jobs import JobFailed
from ..serve.loop import EngineLoop
from ..tasks import Task
from .start import connect_ray, last_error, load, need_ray


def run_on_ray(
    batch: Batch, folder: Path, model: str, options: dict[str, Any], replicas: int
) -> dict[str, Any]:
    """Run a batch like `run_batch`, on `replicas` engines. Raises ValueError for a line that the model does
    not support, or if the model cannot be loaded, and OSError if replicas die repeatedly."""
    need_ray("ray.util")
    import ray
    from ray.util import ActorPool

    print(f"Starting Ray and {replicas} replicas ...", file=sys.stderr, flush=True)
    config = EngineConfig(**options)
    at_once = 2 * config.max_num_seqs  # lines sent to a replica, so that the next is there when one finishes
    with batch.running(), redirect_stdout(StringIO()), connect_ray(replicas, config) as bundle:
        replica = ray.remote(LineEngine).options(
            num_cpus=bundle.cpus, num_gpus=bundle.gpus, max_concurrency=at_once,
            max_restarts=-1, max_task_retries=3,  # a line that ends four replicas fails
        )  # fmt: skip
        load_replica = partial(load, folder.absolute(), model, bundle, options)
        actors = [replica.remote(load_replica, model) for _ in range(replicas)]
        pool = ActorPool(actors * at_once)  # contains each actor once per concurrent line
        try:
            lines = ray.get(actors[0].prepare.remote(batch.source, batch.tasks, batch.done))
            for result in pool.map_unordered(lambda actor, line: actor.answer.remote(*line), lines):
                batch.write(*result)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            if cause := last_error(str(error)):
                raise ValueError(cause) from None
            raise OSError("replicas died repeatedly; see Ray's logs, and rerun to continue.") from None
    return batch.statistics()


class LineEngine:
    """A replica: an engine that batches its lines."""

    def __init__(self, load: Callable[[], LLM], model: str) -> None:
        self.llm, self.model = load(), model
        self.loop = EngineLoop(self.llm, sys.maxsize)  # the pool limits the waiting lines

    async def prepare(self, source: str, tasks: Sequence[Task], done: Set[int]) -> list[Line]:
        """Check all lines before any is run; see `prepare_lines`."""
        return prepare_lines(source, tasks, done, self.llm)

    async def answer(self, task: Task, ids: list[int]) -> tuple[bytes, int]:
        """Return the result of a line and its number of tokens. A failed step ends the process."""
        params = self.llm.engine.check(ids, task.params)  # replicas with less memory accept shorter contexts
        self.loop.start()
        job = self.loop.submit([ids], params)
        try:
            done = [delta.done async for delta in job if delta is not None and delta.done is not None]
        except JobFailed:
            os._exit(1)  # the state of the device is unknown; Ray restarts the replica
        done.sort(key=lambda each: each.index)
        output = RequestOutput(f"request-{task.index}", None, ids, done)
        return result_line(task, output, self.model, self.llm.tokenizer), num_tokens(output)
