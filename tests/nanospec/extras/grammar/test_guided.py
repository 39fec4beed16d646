"""Structured outputs follow their grammar and do not depend on speculation."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nanospec import SamplingParams
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.extras.grammar.grammar import Guide
from tests.drive import MODES, Job, assert_same, make_engine, outcome, run
from tests.nanospec.extras.grammar.guided import FORMATS, VOCAB, is_valid
from tests.nanospec.extras.tracing.records import check
from tests.tiny import tiny_model, tiny_tokenizer

JSON, _, _, CHOICE, _ = (fmt for fmt, _ in FORMATS)
FORCED = {"type": "choice", "choice": ["red or green or blue or red again"]}
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that creates engines; their unguided output never follows a grammar."""
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return partial(make_engine, tiny_model(vocab_size=VOCAB), tokenizer=tokenizer)


def run_plain_and_speculative(make: Make, jobs: list[Job], k: int = 6, **options: Any) -> list[Request]:
    """Check that speculation does not change the results, and return the requests that speculated."""
    plain, speculative = (run(make(k, **options), jobs) for k in (None, k))
    for a, b in zip(plain, speculative, strict=True):
        assert_same(outcome(b), outcome(a))
        assert (a.text, a.stop_reason) == (b.text, b.stop_reason)
    return speculative


def test_many_outputs_follow_format_with_and_without_speculation(make: Make) -> None:
    """At high temperatures, sampling is almost uniform over all allowed tokens."""
    rng, jobs = random.Random(1), []
    for i in range(80):
        temperature, fmt = (0.0, 1.0, 8.0, 100.0)[i // 4 % 4], FORMATS[i % 4][0]
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=70, response_format=fmt)
        jobs.append(Job(rng.choices(range(1, 270), k=6) + list(range(30, 40)), params))
    requests = run_plain_and_speculative(make, jobs, max_num_seqs=64, trace=True)
    complete = [request for request in requests if request.finish_reason == "stop"]
    for request in complete:
        assert request.params.response_format is not None
        assert is_valid(request.text, request.params.response_format), request.text
        check(request)
    assert len(complete) > 60
    assert len({request.text for request in requests}) > 40


def test_more_drafts_than_a_captured_step_can_hold(make: Make) -> None:
    """64 rows of 17 tokens exceed the largest captured step, so fewer drafts are verified."""
    jobs = [Job([i, 2], SamplingParams(max_tokens=40, response_format=FORCED)) for i in range(64)]
    run_plain_and_speculative(make, jobs, 16, max_num_seqs=64, max_model_len=48, **MODES["as-on-gpu"])


def test_invalid_formats_are_rejected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="response_format needs a tokenizer"):
        make_engine(tiny_model(), 2).add([1], SamplingParams(response_format=CHOICE))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'nanospec\[grammar\]'"):
        make(4).check([1], SamplingParams(response_format=CHOICE))


def test_forced_tokens_are_accepted_and_respect_limits(make: Make) -> None:
    params = SamplingParams(temperature=1, response_format=FORCED)
    engine, result = make(3, enable_prefix_caching=False), []
    for most, own in ((1, None), (3, None), (4, None), (7, None), (6, 2)):
        limited = replace(params, max_tokens=most, num_speculative_tokens=own)
        [request] = run(engine, [Job([1], limited)])
        result.append((request.stats.num_drafted, request.stats.num_accepted, request.stats.num_steps))
    assert result == [(0, 0, 1), (2, 2, 1), (3, 3, 1), (5, 5, 2), (4, 4, 2)]
    [whole] = run(make(30, spec={"tree_width": 3}), [Job([1], replace(params, max_tokens=50))])
    assert whole.text == FORCED["choice"][0]
    assert whole.stats.num_accepted == len(whole.output_ids)
    for length, reason in ((0, "stop"), (1, "length")):
        cut = replace(params, max_tokens=len(whole.output_ids) - length)
        assert run(engine, [Job([1], cut)])[0].finish_reason == reason


def test_prediction_is_looked_up_in_constrained_outputs(make: Make) -> None:
    """The output differs from the prediction in the middle; the drafts that follow are found again."""
    fmt = {"type": "regex", "regex": "[a-z]{60}"}
    jobs = [Job([3], SamplingParams(temperature=8, seed=1, max_tokens=70, response_format=fmt))]
    [alone] = run(make(None), jobs)
    right = alone.output_ids
    for prediction, most in ((right, 0.25), ([*right[:20], 5, *right[22:]], 0.4), (right[::-1], 1)):
        jobs = [Job(job.prompt, replace(job.params, prediction=prediction)) for job in jobs]
        [request] = run(make(7), jobs)
        assert_same(outcome(request), outcome(alone))
        assert request.stats.num_steps <= most * len(right) + 1
        assert (request.completion().num_accepted_prediction_tokens > len(right) / 2) == (most < 1)


def test_failed_output_keeps_its_prompt_cached(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guide, "error", "It failed.")
    engine, job = make(2), Job(list(range(1, 40)), SamplingParams(response_format=CHOICE))
    first, again = [run(engine, [job])[0] for _ in range(2)]
    assert first.error == again.error == "It failed."
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
