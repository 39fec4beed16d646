"""Speculation never changes the output: tokens, finish reasons and logprobs.

The reference runs every request alone, without drafts, prefix cache, chunked prefill or preemption. Random
arrivals, aborts and faults are simulated in `campaigns/simulate`, with a mock model."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from nanospec.config import SamplingParams
from nanospec.drafters.policy import Policy
from nanospec.kernels.speculation.report import RowReport
from nanospec.models.decoder import Model
from tests.drive import (
    MODES,
    FunctionDrafter,
    Job,
    K,
    assert_idle,
    assert_same,
    cycle,
    cycle_model,
    finish,
    greedy,
    known_text_drafter,
    make_engine,
    outcome,
    random_drafter,
    random_jobs,
    run,
    run_alone,
)
from tests.tiny import tiny_model, tiny_tokenizer

VOCAB, WINDOW = 24, 100


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(vocab_size=VOCAB, max_position_embeddings=128)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    rng = random.Random(1)
    jobs = random_jobs(rng, VOCAB, 8) + random_jobs(rng, VOCAB, 4, max_tokens=WINDOW)
    return [*jobs, jobs[0], Job(jobs[0].prompt, SamplingParams(temperature=0, max_tokens=30))]


DRAFTERS: dict[str, Callable[[list[list[int]]], FunctionDrafter]] = {
    "correct": known_text_drafter,
    "mostly-correct": lambda texts: known_text_drafter(texts, wrong=lambda at: at % 4 == 1),
    "random": lambda texts: random_drafter(VOCAB),
}
GPU = MODES["as-on-gpu"]
ASYNC: dict[str, Any] = {"async_scheduling": True, "enforce_eager": True}
CAPTURED: dict[str, Any] = {"async_scheduling": False, "enforce_eager": False, "lazy_capture": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "drafter", "options"),
    [
        (1, "ngram", {"max_num_seqs": 1}),
        (3, "ngram", {"max_num_batched_tokens": 1, **GPU}),
        (8, "ngram", {"enable_prefix_caching": False}),
        ("auto", "ngram", GPU),
        (5, "ngram", {"num_blocks": 9, "max_num_seqs": 5, **CAPTURED}),
        (None, "ngram", {"num_blocks": 7, **GPU}),
        (0, "ngram", {"max_num_batched_tokens": 7}),
        (1, "correct", GPU),
        (5, "correct", {"num_blocks": 9, "max_num_seqs": 5, **ASYNC}),
        (8, "correct", {"max_num_batched_tokens": 7, **CAPTURED}),
        ("auto", "correct", {"num_blocks": 9, "max_num_batched_tokens": 40}),
        (5, "mostly-correct", {"num_blocks": 7, **GPU}),
        (5, "mostly-correct", {"block_size": 32, "num_blocks": 5, **ASYNC}),
        (3, "mostly-correct", {"num_blocks": 8, "enable_prefix_caching": False, **CAPTURED}),
        (3, "random", {"num_blocks": 9, "max_num_seqs": 5, **GPU}),
        (8, "random", {"max_num_batched_tokens": 1}),
        ("auto", "random", ASYNC),
    ],
)
def test_output_is_that_of_each_request_alone(
    model: Model, jobs: list[Job], k: K, drafter: str, options: dict[str, Any]
) -> None:
    """Some requests arrive later, and one is aborted. Captured steps have padding, which has no effect."""
    expected = run_alone(model, jobs, max_model_len=WINDOW)
    texts = [job.prompt + e.token_ids for job, e in zip(jobs, expected, strict=True)]
    given = None if drafter == "ngram" else DRAFTERS[drafter](texts)
    engine = make_engine(model, k, drafter=given, max_model_len=WINDOW, **options)
    requests = [engine.add(job.prompt, job.params) for job in jobs[:9]]
    aborted = engine.add(jobs[0].prompt, greedy(90))
    for job in jobs[9:]:
        engine.step()
        requests.append(engine.add(job.prompt, job.params))
    engine.abort(aborted)
    finish(engine)
    assert_idle(engine)
    for request, wanted, job in zip(requests, expected, jobs, strict=True):
        assert_same(outcome(request), wanted, job)
        own, drafted = job.params.num_speculative_tokens, len(request.stats.drafted_by_position)
        assert drafted <= (16 if own is None else own)
    metrics, all_requests = engine.metrics, [*requests, aborted]
    for name in ("num_tokens", "num_steps", "num_drafted", "num_accepted", "num_steps_with_drafts"):
        assert getattr(metrics.spec, name) == sum(getattr(r.stats, name) for r in all_requests)
    assert metrics.spec.num_tokens == sum(len(r.output_ids) for r in all_requests)
    assert sum(metrics.spec.accepted_by_position) == metrics.spec.num_accepted
    assert sum(metrics.spec.drafted_by_position) == metrics.spec.num_drafted
    assert metrics.num_preemptions == sum(r.num_preemptions for r in all_requests)
    assert (metrics.num_preemptions > 0) == ("num_blocks" in options)
    assert (metrics.num_finished, metrics.num_aborted) == (len(requests), 1)


def test_policy_observes_every_step_and_resets_with_row(model: Model) -> None:
    events: list[tuple[int, ...]] = []

    class Spy(Policy):
        def observe(self, reports: Mapping[int, RowReport]) -> None:
            events.extend((row, each.num_drafted, each.num_accepted) for row, each in reports.items())

        def reset(self, row: int) -> None:
            events.append((row,))

    limits = (8, None), (6, None), (4, 1), (3, 0)
    jobs = [Job([i, 2], greedy(n, num_speculative_tokens=own)) for i, (n, own) in enumerate(limits)]
    texts = [job.prompt + known.token_ids for job, known in zip(jobs, run_alone(model, jobs), strict=True)]
    engine = make_engine(model, 3, drafter=known_text_drafter(texts), max_num_seqs=1)
    engine.policy = Spy()
    run(engine, jobs)
    step, one = (0, 3, 3), (0, 1, 1)
    assert events == [(0,), step, step, (0,), step, one, (0,), one, one, (0,)]


def test_seed_decides_output(model: Model) -> None:
    """A seed decides the output in any batch; requests without one follow the engine's."""
    own = [Job([3, 1, 4], SamplingParams(temperature=1, seed=seed, max_tokens=20)) for seed in (1, 2)]
    none = [Job([3, 1, 4], SamplingParams(temperature=1, max_tokens=20))] * 3
    runs = [[r.output_ids for r in run(make_engine(model, 3, seed=s), own + none)] for s in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0][:2] == runs[2][:2] == [e.token_ids for e in run_alone(model, own)]
    assert len({tuple(ids) for ids in runs[0] + runs[2]}) == 6  # seeds 1, 2; 3, 4, 5; and 4, 5, 6


