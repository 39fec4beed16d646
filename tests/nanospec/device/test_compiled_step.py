"""The compiled CPU step, in bfloat16 from the first layer to the committed tokens."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanospec.kernels.native import library
from nanospec.models.cpu import CompiledModel
from tests.drive import Job, K, make_engine, outcome, random_jobs, run, run_alone
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C++ compiler: install g++")

VOCAB, WINDOW = 24, 100


def test_output_is_independent_of_drafts_and_batch() -> None:
    """Compare tokens and log-probabilities with all sampling parameters."""
    sizes: dict[str, Any] = {"max_position_embeddings": 128, "intermediate_size": 96, "head_dim": 32}
    model = tiny_model(dtype=torch.bfloat16, vocab_size=VOCAB, **sizes)
    assert isinstance(model, CompiledModel)
    rng = random.Random(1)
    jobs = random_jobs(rng, VOCAB, 12) + random_jobs(rng, VOCAB, 4, max_tokens=WINDOW)
    expected = run_alone(model, jobs, max_model_len=WINDOW)
    settings: list[tuple[K, bool]] = [(None, False), (1, True), (3, False), (8, True), ("auto", False)]
    for k, eager in settings:
        engine = make_engine(model, k, max_model_len=WINDOW, enforce_eager=eager)
        for job, request, wanted in zip(jobs, run(engine, jobs), expected, strict=True):
            assert outcome(request) == wanted, (k, job)


@pytest.mark.parametrize(
    ("method", "eager"), [("ngram", True), ("ngram+dflash", False), ("ngram+eagle3", True)]
)
def test_trees_do_not_change_tokens_or_logprobs(method: str, eager: bool) -> None:
    """Some requests are longer than one span of attention, which would reveal a change of summation order."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_heads": 8}
    wide = tiny_model(dtype=torch.bfloat16, vocab_size=VOCAB, num_layers=2, **sizes)
    rng = random.Random(1)
    jobs = [
        Job(job.prompt * rng.choice((1, 4)), replace(job.params, logprobs=3, max_tokens=40))
        for job in random_jobs(rng, VOCAB, 7)
    ]
    spec = {"method": method, "tree_width": 4}
    engine = make_engine(wide, 12, spec=spec, max_model_len=400, enforce_eager=eager)
    requests = run(engine, jobs)
    for job, request, wanted in zip(jobs, requests, run_alone(wide, jobs, max_model_len=400), strict=True):
        assert outcome(request) == wanted, job
    assert engine.metrics.spec.num_accepted > 40
