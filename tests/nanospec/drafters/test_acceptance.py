"""The acceptance rules in the engine: the guarantees of each, in batches that mix them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest

from nanospec import SamplingParams
from nanospec.models.decoder import Model
from tests.drive import (
    MODES,
    Job,
    assert_same,
    make_engine,
    outcome,
    random_jobs,
    run,
    run_alone,
    similar_model,
)
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def draft() -> Model:
    return similar_model(0.2)


def engine_of(model: Model, draft: Model, rule: str, method: str = "ngram+draft", **options: Any) -> Any:
    spec = {"method": method, "acceptance": rule, **options.pop("spec", {})}
    return make_engine(model, 3, spec=spec, draft_model=draft, **options)


def jobs_with(rule: str | None, count: int, **params: Any) -> list[Job]:
    rng = random.Random(0)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30, "acceptance": rule, **params}
    prompts = [rng.choices(range(64), k=rng.randint(1, 30)) for _ in range(count)]
    return [Job(prompt, SamplingParams(seed=i, **options)) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(("mode", "rule"), [("plain", "rejection"), ("as-on-gpu", "typical")])
def test_greedy_and_exact_rows_are_unaffected_by_other_rules(
    model: Model, draft: Model, mode: str, rule: str
) -> None:
    exact = [
        Job(j.prompt, replace(j.params, acceptance="exact")) for j in random_jobs(random.Random(1), 64, 5)
    ]
    greedy, others = jobs_with(rule, 3, temperature=0.0), jobs_with(rule, 4)
    mixed = [job for group in zip_longest(exact, greedy, others) for job in group if job]
    requests = run(engine_of(model, draft, rule, **MODES[mode]), mixed)
    unmarked = [Job(job.prompt, replace(job.params, acceptance=None)) for job in mixed]
    for job, request, expected in zip(mixed, requests, run_alone(model, unmarked), strict=True):
        if job not in others:
            assert_same(outcome(request), expected)


def test_draft_model_equal_to_target_is_always_accepted(model: Model) -> None:
    engine = engine_of(model, model, "rejection", "draft")
    for request in run(engine, jobs_with("rejection", 3, top_p=0.8) + jobs_with("typical", 3, top_p=0.8)):
        assert request.stats.num_accepted == request.stats.num_drafted > 10


def test_chains_use_rejection_rule_next_to_trees(model: Model, draft: Model) -> None:
    outputs = []
    for width in (1, 2):  # prompts without n-gram matches
        spec = {"tree_width": width, "prompt_lookup_min": 4}
        engine = engine_of(model, draft, "rejection", spec=spec, **MODES["as-on-gpu"])
        requests = run(engine, jobs_with("rejection", 8))
        outputs.append([request.output_ids for request in requests])
        assert engine.metrics.spec.by_drafter["draft"][1] > 100
    same = sum(a == b for a, b in zip(*outputs, strict=True))
    assert same >= 6  # drafts by lookup may differ


def test_typical_accepts_more_and_is_reported_as_lossy(model: Model, draft: Model) -> None:
    engine, rates = engine_of(model, draft, "typical", "draft"), {}
    for rule in ("exact", "typical"):
        stats = [request.stats for request in run(engine, jobs_with(rule, 10, temperature=0.6))]
        rates[rule] = sum(each.num_accepted for each in stats) / sum(each.num_drafted for each in stats)
        for each in stats:
            assert each.to_dict().get("acceptance", "exact") == rule
            assert each.to_dict().get("lossy", False) == (rule == "typical")
    assert rates["typical"] > rates["exact"] + 0.05