def test_policy_gets_the_total_context_and_whether_requests_wait(model: Model) -> None:
    engine = make_engine(model, 0, max_num_seqs=2)
    engine.policy.choose = choose = Mock(wraps=engine.policy.choose)  # type: ignore[method-assign]
    run(engine, [Job([1] * n, SamplingParams(max_tokens=1)) for n in (3, 4, 5)])
    assert [call.args[2:] for call in choose.call_args_list] == [(7, True), (5, False)]


POISON = 23  # the embedding of this token is NaN


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_nan_aborts_one_request_only(mode: dict[str, Any]) -> None:
    model = tiny_model(vocab_size=24)
    model.embedding = model.embedding.clone()
    model.embedding[POISON] = float("nan")
    jobs = random_jobs(random.Random(8), POISON, 4, max_tokens=30)
    jobs = [Job(prompt, replace(params, logit_bias={POISON: -1e6})) for prompt, params in jobs]
    expected = run_alone(model, jobs)
    engine = make_engine(model, 4, num_blocks=9, **mode)
    prompts = [1, 2, 3, POISON, *range(20), 4, 5, 6], [1, 2, 3, POISON, 0], [*range(20), *[POISON] * 30]
    for _ in range(2):  # the second time, every block has been used before
        nan_requests = [engine.add(prompt, SamplingParams(max_tokens=9, logprobs=1)) for prompt in prompts]
        requests = [engine.add(job.prompt, job.params) for job in jobs]
        finish(engine)
        assert_idle(engine)
        for request in nan_requests:
            assert request.finish_reason == "abort"
            assert request.output_ids == request.logprobs == []
            assert request.error == (
                f"At position {request.num_tokens} the logits are NaN or infinite; check the weights "
                "and the dtype (float16 is limited to 65,504)."
            )
        for request, wanted in zip(requests, expected, strict=True):
            assert_same(outcome(request), wanted)


def test_blocks_of_a_nan_request_are_not_cached() -> None:
    model = tiny_model(vocab_size=24)
    job = Job([i * 5 % 24 for i in range(40)], greedy(8))
    engine, embedding = make_engine(model, 3), model.embedding
    model.embedding = embedding * float("nan")
    copies = [engine.add(job.prompt, job.params) for _ in range(3)]
    engine.step()
    model.embedding = embedding
    finish(engine)
    assert [request.finish_reason for request in copies] == ["abort"] * 3
    assert_same(outcome(run(engine, [job])[0]), run_alone(model, [job])[0])


