"""Whole outputs are distributed as the probabilities of all outputs say, whoever guesses; and these tests
see small defects. `make statistics` runs those that are marked, too: all ways, all parameters.
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
from nanospec.engine.request import seed_of
from nanospec.kernels.sampling import accept, sample, scores, top_k_top_p
from nanospec.kernels.sampling.accept import DELTA, EPSILON
from tests.drive import MODES, Job, run
from tests.exact import (
    Change,
    Logits,
    Output,
    expected_tv,
    fit,
    joint,
    least_p,
    logits_by_output,
    may_come,
    next_token,
    together,
)
from tests.ways import (
    ASKED,
    LENGTH,
    LOSSLESS,
    PROMPT,
    TEMPERATURES,
    VOCAB,
    WAYS,
    Likely,
    World,
    asked,
    draw,
    engine_for,
    make_world,
    rules,
)

BOUND = 1e-6  # seeds are fixed, so what passes once passes always


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def logits(world: World) -> Logits:
    return logits_by_output(world.folder, PROMPT, VOCAB, LENGTH)


# Those that differ in how they draw, lay out, accept or share.
SOME_WAYS = (
    "none",
    "draft",
    "medusa tree",
    "ngram tree+draft",
    "a user's dice",
    "a user's tree",
)
SOME_ASKED = (("nothing", 1.0), ("filters", 1.7), ("penalties", 0.6), ("min_tokens", 1.7), ("all", 1.0))


def test_outputs_are_distributed_as_counted(world: World, logits: Logits) -> None:
    """Of every way; of all that was asked, of both rules; and total variation falls as 1 / sqrt(N)."""
    cells = [asked(*what, rule) for rule in LOSSLESS for what in SOME_ASKED]
    counts = [[Counter[Output]() for _ in range(3)] for _ in cells]
    for i, way in enumerate(SOME_WAYS):
        own = cells[: len(rules(way)) * len(SOME_ASKED)]
        found = draw([engine_for(world, way, **MODES["as-on-gpu" if i % 2 else "plain"])], own, 40, i * 10**6)
        fits = [fit(drawn.outputs[-1], joint(logits, PROMPT, cell)) for drawn, cell in zip(found, own)]
        assert together(fits).p > BOUND, (way, fits)
        drafted, accepted = (sum(column) for column in list(zip(*found))[1:])
        assert 0.1 * drafted <= accepted <= 0.9 * drafted, (way, drafted, accepted)
        assert way == "none" or accepted > 50
        for counters, drawn in zip(counts, found):
            for total, part in zip(counters, drawn.outputs, strict=True):
                total.update(part)
    ratios = []
    for counters, cell in zip(counts, cells, strict=True):
        expected = joint(logits, PROMPT, cell)
        assert least_p(counters[-1], expected) > BOUND, cell
        ratios.append([fit(counter, expected).ratio for counter in counters])
    assert np.abs(np.mean(ratios, 0) - 1).max() < 0.1, ratios
    assert np.abs(np.array(ratios)[:, 2] - 1).max() < 0.25, ratios


@pytest.mark.statistics
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_with_all_that_may_be_asked(way: str, world: World, logits: Logits) -> None:
    grid = itertools.product(ASKED, TEMPERATURES, rules(way))
    cells = [asked(what, temperature, rule) for what, temperature, rule in grid]
    modes = ["plain"] if WAYS[way].own is Likely else MODES  # drafts made on the host cannot be captured
    engines = [engine_for(world, way, **MODES[mode]) for mode in modes]
    found = draw(engines, cells, 40, list(WAYS).index(way) * 10**9)
    fits = [fit(drawn.outputs[-1], joint(logits, PROMPT, cell)) for drawn, cell in zip(found, cells)]
    assert together(fits).p > BOUND, fits
    drafted, accepted = (sum(column) for column in list(zip(*found))[1:])
    assert 0.05 * drafted <= accepted <= 0.95 * drafted


def test_what_may_come_is_what_has_a_chance() -> None:
    """Also where scores are equal at the edge of top_k."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        top_k, top_p, min_p = int(rng.integers(-1, 9)), 1 - rng.random() / 2, rng.random() / 4
        params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
        x = rng.integers(0, 6, 7) / 2
        chances = next_token(x, (), (), params)
        assert [may_come(x, token, params, 1e-9) for token in range(7)] == (chances > 0).tolist()


def test_expected_total_variation_is_what_draws_have() -> None:
    generator, p = np.random.default_rng(1), np.array([0.5, 0.3, 0.15, 0.04, 0.01])
    for n in (4, 64, 1000):
        counts = generator.multinomial(n, p, size=4000)
        assert expected_tv(n, p) == pytest.approx(np.abs(counts / n - p).sum(1).mean() / 2, rel=0.03)


