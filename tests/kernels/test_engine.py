"""The whole engine on Triton kernels in the interpreter, compared with `naive`."""

from __future__ import annotations

import random

import pytest

from nanospec.config import SamplingParams
from nanospec.kernels import launch
from nanospec.models.decoder import Model
from tests.drive import Job, assert_same, make_engine, outcome, random_jobs, run, run_alone
from tests.tiny import tiny_model


def small_model() -> Model:
    return tiny_model(num_layers=1, vocab_size=64)


def make_jobs() -> list[Job]:
    jobs = random_jobs(random.Random(5), 64, 3, max_prompt=40, max_tokens=7)
    again = SamplingParams(temperature=0, max_tokens=9, logit_bias={5: 60.0}, logprobs=2)
    return [*jobs, Job([5, 9, 5, 5], again)]  # repeats 5, so that drafts are accepted


@pytest.mark.parametrize(
    ("k", "eager", "num_blocks"),
    [(0, True, None), (3, True, 6), (4, False, None)],
    ids=["K0", "K3-few-blocks", "K4-captured"],
)
def test_engine_on_triton_matches_naive(k: int, eager: bool, num_blocks: int | None) -> None:
    jobs = make_jobs()
    expected = run_alone(small_model(), jobs, max_model_len=64)
    with launch.forced("triton"):
        model = small_model()  # created here, so that its weights are packed for the kernels
        engine = make_engine(
            model,
            k,
            num_blocks=num_blocks,
            enforce_eager=eager,
            lazy_capture=True,
            max_model_len=64,
            max_num_seqs=3,
            max_num_batched_tokens=24,
        )
        requests = run(engine, jobs)
    for request, wanted in zip(requests, expected, strict=True):
        assert_same(outcome(request), wanted)
    assert (requests[-1].stats.num_accepted > 0) == (k > 0)
    assert (engine.metrics.num_preemptions > 0) == (num_blocks is not None)
