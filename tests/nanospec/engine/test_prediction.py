"""Predicted outputs: a text that n-gram lookup searches changes the number of steps, never the output."""

import random
from dataclasses import replace
from typing import Any

import pytest

from nanospec.config import SamplingParams
from nanospec.models.decoder import Model
from tests.drive import (
    MODES,
    Job,
    assert_same,
    cycle,
    cycle_model,
    greedy,
    make_engine,
    outcome,
    random_jobs,
    run,
    run_alone,
)
from tests.tiny import tiny_model, tiny_tokenizer

VOCAB, WINDOW = 24, 100


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(vocab_size=VOCAB, max_position_embeddings=128)


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
        kinds = right, wrong, prompt + right, right[::-1], right[:1], right * WINDOW, [], None
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
    engine = make_engine(cycle_model(128), 7, **options)
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
    for prediction, length in (("word " * 10**5, 128), ("a<s>\0é" * 3, None), ((1, 2), 2), ("", 0)):
        [request] = run(engine, [Job([1, 2], greedy(3, prediction=prediction))])
        assert length in (None, request.completion().num_prediction_tokens)
    cases: list[tuple[Any, str]] = [
        ([1, tokenizer.vocab_size], "prediction contains token id"), ([1, "a"], "prediction contains token id"),
        (b"ab", "must be a string or a list"), (7, "must be a string or a list"), ("\ud800", "prediction: "),
    ]  # fmt: skip
    for prediction, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.add([1], SamplingParams(prediction=prediction))
    with pytest.raises(ValueError, match="requires a tokenizer; use a list of token ids"):
        make_engine(tiny_model(), 4).add([1], greedy(prediction="a"))