def test_pearsons_chances_are_uniform_for_draws_from_what_is_expected() -> None:
    generator = np.random.default_rng(2)
    p = generator.dirichlet(np.ones(40))
    outputs: list[Output] = [(i,) for i in range(40)]
    expected = dict(zip(outputs, p))
    draws = generator.multinomial(500, p, size=800)
    chances = [fit(dict(zip(outputs, counts)), expected).p for counts in draws]
    for level in (0.02, 0.1, 0.5):
        assert np.mean(np.array(chances) < level) == pytest.approx(level, abs=4 * (level / 800) ** 0.5)
    assert fit({(99,): 1, **dict.fromkeys(outputs, 10)}, expected).p == 0


def typical(after: list[int], epsilon: float, delta: float) -> Change:
    """What TYPICAL makes of a next token's probabilities where one draft follows all but the last token."""

    def change(p: np.ndarray, output: Output) -> np.ndarray:
        draft = after[[*PROMPT, *output][-1]]
        entropy = -sum(x * np.log(x) for x in p if x > 0)
        taken = len(output) < LENGTH - 1 and p[draft] > min(epsilon, delta * np.exp(-entropy))
        return np.eye(VOCAB)[draft] if taken else p

    return change


@pytest.mark.parametrize(
    ("after", "temperature", "without"),
    [([1, 3, 4, 2, 0], 0.5, (9.0, DELTA)), ([2, 1, 3, 2, 0], 1.0, (EPSILON, 9.0))],
    ids=["epsilon binds", "delta binds"],
)
def test_typical_outputs_are_distributed_as_documented(
    world: World, logits: Logits, after: list[int], temperature: float, without: tuple[float, float]
) -> None:
    """A draft above the lower bound is emitted always, others if the target draws them. `after` each token
    one draft, chosen so that this bound decides about some."""
    own = world._replace(said=torch.eye(VOCAB)[after])
    cells = [asked(what, temperature, "typical") for what in ("nothing", "all")]
    for drawn, cell in zip(draw([engine_for(own, "a user's", "typical")], cells, 256), cells, strict=True):
        right = joint(logits, PROMPT, cell, typical(after, EPSILON, DELTA))
        assert least_p(drawn.outputs[-1], right) > BOUND, cell
        assert least_p(drawn.outputs[-1], joint(logits, PROMPT, cell)) < BOUND, cell
        if cell is cells[0]:
            assert least_p(drawn.outputs[-1], joint(logits, PROMPT, cell, typical(after, *without))) < BOUND


def outputs_of(world: World, seeds: list[int]) -> list[Output]:
    engine = engine_for(world, "none")
    jobs = [Job(PROMPT, SamplingParams(max_tokens=2, seed=seed)) for seed in seeds]
    return [tuple(request.output_ids) for request in run(engine, jobs)]


def test_requests_with_different_seeds_are_independent(world: World, logits: Logits) -> None:
    """Neighbouring seeds, the outputs of one request, seeds that differ in their sign or upper half."""
    n = 400
    alone = joint(logits, PROMPT, SamplingParams(max_tokens=2))
    both = {a + b: p * q for a, p in alone.items() for b, q in alone.items()}
    first = outputs_of(world, [*range(n)])
    others: dict[str, Callable[[int], int]] = {
        "n=2": lambda seed: seed_of(seed, 1, 0),
        "without a seed": lambda seed: seed_of(None, 0, seed + 1),
        "upper half": lambda seed: seed + (1 << 32),
        "complement": lambda seed: ~seed,
    }
    pairs = {what: zip(first, outputs_of(world, [*map(other, range(n))])) for what, other in others.items()}
    pairs["neighbours"] = zip(first[::2], first[1::2])
    for what, drawn in pairs.items():
        assert fit(Counter(a + b for a, b in drawn), both).p > BOUND, what


class Defect(NamedTuple):
    """What stands in the code, what a defective one would have, and where that shows: who guesses, what is
    asked, of how many requests."""

    module: ModuleType
    function: str
    right: str
    wrong: str
    way: str
    asked: tuple[str, float, str]
    requests: int = 512


def mutated(defect: Defect) -> Callable[..., Any]:
    """The function with the defect."""
    function = getattr(defect.module, defect.function)
    source, made = inspect.getsource(function), dict[str, Any]()
    assert source.count(defect.right) == 1, f"{defect.function} has changed: say where its defect is now"
    exec(source.replace(defect.right, defect.wrong), function.__globals__, made)
    return made[defect.function]


