"""The acceptance rules in the engine: the guarantees of each, in batches that mix them."""

from __future__ import annotations

import itertools
import random
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

VOCAB = 64


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def draft() -> Model:
    return similar_model(0.2)


def engine_of(model: Model, draft: Model, rule: str, k: int = 3, **options: Any) -> Any:
    spec = {"method": "ngram+draft", "acceptance": rule, **options.pop("spec", {})}
    return make_engine(model, k, spec=spec, draft_model=draft, **options)


def jobs_with(rule: str, count: int, seed: int = 0, **params: Any) -> list[Job]:
    rng = random.Random(seed)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 30, **params}
    prompts = [rng.choices(range(VOCAB), k=rng.randint(1, 30)) for _ in range(count)]
    return [
        Job(prompt, SamplingParams(seed=i, acceptance=rule, **options)) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_greedy_and_exact_rows_are_unaffected_by_other_rules(
    model: Model, draft: Model, rule: str, mode: str
) -> None:
    exact = random_jobs(random.Random(1), VOCAB, 5)
    greedy = jobs_with(rule, 3, temperature=0.0)
    others = jobs_with(rule, 4)
    marked = [Job(j.prompt, SamplingParams(**{**vars(j.params), "acceptance": "exact"})) for j in exact]
    engine = engine_of(model, draft, rule, **MODES[mode])
    mixed = [job for group in itertools.zip_longest(marked, greedy, others) for job in group if job]
    requests = run(engine, mixed)
    unmarked = [Job(j.prompt, SamplingParams(**{**vars(j.params), "acceptance": None})) for j in mixed]
    for job, request, expected in zip(mixed, requests, run_alone(model, unmarked), strict=True):
        if job not in others:
            assert_same(outcome(request), expected)


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_draft_model_equal_to_target_is_always_accepted(model: Model, rule: str) -> None:
    engine = engine_of(model, model, rule, spec={"method": "draft"})
    requests = run(engine, jobs_with(rule, 6, top_p=0.8))
    for request in requests:
        assert request.stats.num_accepted == request.stats.num_drafted > 10


@pytest.mark.parametrize("mode", MODES)
def test_chains_use_rejection_rule_next_to_trees(model: Model, draft: Model, mode: str) -> None:
    outputs = []
    for width in (1, 2):  # prompts without n-gram matches
        spec = {"tree_width": width, "prompt_lookup_min": 4}
        engine = engine_of(model, draft, "rejection", spec=spec, **MODES[mode])
        requests = run(engine, jobs_with("rejection", 8))
        outputs.append([request.output_ids for request in requests])
        assert engine.metrics.spec.by_drafter["draft"][1] > 100
    same = sum(a == b for a, b in zip(*outputs, strict=True))
    assert same >= 6  # drafts by lookup may differ


def test_typical_accepts_more_and_is_reported_as_lossy(model: Model, draft: Model) -> None:
    accepted = {}
    for rule in ("exact", "typical"):
        engine = engine_of(model, draft, "typical", spec={"method": "draft"})
        requests = run(engine, jobs_with(rule, 12, temperature=0.6))
        accepted[rule] = engine.metrics.spec.acceptance_rate
        for request in requests:
            assert request.stats.to_dict().get("acceptance", "exact") == rule
            assert request.stats.to_dict().get("lossy", False) == (rule == "typical")
    assert accepted["typical"] > accepted["exact"] + 0.05


def test_acceptance_rule_the_engine_lacks_is_rejected(model: Model) -> None:
    engine = make_engine(model, 3)
    with pytest.raises(ValueError, match="requires an engine started with"):
        engine.add([1, 2], SamplingParams(acceptance="typical"))
    engine.add([1, 2], SamplingParams(acceptance="exact"))
