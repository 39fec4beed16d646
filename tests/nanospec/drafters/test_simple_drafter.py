"""Drafters given as objects: on the device (`Drafter`) and in plain Python (`SimpleDrafter`)."""

import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanospec import Drafter, SamplingParams, SimpleDrafter, SpecConfig
from nanospec.device import stopwatch
from nanospec.drafters import make_proposal
from nanospec.drafters.estimates import FIRST, MISS, StepCosts
from nanospec.drafters.methods import Drafters, resolve_drafters
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from tests.drive import MODES, Job, K, cycle, cycle_model, make_engine, random_jobs, run, run_and_compare
from tests.tiny import tiny_model

JOB = Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))


class Next(Drafter):
    """Drafts what `cycle_model` generates, but ignores limits, dtypes and strides."""

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        index = rows.clamp(min=0).long()
        last = table.tokens[index, (table.num_tokens[index] - 1).clamp(min=0)]
        drafts = (last + torch.arange(1, k + 1)[:, None]).t() % table.vocab_size
        return make_proposal(drafts, torch.full_like(index, k))


class Learner(SimpleDrafter):
    """Drafts the token that followed the last one in any text so far, and checks its arguments."""

    def __init__(self) -> None:
        self.after: dict[int, int] = {}

    def draft(self, tokens: list[int], k: int) -> list[int]:
        seen = self.notes.get("seen", [])
        assert tokens[: len(seen)] == seen  # committed tokens do not change, and notes belong to the request
        assert k >= 1
        self.notes["seen"] = tokens.copy()
        self.after.update(pairwise(tokens))
        result = [tokens[-1]]
        while len(result) <= k and result[-1] in self.after:
            result.append(self.after[result[-1]])
        tokens[-1] = -1  # the list is a copy
        return result[1:]


class Stub(SimpleDrafter):
    """Drafts the return value of a function."""

    def __init__(self, answer: Callable[[list[int], int], Any]) -> None:
        self.answer = answer

    def draft(self, tokens: list[int], k: int) -> Iterable[int]:
        given: Iterable[int] = self.answer(tokens, k)
        return given


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.mark.slow
@pytest.mark.parametrize(("k", "is_async", "lookup"), [(4, True, False), ("auto", False, True)])
def test_simple_drafter_does_not_change_output(model: Model, k: K, is_async: bool, lookup: bool) -> None:
    """There are too few rows and blocks for all requests, so some are preempted."""
    jobs = random_jobs(random.Random("plain"), 64, 7)
    drafter: Any = ["ngram", Learner()] if lookup else Learner()
    engine = make_engine(model, k, drafter=drafter, max_num_seqs=4, num_blocks=10, async_scheduling=is_async)
    if k == "auto":
        engine.policy.costs = StepCosts({4: {1: 1.0, 64: 1.5}})
    run_and_compare(engine, model, jobs)
    assert engine.metrics.num_preemptions > 0
    assert engine.metrics.spec.by_drafter["Learner"][1] > 0
    assert ("ngram" in engine.metrics.spec.by_drafter) == lookup


@pytest.mark.parametrize("mode", MODES)
def test_device_drafters_do_not_change_output(mode: str) -> None:
    model = cycle_model()
    choices: list[Drafters] = [Next(), [Next(), "ngram"], ["ngram", Next()]]
    for drafter in choices:
        engine = make_engine(model, 4, drafter=drafter, **MODES[mode])
        [request] = run_and_compare(engine, model, [JOB])
        assert request.stats.by_drafter == {"Next": [4, 16, 16]}


def replaced(**fields: Callable[[Tensor], Any]) -> Callable[[Proposal], Proposal]:
    """Return a function that replaces fields of a proposal by functions of their number of drafts [1]."""
    return lambda made: made._replace(**{name: change(made.num_drafts) for name, change in fields.items()})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda made: None, "returned None; it must return a Proposal"),
        (lambda made: 1 // 0, "failed: integer division or modulo by zero"),
        (replaced(source=lambda n: n.expand(1, 4).to("meta")), "source as .* meta .* expected .* cpu"),
        (replaced(drafts=lambda n: n.expand(1, 4) + 0.5), "drafts as .*float32; .*int32"),
        (replaced(num_drafts=lambda n: [4]), "num_drafts as list; expected Tensor"),
        (replaced(drafter=lambda n: None), "drafter as NoneType"),
        (replaced(drafter=lambda n: n * 0 + (1 << 30)), "drafter 1073741824 and match_len 0; "),
        (replaced(match_len=lambda n: -n), "drafter 0 and match_len -4; "),
    ],
)
def test_invalid_proposal_is_reported(change: Callable[[Proposal], Any], what: str) -> None:
    class Other(Next):
        def propose(self, table: Table, rows: Tensor, k: int) -> Any:
            return change(super().propose(table, rows, k))

    with pytest.raises((ArithmeticError, TypeError, ValueError), match=f"Other.propose .*{what}"):
        run(make_engine(cycle_model(), 4, drafter=[Other(), "ngram"], trace=True), [JOB])