@pytest.mark.parametrize(
    ("k", "spec", "options"),
    [
        (4, {}, {}),
        (7, {"tree_width": 3}, MODES["as-on-gpu"]),
        ("auto", {}, {"num_blocks": 9, "max_num_seqs": 5}),
        (16, {"tree_width": 2}, {"num_blocks": 9, "max_num_seqs": 5, "enable_prefix_caching": False}),
        (None, {}, {}),
    ],
    ids=["chain", "captured-tree", "auto-preempted", "tree-preempted", "none"],
)
def test_output_does_not_depend_on_prediction(
    model: Model, k: Any, spec: dict[str, Any], options: dict[str, Any]
) -> None:
    """Greedy and seeded requests with and without predictions run together, some of them preempted."""
    jobs = random_jobs(random.Random(5), VOCAB, 14, max_tokens=WINDOW)
    expected, predicted = run_alone(model, jobs, max_model_len=WINDOW), list[Job]()
    for i, (job, known) in enumerate(zip(jobs, expected, strict=True)):
        right, prompt = known.token_ids, job.prompt
        wrong = [(token + 1) % VOCAB if at % 5 == 3 else token for at, token in enumerate(right)]
        kinds: Any = right, wrong, prompt + right, right[::-1], right[:1], right * WINDOW, [], None
        prediction = kinds[i % len(kinds)]
        predicted.append(Job(prompt, replace(job.params, prediction=prediction, num_speculative_tokens=None)))
    engine = make_engine(model, k, spec=spec, max_model_len=WINDOW, **options)
    requests = run(engine, predicted)
    for request, wanted, job in zip(requests, expected, predicted, strict=True):
        assert_same(outcome(request), wanted, job)
    assert (engine.metrics.num_preemptions > 0) == ("num_blocks" in options)
    assert any(request.completion().num_accepted_prediction_tokens for request in requests) == (k is not None)


@pytest.mark.parametrize("num_blocks", [None, 4], ids=["", "preempted"])
def test_right_prediction_saves_steps(num_blocks: int | None) -> None:
    """A preempted request continues at the place of the prediction that it had reached."""
    right = cycle(6, 40, 128)
    wrong = [*right[:17], 99, *right[18:]]
    options: dict[str, Any] = {"num_blocks": num_blocks, "max_num_seqs": 2, "max_model_len": 64}
    engine = make_engine(cycle_model(128), 7, spec={"prompt_lookup_history": False}, **options)
    jobs = [Job([5], greedy(40, prediction=text)) for text in (right, wrong)]
    requests = run(engine, jobs)
    assert [request.output_ids for request in requests] == [right] * 2
    assert engine.metrics.num_preemptions == (num_blocks is not None)
    # A step ends before the wrong token, and the next one finds no match for the right token.
    assert [request.stats.num_steps for request in requests] == [5, 7]
    done = [request.completion() for request in requests]
    assert [each.num_accepted_prediction_tokens for each in done] == [35, 33]
    assert {each.num_prediction_tokens for each in done} == {40}
    assert done[0].to_dict()["stats"]["num_accepted_prediction_tokens"] == 35
    [without] = run(engine, [Job([5], greedy(40))])  # reuses a row that had a reference
    assert (without.stats.num_steps, without.stats.num_drafted) == (40, 0)


def test_predictions_are_checked_and_cut_to_window(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    engine = make_engine(tiny_model(vocab_size=tokenizer.vocab_size), 4, tokenizer=tokenizer)
    for prediction, length in (("word " * 10**5, 128), ("a<s>\0é" * 3, None), (deque((1, 2)), 2), ("", 0)):
        [request] = run(engine, [Job([1, 2], greedy(3, prediction=prediction))])
        assert length in (None, request.completion().num_prediction_tokens)
    cases: list[tuple[Any, str]] = [
        ([1, tokenizer.vocab_size], "prediction contains"), ([1, "a"], "prediction contains"),
        (bytearray(b"ab"), "must be a string or a list"), (7, "must be a string or a list"),
        ("\ud800", "prediction: "),
    ]  # fmt: skip
    for prediction, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.add([1], SamplingParams(prediction=prediction))
    with pytest.raises(ValueError, match="require a tokenizer; use token ids"):
        make_engine(tiny_model(), 4).add([1], greedy(prediction="a"))
