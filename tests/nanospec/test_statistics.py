"""Outputs follow the exact distribution with every drafter, and these tests detect small defects. `make
statistics` also runs the marked tests: all drafting setups, all sampling parameters.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nanospec import SamplingParams
from nanospec.engine.request import derive_seed
from nanospec.kernels.sampling import accept, sample, scores, top_k_top_p
from nanospec.kernels.sampling.accept import DELTA, EPSILON
from tests.drive import MODES, Job, run
from tests.exact import (
    Change,
    Logits,
    Output,
    combined_p,
    fit,
    joint,
    least_p,
    logits_by_output,
    may_draw,
    next_token,
)
from tests.setups import (
    LENGTH,
    LOSSLESS,
    PROMPT,
    SAMPLING,
    SETUPS,
    TEMPERATURES,
    VOCAB,
    BigramDrafter,
    Models,
    draw,
    engine_for,
    make_models,
    params_for,
    rules,
)

BOUND = 1e-6  # seeds are fixed, so results are reproducible
HEAVY = pytest.mark.statistics
SOME_SETUPS = "none", "draft", "ngram tree+draft", "custom sampling", "custom tree"
SOME_SAMPLING = ("nothing", 1.0), ("filters", 1.7), ("penalties", 0.6), ("all", 1.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def logits(models: Models) -> Logits:
    return logits_by_output(models.folder, PROMPT, VOCAB, LENGTH)


def test_outputs_follow_exact_distribution(models: Models, logits: Logits) -> None:
    """For setups that differ in sampling, layout, acceptance or sharing, and for all setups together."""
    cells = [params_for(*what, rule) for rule in LOSSLESS for what in SOME_SAMPLING]
    counts = [Counter[Output]() for _ in cells]
    for i, setup in enumerate(SOME_SETUPS):
        own, mode = cells[: len(rules(setup)) * len(SOME_SAMPLING)], "as-on-gpu" if i % 2 else "plain"
        result = draw([engine_for(models, setup, **MODES[mode])], own, 28, i * 10**6)
        fits = [fit(drawn.outputs, joint(logits, PROMPT, cell)) for drawn, cell in zip(result, own)]
        assert combined_p(fits) > BOUND, (setup, fits)
        drafted, accepted = (sum(column) for column in list(zip(*result))[1:])
        assert 0.1 * drafted <= accepted <= 0.9 * drafted, (setup, drafted, accepted)
        assert setup == "none" or accepted > 50
        for counter, drawn in zip(counts, result):
            counter.update(drawn.outputs)
    for counter, cell in zip(counts, cells, strict=True):
        assert least_p(counter, joint(logits, PROMPT, cell)) > BOUND, cell


@HEAVY
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setup", SETUPS)
def test_every_setup_with_all_sampling_params(setup: str, models: Models, logits: Logits) -> None:
    grid = itertools.product(SAMPLING, TEMPERATURES, rules(setup))
    cells = [params_for(what, temperature, rule) for what, temperature, rule in grid]
    on_host = SETUPS[setup].custom is BigramDrafter  # such drafts cannot be captured
    engines = [engine_for(models, setup, **MODES[mode]) for mode in (["plain"] if on_host else MODES)]
    result = draw(engines, cells, 40, list(SETUPS).index(setup) * 10**9)
    fits = [fit(drawn.outputs, joint(logits, PROMPT, cell)) for drawn, cell in zip(result, cells)]
    assert combined_p(fits) > BOUND, fits
    drafted, accepted = (sum(column) for column in list(zip(*result))[1:])
    assert 0.05 * drafted <= accepted <= 0.95 * drafted


def test_references() -> None:
    """`may_draw` agrees with `next_token`, also with ties at the boundary of top_k; p-values are uniform."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        top_k, top_p, min_p = int(rng.integers(-1, 9)), 1 - rng.random() / 2, rng.random() / 4
        params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
        x = rng.integers(0, 6, 7) / 2
        chances = next_token(x, (), (), params)
        assert [may_draw(x, token, params, 1e-9) for token in range(7)] == (chances > 0).tolist()
    p = rng.dirichlet(np.ones(40))
    outputs: list[Output] = [(i,) for i in range(40)]
    expected = dict(zip(outputs, p))
    levels = np.array(
        [fit(dict(zip(outputs, counts)), expected).p for counts in rng.multinomial(500, p, size=800)]
    )
    for level in (0.02, 0.1, 0.5):
        assert np.mean(levels < level) == pytest.approx(level, abs=4 * (level / 800) ** 0.5)
    assert fit({(99,): 1, **dict.fromkeys(outputs, 10)}, expected).p == 0


