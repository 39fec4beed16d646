"""The compiled CPU step, in bfloat16 from the first layer to the committed tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanospec.config import SamplingParams
from nanospec.kernels.native import library
from nanospec.models.cpu import CompiledModel
from nanospec.models.decoder import Model
from tests.drive import Job, K, Outcome, make_engine, outcome, random_jobs, run, run_alone
from tests.random_weights import random_heads
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")

VOCAB, WINDOW = 24, 100


@pytest.fixture(scope="module")
def model() -> Model:
    sizes: dict[str, Any] = {"max_position_embeddings": 128, "intermediate_size": 96, "head_dim": 32}
    return tiny_model(dtype=torch.bfloat16, vocab_size=VOCAB, **sizes)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Requests with all sampling parameters, including penalties."""
    rng = random.Random(1)
    return random_jobs(rng, VOCAB, 12) + random_jobs(rng, VOCAB, 4, max_tokens=WINDOW)


@pytest.fixture(scope="module")
def expected(model: Model, jobs: list[Job]) -> list[Outcome]:
    return run_alone(model, jobs, max_model_len=WINDOW)


@pytest.mark.parametrize(
    ("k", "eager"), [(None, False), (1, True), (3, False), (8, True), ("auto", False)], ids=str
)
def test_output_is_independent_of_drafts_and_batch(
    model: Model, jobs: list[Job], expected: list[Outcome], k: K, eager: bool
) -> None:
    engine = make_engine(model, k, max_model_len=WINDOW, enforce_eager=eager)
    assert isinstance(model, CompiledModel)
    for job, request, wanted in zip(jobs, run(engine, jobs), expected, strict=True):
        assert outcome(request) == wanted, job  # log-probabilities too


@pytest.fixture(scope="module")
def wide() -> Model:
    """A model whose attention would reveal a change of summation order."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_heads": 8}
    return tiny_model(dtype=torch.bfloat16, vocab_size=VOCAB, num_layers=2, **sizes)


@pytest.mark.parametrize(("method", "eager"), [("ngram", True), ("ngram+medusa", False)])
def test_trees_do_not_change_tokens_or_logprobs(wide: Model, method: str, eager: bool) -> None:
    """Greedy and seeded requests in one batch, some longer than one span of attention."""
    rng = random.Random(1)
    jobs = [
        Job(job.prompt * rng.choice((1, 4)), replace(job.params, logprobs=3, max_tokens=40))
        for job in random_jobs(rng, VOCAB, 7)
    ]
    spec, heads = {"method": method, "tree_width": 4}, None
    if "medusa" in method:
        heads = random_heads(wide, 3, vocab=20)
    engine = make_engine(wide, 12, spec=spec, heads=heads, max_model_len=400, enforce_eager=eager)
    requests = run(engine, jobs)
    for job, request, wanted in zip(jobs, requests, run_alone(wide, jobs, max_model_len=400), strict=True):
        assert outcome(request) == wanted, job
    assert engine.metrics.spec.num_accepted > 40


def test_previous_block_contents_do_not_matter(model: Model) -> None:
    """Blocks need not be zeroed, since steps write finite values only."""
    jobs = [Job([3, 1, 2] * 4, SamplingParams(temperature=0, max_tokens=60)) for _ in range(3)]
    outputs = []
    for value in (0.0, torch.finfo(torch.bfloat16).max):
        engine: Any = make_engine(model, 6, max_model_len=WINDOW, spec={"tree_width": 4})
        engine.worker.kv_cache.fill_(value)
        outputs.append([request.output_ids for request in run(engine, jobs)])
    assert outputs[0] == outputs[1]
    assert len(outputs[0][0]) == 60