def test_drafts_may_be_any_iterable_of_integers() -> None:
    for drafts in (repeat(7), np.arange(50, dtype=np.uint8), torch.arange(50), iter([5] * 90), ()):
        drafter = Stub(partial(lambda drafts, tokens, k: drafts, drafts))
        [request] = run(make_engine(cycle_model(), 4, drafter=drafter), [JOB])
        assert request.output_ids == cycle(4, 20)
        assert request.stats.num_drafted <= 4 * request.stats.num_steps


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (lambda *_: [31, 32], ValueError, "Stub.draft returned 32; token ids must be integers from 0 to 31"),
        (lambda *_: [-1], ValueError, "returned -1"),
        (lambda *_: [True], ValueError, "returned True"),
        (lambda *_: "abc", ValueError, "returned 'a'"),
        (lambda *_: None, RuntimeError, "failed on 3 tokens, k=4: TypeError: 'NoneType' object is not iter"),
        (lambda *_: (1 // n for n in (1, 0)), RuntimeError, "Stub.draft failed on 3 .*: ZeroDivisionError"),
    ],
)
def test_invalid_drafts_are_reported(answer: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        run(make_engine(cycle_model(), 4, drafter=Stub(answer)), [JOB])


def test_draft_is_called_for_usable_drafts_only() -> None:
    arguments: list[tuple[int, int, int]] = []

    def answer(tokens: list[int], k: int) -> list[int]:
        arguments.append((tokens[0], len(tokens), k))
        return cycle(tokens[-1] + 1, k)

    drafter = Stub(answer)
    engine = make_engine(cycle_model(), 6, drafter=drafter, max_num_seqs=1)
    never = SamplingParams(max_tokens=9, num_speculative_tokens=0)
    requests = run(engine, [JOB, Job([5], never), Job([9], SamplingParams(temperature=0, max_tokens=3))])
    # A step also emits the target's own token, so fewer drafts fit at the end.
    assert arguments == [(1, 3, 6), (1, 10, 6), (1, 17, 5), (9, 1, 2)]
    assert requests[0].stats.by_drafter == {"Stub": [3, 17, 17]}
    drafter.max_drafts = 2
    assert make_engine(cycle_model(), 6, drafter=drafter).worker.max_k == 2
    assert make_engine(cycle_model(), 6, drafter=["ngram", drafter]).worker.max_k == 6


def test_slow_drafter_is_rarely_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is called rarely even if all its drafts are accepted. Lookup before it is not limited."""
    seconds = [0.0]

    def slow(tokens: list[int], k: int) -> list[int]:
        seconds.append(seconds[-1] + 0.05)
        return cycle(tokens[-1] + 1, k, 128)

    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: seconds[-1]))
    engine = make_engine(cycle_model(128), "auto", drafter=["ngram", Stub(slow)], max_model_len=256)
    engine.policy.costs = StepCosts({64: {1: 1.0, 64: 1.5}})
    [request] = run(engine, [Job([1, 2], SamplingParams(temperature=0, max_tokens=200))])
    assert 1 <= len(seconds) - 1 <= 6
    assert request.stats.by_drafter["ngram"][1] > 50


def test_drafters_that_do_not_fit_are_rejected(model: Model) -> None:
    many, far = Next(), Next()
    many.max_drafts = "4"  # type: ignore[assignment]
    far.hidden_state_layers = (99,)
    drafters: Any
    plain, none, tree = SpecConfig(), SpecConfig(method="none"), SpecConfig(tree_width=2)
    for spec, drafters, what in (
        (plain, Learner, r"drafter=Learner is a class; pass an instance: Learner\(\)"),
        (plain, "ngam", "drafter='ngam' must be a Drafter or 'ngram'"),
        (plain, [], r"drafter=\[\] cannot be combined with method='ngram'"),
        (plain, [Learner(), "ngram"], "Learner has runs_model=True, so it must be the last drafter"),
        (plain, 7, "drafter=7 must be a Drafter"),
        (plain, ["ngram", "draft"], r"drafter='draft' needs weights; use SpecConfig\(method="),
        (none, Learner(), "cannot be combined with method='none'"),
        (tree, Learner(), "tree_width=2 is not supported by Learner"),
        (plain, many, "Next.max_drafts='4' must be an integer of at least 0"),
    ):
        with pytest.raises(ValueError, match=what):
            resolve_drafters(spec, drafters)
    resolve_drafters(tree, ["ngram", Learner()])
    with pytest.raises(ValueError, match="Next.hidden_state_layers=99 must be an integer from 0 to"):
        make_engine(model, 4, drafter=far)
    with pytest.raises(ValueError, match="enforce_eager=False captures steps"):
        make_engine(model, 4, drafter=["ngram", Learner()], enforce_eager=False)
    with pytest.raises(NotImplementedError, match=r"SimpleDrafter must define draft\(self, tokens, k\)"):
        run(make_engine(model, 4, drafter=SimpleDrafter()), [JOB])
    with pytest.raises(NotImplementedError, match="Drafter must define propose"):
        run(make_engine(model, 4, drafter=Drafter()), [JOB])


def test_requests_that_can_use_no_drafts_do_not_count_as_rejections() -> None:
    engine = make_engine(cycle_model(), "auto", drafter=Learner(), **MODES["plain"])
    policy: Any = engine.policy
    run(engine, [Job([1, 2], SamplingParams(temperature=0, max_tokens=1))] * 40)
    assert policy.estimator.chances(1)[0][0] == FIRST[MISS]