def typical(after: list[int], epsilon: float, delta: float) -> Change:
    """Return how TYPICAL changes the next token's probabilities, with a draft for all but the last token."""

    def change(p: np.ndarray, output: Output) -> np.ndarray:
        draft = after[[*PROMPT, *output][-1]]
        entropy = -sum(x * np.log(x) for x in p if x > 0)
        taken = len(output) < LENGTH - 1 and p[draft] > min(epsilon, delta * np.exp(-entropy))
        return np.eye(VOCAB)[draft] if taken else p

    return change


@pytest.mark.parametrize(
    ("after", "temperature", "without"),
    [
        pytest.param([1, 3, 4, 2, 0], 0.5, (9.0, DELTA), marks=HEAVY, id="epsilon binds"),
        pytest.param([2, 1, 3, 2, 0], 1.0, (EPSILON, 9.0), id="delta binds"),
    ],
)
def test_typical_outputs_follow_documented_distribution(
    models: Models, logits: Logits, after: list[int], temperature: float, without: tuple[float, float]
) -> None:
    """A draft above the lower bound is always emitted, others only if the target draws them. `after` maps
    each token to its draft, chosen so that the bound matters for some."""
    own = models._replace(bigram=torch.eye(VOCAB)[after])
    cells = [params_for(what, temperature, "typical") for what in ("nothing", "all")]
    for drawn, cell in zip(draw([engine_for(own, "custom", "typical")], cells, 200), cells, strict=True):
        right = joint(logits, PROMPT, cell, typical(after, EPSILON, DELTA))
        assert least_p(drawn.outputs, right) > BOUND, cell
        assert least_p(drawn.outputs, joint(logits, PROMPT, cell)) < BOUND, cell
        if cell is cells[0]:
            assert least_p(drawn.outputs, joint(logits, PROMPT, cell, typical(after, *without))) < BOUND


def test_requests_with_different_seeds_are_independent(models: Models, logits: Logits) -> None:
    """Consecutive seeds, several outputs of one request, seeds that differ in sign or upper half."""
    n, engine = 300, engine_for(models, "none")
    alone = joint(logits, PROMPT, SamplingParams(max_tokens=2))
    both = {a + b: p * q for a, p in alone.items() for b, q in alone.items()}

    def outputs_of(seed_of: Callable[[int], int]) -> list[Output]:
        jobs = [Job(PROMPT, SamplingParams(max_tokens=2, seed=seed_of(i))) for i in range(n)]
        return [tuple(request.output_ids) for request in run(engine, jobs)]

    first = outputs_of(lambda seed: seed)
    others: dict[str, Callable[[int], int]] = {
        "n=2": lambda seed: derive_seed(seed, 1, 0),
        "without a seed": lambda seed: derive_seed(None, 0, seed + 1),
        "upper half": lambda seed: seed + (1 << 32),
        "complement": lambda seed: ~seed,
    }
    pairs = {what: zip(first, outputs_of(other)) for what, other in others.items()}
    pairs["neighbours"] = zip(first[::2], first[1::2])
    for what, drawn in pairs.items():
        assert fit(Counter(a + b for a, b in drawn), both).p > BOUND, what


