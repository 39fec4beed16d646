"""A batch answered by several engines: a Ray Data pipeline of replicas, and one writer, this process.

    nanospec --input requests.jsonl --output results.jsonl --replicas 2

Lines, results and what an interrupted run leaves are those of `cli/batch.py`. Ray runs a line at least once:
when a replica dies, what it had under way is run again, by the one that takes its place. Each line is written
once, by its number.
"""

from __future__ import annotations

import logging
import pickle
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

from ...config import EngineConfig, SamplingParams, SpecConfig
from ...engine.request import Limits, check_request
from ...extras.grammar.grammar import Grammars
from ...models.config import ModelConfig
from ...text.tokenizer import Tokenizer
from ..cli.batch import Check, prompt_ids, refused, say_how, seeded
from ..cli.batch_results import Batch
from .lines import Line, LineEngine, Result
from .replica import Settings
from .start import Share, need_ray, ray_for

QUEUED = 2  # lines that a replica has, for each of its rows: the next are there when one ends
TASKS = 4000  # of Ray, which takes some ms for each: longer batches have several lines in one,
MOST_LINES = 16  # whose results come together
RETRIES = 3  # of a line whose replica died
RESTARTS = 5  # of a replica


def run_on_ray(
    batch: Batch,
    folder: Path,
    model: str,
    spec: SpecConfig,
    options: dict[str, Any],
    replicas: int,
) -> dict[str, Any]:
    """As `cli.batch.run_batch`, with so many engines. OSError with a sentence if they fail."""
    config = EngineConfig(spec=spec, **options)
    todo, tokenizer = batch.todo, Tokenizer(folder)
    say_how(tokenizer, todo)
    check, params = checks(folder, config, tokenizer), seeded(batch.tasks, config.seed)
    window = longest(folder, config)
    prompts = [prompt_ids(tokenizer, check, window, task, batch.source) for task in todo]
    lines = [Line(task, ids, params[task.index]) for task, ids in zip(todo, prompts, strict=True)]
    with batch.running():
        if lines:
            need_ray("ray.data")
            print(f"Starting Ray and {replicas} replicas ...", file=sys.stderr, flush=True)
            with redirect_stdout(sys.stderr), ray_for(replicas, config) as share:  # Ray prints its messages
                settings = Settings(
                    str(folder.absolute()), model, spec, share.options(options), share.neighbours
                )
                # Closed while Ray is there: left to the garbage collector it would start another one.
                with closing(stream(lines, settings, share, replicas, config.max_num_seqs)) as results:
                    write_once(results, batch)
    return {**batch.figures(), "replicas": replicas}


def write_once(results: Iterator[Result], batch: Batch) -> None:
    """Write each line once. Raises LineError for a line that the model cannot take, and ValueError if it
    cannot be loaded."""
    written: set[int] = set()
    for result in results:
        if result.failed:
            raise ValueError(result.failed)
        if result.refused:
            raise refused(batch.source, result.number, result.refused)
        if result.number not in written:
            written.add(result.number)
            batch.write(result.line, result.tokens)


def longest(folder: Path, config: EngineConfig) -> int:
    """The window of a model, as far as it is known without its weights."""
    return config.max_model_len or ModelConfig.from_path(folder).max_position_embeddings


def checks(folder: Path, config: EngineConfig, tokenizer: Tokenizer) -> Check:
    """What an engine would refuse, without its weights. The window may still be found smaller in a replica,
    where memory is short."""
    model = ModelConfig.from_path(folder)
    limits = Limits(model.vocab_size, longest(folder, config), True, config.spec.acceptance)
    grammars = Grammars(tokenizer, model.vocab_size)

    def check(ids: Sequence[int], params: SamplingParams) -> None:
        own = () if params.ignore_eos else tokenizer.eos_token_ids
        check_request(ids, params, tuple(dict.fromkeys((*params.stop_token_ids, *own))), limits)
        grammars.check(params)

    return check


def stream(
    lines: Sequence[Line], settings: Settings, share: Share, replicas: int, rows: int
) -> Generator[Result, None, None]:
    """The results, as they come."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    context = DataContext.get_current()
    context.enable_progress_bars, context.max_consecutive_actor_init_deaths = False, RETRIES
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    blocks = list(grouped(lines))
    at_once = tasks_at_once(len(blocks), replicas, -(-QUEUED * rows // len(blocks[0])))
    pool = ActorPoolStrategy(
        size=replicas, max_tasks_in_flight_per_actor=at_once, max_concurrent_calls_per_actor=at_once
    )
    data = ray.data.from_arrow([_block(block) for block in blocks])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the last argument: there is no other yet
        data = data.map_batches(
            LineEngine,
            batch_size=None,
            batch_format="pyarrow",
            compute=pool,
            fn_constructor_args=(settings,),
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            ray_remote_args_fn=lambda: {"max_task_retries": RETRIES, "max_restarts": RESTARTS},
        )
    tables = iter(data.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"))
    try:
        with closing(tables):
            for table in tables:
                yield from (Result(**row) for row in table.to_pylist())
    except ray.exceptions.RayError as error:
        raise OSError(f"{why(error)}; the same command goes on from there.") from None


def why(error: BaseException) -> str:
    """What Ray says of a replica that has failed, in one sentence."""
    import ray

    if isinstance(error, ray.exceptions.RayActorError):
        return f"a replica has died {RESTARTS + 1} times, or {RETRIES + 1} with one line; see Ray's logs"
    last = [line for line in str(error).splitlines() if line.strip()][-1:]
    return f"a replica has failed: {''.join(last).strip().rstrip('.')}"


def grouped(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """What is one task of Ray each: a line, or some where there are many thousands."""
    size, rest = min(max(len(lines) // TASKS, 1), MOST_LINES), iter(lines)
    while block := list(islice(rest, size)):
        yield block


def tasks_at_once(tasks: int, replicas: int, most: int) -> int:
    """Of one replica: enough to keep it busy, but none of the others' part of a short batch."""
    return max(min(most, -(-tasks // replicas)), 1)


def _block(lines: Sequence[Line]) -> Any:
    import pyarrow

    return pyarrow.table({"line": [pickle.dumps(line) for line in lines]})