RATIO = "e > log_q[draft] - log_p[draft]"
HEAVY = pytest.mark.statistics
DICE, DRAFT = "a user's dice", "draft"
DEFECTS = {
    "what is rejected may be drawn again": Defect(
        accept, "_rejection", "log_p.exp() - log_q.exp()", "log_p.exp()", DICE,
        ("nothing", 1.0, "rejection"), 256,
    ),
    "the bonus is drawn from the row before": Defect(
        sample, "scores_of", "logits[t]", "logits[t - (0 < place == len(row.ids) - 1)]", DRAFT,
        ("nothing", 1.0, "exact"),
    ),
    "two positions share their noise": Defect(
        sample, "draw", "position, torch", "position // 2, torch", DRAFT,
        ("filters", 1.0, "exact"), 256,
    ),
}  # fmt: skip
SMALL_DEFECTS = {
    "drafts are accepted 20 % too seldom": Defect(
        accept, "_rejection", RATIO, f"{RATIO} + 0.22", DICE, ("nothing", 1.7, "rejection"), 768
    ),
    "min_tokens counts from the beginning of the run": Defect(
        scores, "penalize", "position < int", "position - len(drafts) < int", DRAFT,
        ("min_tokens", 1.7, "exact"),
    ),
    "drafts are accepted 5 % too often": Defect(
        accept, "_rejection", RATIO, f"{RATIO} - 0.05", DICE, ("nothing", 1.7, "rejection"), 24_000
    ),
    "drafts are accepted 5 % too seldom": Defect(
        accept, "_rejection", RATIO, f"{RATIO} + 0.05", DICE, ("nothing", 1.7, "rejection"), 24_000
    ),
    "a residual draw shares its noise with the next position": Defect(
        accept, "_rejection", "seed ^ RESIDUAL.value, position", "seed, position + 1", DICE,
        ("nothing", 1.0, "rejection"), 2048,
    ),
    "acceptance shares its noise with the residual": Defect(
        accept, "_rejection", "seed ^ RESIDUAL.value", "seed ^ ACCEPTANCE.value", DICE,
        ("nothing", 1.7, "rejection"), 8192,
    ),
    "the draft's own filters are forgotten": Defect(
        accept, "_rejection", "log_probs(guess, s, table)",
        "(guess / table.temperature[s]).log_softmax(-1)", DRAFT, ("filters", 1.7, "rejection"),
        2048,
    ),
    "acceptance shares the noise of the draft": Defect(
        accept, "_rejection", "seed ^ ACCEPTANCE.value", "seed", DRAFT, ("nothing", 1.0, "rejection"), 1024
    ),
    "the draft's bias is forgotten": Defect(
        accept, "_rejection", "if table.penalized[s]", "if False", DRAFT, ("bias", 1.0, "rejection"), 1024
    ),
    "penalties do not count drafts": Defect(
        scores, "penalize", "for token in drafts", "for token in ()", DRAFT, ("penalties", 1.0, "exact")
    ),
    "top-p is of the whole vocabulary": Defect(
        top_k_top_p, "naive", "scores = scores[scores >= threshold]", "pass", DRAFT,
        ("filters", 1.7, "exact"), 1024,
    ),
    "repetition_penalty does not know the prompt": Defect(
        scores, "penalize", "(counts > 0) | table.in_prompt[s]", "counts > 0", DRAFT,
        ("repetition", 1.0, "exact"), 2048,
    ),
}  # fmt: skip


def chance_of(defect: Defect, world: World, logits: Logits) -> float:
    """Of outputs of three tokens, all of which one step may give; the dice know little here."""
    sharp = world._replace(said=2 * world.said)
    cell = replace(asked(*defect.asked), max_tokens=3)
    [drawn] = draw([engine_for(sharp, defect.way)], [cell], defect.requests)
    assert 0.1 * drawn.drafted < drawn.accepted < 0.9 * drawn.drafted
    return least_p(drawn.outputs[-1], joint(logits, PROMPT, cell))


@pytest.mark.parametrize("name", [*DEFECTS, *(pytest.param(name, marks=HEAVY) for name in SMALL_DEFECTS)])
def test_a_small_defect_would_show(
    name: str, world: World, logits: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = {**DEFECTS, **SMALL_DEFECTS}[name]
    monkeypatch.setattr(defect.module, defect.function, mutated(defect))
    if defect.module is not accept:  # which has no C++
        monkeypatch.setattr(sample, "use_native", lambda *_: False)
    assert chance_of(defect, world, logits) < BOUND


@pytest.mark.statistics
@pytest.mark.parametrize("name", SMALL_DEFECTS)
def test_without_the_defect_nothing_shows(name: str, world: World, logits: Logits) -> None:
    assert chance_of(SMALL_DEFECTS[name], world, logits) > 1e-3


@pytest.mark.statistics
@pytest.mark.parametrize(
    ("way", "rule", "what", "temperature"),
    [
        ("draft", "rejection", "nothing", 1.0),
        (DICE, "rejection", "all", 0.6),
    ],
)
def test_total_variation_falls_by_half_for_four_times_as_many(
    way: str, rule: str, what: str, temperature: float, world: World, logits: Logits
) -> None:
    cell = asked(what, temperature, rule)
    [drawn] = draw([engine_for(world, way)], [cell], 16_000)
    expected = joint(logits, PROMPT, cell)
    fits = [fit(counter, expected) for counter in drawn.outputs]
    assert min(one.p for one in fits) > 1e-4
    assert fits[0].tv / fits[2].tv == pytest.approx(4, rel=0.3)
    assert max(abs(one.ratio - 1) for one in fits) < 0.5  # by chance 0.05 to 0.18, the fewer outputs the more
