"""A small engine with little memory, its requests, and the checks after a fault."""

from __future__ import annotations

from itertools import chain
from typing import Any
from unittest.mock import Mock

from nanospec import LLM, SamplingParams
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.models.decoder import Model
from tests.drive import MODES, Job, assert_idle, make_engine, run_alone
from tests.tiny import tiny_model

VOCAB, WINDOW = 24, 64
SHARED = [1, 2, 3, 4] * 5  # the common prefix of all prompts

JOBS = [
    Job(SHARED + [i] * (5 * i + 1), SamplingParams(temperature=i % 2, seed=i, max_tokens=24))
    for i in range(3)
]


def small_model() -> Model:
    return tiny_model(vocab_size=VOCAB, num_layers=1)


def reference(model: Model, jobs: list[Job] = JOBS) -> list[list[int]]:
    """Return the output of each job when it runs alone."""
    return [outcome.token_ids for outcome in run_alone(model, jobs, max_model_len=WINDOW)]


def small_engine(model: Model, mode: str, k: int = 3, **options: Any) -> Engine:
    """Return an engine that splits prompts into chunks and preempts requests."""
    tight = {"num_blocks": 5, "max_num_batched_tokens": 24, "max_num_seqs": 3, "max_model_len": WINDOW}
    return make_engine(model, k, **{**tight, **MODES[mode], **options})


def small_llm(model: Model, mode: str, **options: Any) -> LLM:
    """Return an `LLM` with a small engine, without a checkpoint."""
    llm = object.__new__(LLM)
    llm.engine, llm.tokenizer = small_engine(model, mode, **options), Mock()
    llm.config, llm.shared = llm.engine.config, SharedEngine(llm.engine)
    llm._closed = False
    return llm


def run(llm: LLM, jobs: list[Job] = JOBS) -> list[list[int]]:
    """Run all jobs in one call and return their output tokens."""
    outputs = llm.generate([job.prompt for job in jobs], [job.params for job in jobs])
    return [output.outputs[0].token_ids for output in outputs]


def stream(llm: LLM) -> None:
    """Run streams concurrently and abandon some of them."""
    streams: list[Any] = [llm.stream_pieces(job.prompt, job.params) for job in JOBS]
    try:
        for i, each in enumerate(streams):
            for number, _ in enumerate(each):
                if i < 2 and number == 2:
                    break
            if i == 1:
                each.close()
    finally:
        for each in streams:
            each.close()


def assert_sound(engine: Engine) -> None:
    """Check that no rows or blocks are held, hashes are consistent, and no time is negative."""
    while engine._queue:  # a queued step of requests that were aborted later
        engine.step()
    assert_idle(engine)
    pool = engine.scheduler.pool
    assert not any(pool._references)
    assert sorted(chain(*pool.free)) == list(range(pool.num_blocks))
    assert {name: block for block, name in pool._hash_of.items()} == pool._block_of
    assert min(stage.seconds for stage in engine.worker.stages.values()) >= 0