class Defect(NamedTuple):
    """A code fragment, its defective replacement, and a setup, sampling parameters and number of requests
    that reveal the defect."""

    module: ModuleType
    function: str
    right: str
    wrong: str
    setup: str
    sampling: tuple[str, float, str]
    requests: int = 512


def mutated(defect: Defect) -> Callable[..., Any]:
    """Return the function with the defect."""
    function = getattr(defect.module, defect.function)
    source, made = inspect.getsource(function), dict[str, Any]()
    assert source.count(defect.right) == 1, f"{defect.function} has changed: say where its defect is now"
    exec(source.replace(defect.right, defect.wrong), function.__globals__, made)
    return made[defect.function]


RATIO = "e > log_q[draft] - log_p[draft]"
PLAIN, DICE, DRAFT = ("nothing", 1.0, "rejection"), "custom sampling", "draft"
DEFECTS = {
    "rejected token may be drawn again": Defect(
        accept, "_rejection", "log_p.exp() - log_q.exp()", "log_p.exp()", DICE, PLAIN, 256
    ),
    "two positions share their noise": Defect(
        sample, "draw", "position, torch", "position // 2, torch", DRAFT, ("filters", 1.0, "exact"), 256
    ),
}
SMALL_DEFECTS = {
    "bonus token is drawn from the previous position": Defect(
        sample, "scores_of", "logits[t]", "logits[t - (0 < node == len(row.ids) - 1)]", DRAFT,
        ("nothing", 1.0, "exact"),
    ),
    "min_tokens counts from the beginning of the run": Defect(
        scores, "penalize", "position < int", "position - len(drafts) < int", DRAFT,
        ("min_tokens", 1.7, "exact"),
    ),
    "drafts are accepted 5 % too often": Defect(
        accept, "_rejection", RATIO, f"{RATIO} - 0.05", DICE, ("nothing", 1.7, "rejection"), 24_000
    ),
    "a residual draw shares its noise with the next position": Defect(
        accept, "_rejection", "seed ^ RESIDUAL.value, position", "seed, position + 1", DICE, PLAIN, 2048
    ),
    "acceptance shares the noise of the draft": Defect(
        accept, "_rejection", "seed ^ ACCEPTANCE.value", "seed", DRAFT, PLAIN, 1024
    ),
    "filters of the draft are ignored": Defect(
        accept, "_rejection", "log_probs(logits, s, table)",
        "(logits / table.temperature[s]).log_softmax(-1)", DRAFT, ("filters", 1.7, "rejection"), 2048,
    ),
    "top-p is of the whole vocabulary": Defect(
        top_k_top_p, "naive", "scores = scores[scores >= threshold]", "pass", DRAFT,
        ("filters", 1.7, "exact"), 1024,
    ),
    "repetition_penalty ignores the prompt": Defect(
        scores, "penalize", "(counts > 0) | table.in_prompt[s]", "counts > 0", DRAFT,
        ("repetition", 1.0, "exact"), 2048,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DEFECTS, *(pytest.param(name, marks=HEAVY) for name in SMALL_DEFECTS)])
def test_defect_is_detected(
    name: str, models: Models, logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In outputs of three tokens, which one step may emit, with an inaccurate drafter; and there is no false
    alarm without the defect."""
    defect = {**DEFECTS, **SMALL_DEFECTS}[name]
    sharp, cell = (
        models._replace(bigram=2 * models.bigram),
        replace(params_for(*defect.sampling), max_tokens=3),
    )

    def p_value() -> float:
        [drawn] = draw([engine_for(sharp, defect.setup)], [cell], defect.requests)
        assert 0.1 * drawn.drafted < drawn.accepted < 0.9 * drawn.drafted
        return least_p(drawn.outputs, joint(logits, PROMPT, cell))

    assert name in DEFECTS or p_value() > 1e-3
    monkeypatch.setattr(defect.module, defect.function, mutated(defect))
    if defect.module is not accept:  # accept has no C++ version
        monkeypatch.setattr(sample, "use_native", lambda *_: False)
    assert p_value() < BOUND
