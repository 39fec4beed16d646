"""Drafters given as objects: on the device (`Drafter`) and in plain Python (`SimpleDrafter`)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from itertools import count, pairwise, repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec import Drafter, SamplingParams, SimpleDrafter, SpecConfig
from nanospec.drafters import draft_limits, make_proposal
from nanospec.drafters.estimates import DraftTimes
from nanospec.drafters.methods import Drafters, resolve_drafters
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from tests.drive import (
    MODES,
    Job,
    K,
    cycle,
    cycle_model,
    finish,
    make_engine,
    random_jobs,
    run,
    run_and_compare,
)
from tests.tiny import tiny_model

JOB = Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))


class Echo(Drafter):
    """Drafts the last token again."""

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        index = rows.clamp(min=0)
        last = table.tokens[index, (table.num_tokens[index] - 1).clamp(min=0)]
        return make_proposal(last[:, None].repeat(1, k), draft_limits(table, rows, k))


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


@pytest.mark.parametrize(("k", "lag"), [(4, False), ("auto", False), (4, True)])
@pytest.mark.parametrize("lookup", [False, True], ids=["alone", "behind-lookup"])
def test_simple_drafter_does_not_change_output(model: Model, lookup: bool, lag: bool, k: Any) -> None:
    """Mixed batches, with too few rows and blocks for all requests, so that some are preempted."""
    jobs = random_jobs(random.Random("plain"), 64, 10)
    drafter: Any = ["ngram", Learner()] if lookup else Learner()
    engine = make_engine(model, k, drafter=drafter, max_num_seqs=4, num_blocks=16, async_scheduling=lag)
    run_and_compare(engine, model, jobs)
    assert engine.metrics.num_preemptions > 0
    assert engine.metrics.spec.by_drafter["Learner"][1] > 0
    assert ("ngram" in engine.metrics.spec.by_drafter) == lookup


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 63), max_size=7), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.8]),
    st.integers(1, 6),
)
def test_arbitrary_drafts_do_not_change_output(
    model: Model, answers: list[list[int]], heat: float, k: int
) -> None:
    params = SamplingParams(temperature=heat, seed=k, max_tokens=12, stop_token_ids=answers[0][:1])
    jobs = [Job([1, 2, 3], params), Job([4], params)]
    engine = make_engine(model, k, drafter=Stub(lambda tokens, _: answers[len(tokens) % len(answers)]))
    run_and_compare(engine, model, jobs)


@pytest.mark.parametrize("mode", MODES)
def test_device_drafter_object(model: Model, mode: str) -> None:
    jobs = random_jobs(random.Random(mode), 64, 6)
    choices: list[Drafters] = [Echo(), ["ngram", Echo()], [Echo(), "ngram"]]
    for drafter in choices:
        engine = make_engine(model, 4, drafter=drafter, **MODES[mode])
        run_and_compare(engine, model, jobs)
        assert engine.metrics.spec.by_drafter["Echo"][1] > 0


class Careless(Drafter):
    """Drafts the model's next tokens, but ignores limits, dtypes and strides, and sometimes gives an invalid
    draft or parent."""

    makes_trees = True
    calls = 0

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        self.calls += 1
        index = rows.clamp(min=0).long()
        last = table.tokens[index, (table.num_tokens[index] - 1).clamp(min=0)]
        drafts = torch.stack([torch.tensor(cycle(token + 1, k)) for token in last.tolist()], 1).t()
        parents = torch.arange(k).expand(len(rows), k)
        if self.calls % 3 == 0:
            drafts[:, 2] = (-1, table.vocab_size, 2**31 - 1)[self.calls % 7 % 3]
        if self.calls % 4 == 0:
            parents = parents + torch.tensor([0, 0, 0, (-5, 1, 10**6)[self.calls % 5 % 3], 0, 0, 0, 0])
        return make_proposal(drafts, torch.full((len(rows),), k + self.calls % 2), parents)


@pytest.mark.parametrize("mode", MODES)
def test_careless_drafter_does_not_change_output(mode: str) -> None:
    model = cycle_model()
    jobs = [Job(cycle(i, 3), SamplingParams(temperature=0, max_tokens=5 * i + 1)) for i in range(6)]
    engine = make_engine(model, 8, drafter=Careless(), spec={"tree_width": 2}, **MODES[mode])
    run_and_compare(engine, model, jobs)
    assert engine.metrics.spec.num_accepted > 40


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda made: None, "returned None; it must return a Proposal"),
    "raises": (lambda made: 1 // 0, "failed: integer division or modulo by zero"),
    "device": (
        lambda made: made._replace(source=made.source.to("meta")),
        "source as .* meta .* expected .* cpu",
    ),
    "width": (lambda made: made._replace(drafts=made.drafts[:, :3]), r"drafts as .*1, 3.* expected .*1, 4"),
    "floats": (lambda made: made._replace(drafts=made.drafts + 0.5), "drafts as .*float32; .*int32"),
    "sparse": (lambda made: made._replace(drafts=made.drafts.to_sparse()), "drafts as .* torch.sparse_coo"),
    "list": (lambda made: made._replace(num_drafts=[4]), "num_drafts as list; expected Tensor"),
    "numpy": (lambda made: made._replace(match_len=made.match_len.numpy()), "match_len as ndarray"),
    "no-drafter": (lambda made: made._replace(drafter=None), "drafter as NoneType"),
    "int": (lambda made: made._replace(parents=3), "parents as int"),
    "logits": (lambda made: made._replace(logits=torch.zeros(1, 4, 63)), "1, 4, 63.* expected .*1, 4, 64"),
    "sampled": (lambda made: made._replace(sampled=made.num_drafts), "sampled as .*int32; .*bool"),
}


@pytest.mark.parametrize(("change", "what"), BAD.values(), ids=BAD)
def test_invalid_proposal_is_reported(model: Model, change: Callable[[Proposal], Any], what: str) -> None:
    class Other(Echo):
        def propose(self, table: Table, rows: Tensor, k: int) -> Any:
            return change(super().propose(table, rows, k))

    with pytest.raises((ArithmeticError, TypeError, ValueError), match=f"Other.propose .*{what}"):
        run(make_engine(model, 4, drafter=Other()), [JOB])


OUT_OF_RANGE: dict[str, tuple[dict[str, int], str]] = {
    "drafter": ({"drafter": 7}, "drafter 7 and match_len 0"),
    "match": ({"match_len": -5}, "drafter 0 and match_len -5"),
    "both": ({"drafter": 1 << 30, "match_len": -1}, "drafter 1073741824 and match_len -1"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("behind", [(), ("ngram",)], ids=["alone", "first"])
@pytest.mark.parametrize(("change", "what"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_out_of_range_indices_are_reported(
    model: Model, change: dict[str, int], what: str, behind: tuple[str, ...], mode: str
) -> None:
    class Other(Drafter):
        def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
            made = make_proposal(torch.ones(len(rows), k).int(), draft_limits(table, rows, k))
            return made._replace(**{name: torch.full_like(rows, value) for name, value in change.items()})

    k: K = "auto" if mode == "plain" else 4  # in this mode the policy reads them before the engine does
    engine = make_engine(model, k, drafter=[Other(), *behind], trace=True, **MODES[mode])
    with pytest.raises(ValueError, match=f"^Other.propose returned {what}; "):
        run(engine, [JOB])


@pytest.mark.parametrize("mode", MODES)
def test_drafts_without_drafter_index_count_for_their_drafter(mode: str) -> None:
    class Late(Drafter):
        def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
            last = table.tokens[rows.clamp(min=0), table.num_tokens[rows.clamp(min=0)] - 1]
            drafts = (last[:, None] + torch.arange(1, k + 1)) % table.vocab_size
            return make_proposal(drafts, torch.zeros_like(rows))._replace(
                num_drafts=draft_limits(table, rows, k)
            )

    choices: list[Drafters] = [Late(), [Late(), "ngram"], ["ngram", Late()]]
    for drafter in choices:
        [request] = run(make_engine(cycle_model(), 4, drafter=drafter, **MODES[mode]), [JOB])
        assert request.stats.by_drafter == {"Late": [4, 16, 16]}


def test_make_proposal_dtypes() -> None:
    drafts = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    result = make_proposal(drafts, torch.tensor([2, 0], dtype=torch.int32))
    assert result.source.tolist() == [[-2, -2], [-2, -2]]  # ignored in rows without drafts
    assert result.drafter.tolist() == [0, -1]
    assert all(part.dtype == torch.int32 for part in result[:5])


def test_correct_drafts_are_accepted() -> None:
    model, drafter = cycle_model(), Stub(lambda tokens, k: cycle(tokens[-1] + 1, k))
    request = run(make_engine(model, 4, drafter=drafter), [JOB])[0]
    assert request.stats.tokens_per_step == 5
    assert request.stats.by_drafter == {"Stub": [4, 16, 16]}


@pytest.mark.parametrize(
    "answer",
    [
        lambda tokens, k: repeat(7),
        lambda tokens, k: count(tokens[-1] + 1),
        lambda tokens, k: np.arange(50, dtype=np.uint8),
        lambda tokens, k: torch.arange(50),
        lambda tokens, k: range(9),
        lambda tokens, k: (token for token in [5] * 90),
        lambda tokens, k: (),
    ],
    ids=["endless", "counting", "numpy", "torch", "range", "generator", "nothing"],
)
def test_drafts_may_be_any_iterable_of_integers(answer: Callable[[list[int], int], Any]) -> None:
    request = run(make_engine(cycle_model(), 4, drafter=Stub(answer)), [JOB])[0]
    assert request.output_ids == cycle(4, 20)
    assert request.stats.num_drafted <= 4 * request.stats.num_steps


@pytest.mark.parametrize(
    ("answer", "error", "what"),
    [
        (lambda *_: [31, 32], ValueError, "Stub.draft returned 32; token ids must be integers from 0 to 31"),
        (lambda *_: [-1], ValueError, "returned -1"),
        (lambda *_: [1.0], ValueError, "returned 1.0"),
        (lambda *_: [True], ValueError, "returned True"),
        (lambda *_: "abc", ValueError, "returned 'a'"),
        (lambda *_: [None], ValueError, "returned None"),
        (lambda *_: None, RuntimeError, "failed on 3 tokens, k=4: TypeError: 'NoneType' object is not iter"),
        (lambda *_: 1 // 0, RuntimeError, "Stub.draft failed on 3 tokens, k=4: ZeroDivisionError"),
        (lambda *_: (1 // n for n in (1, 0)), RuntimeError, "ZeroDivisionError"),
    ],
)
def test_invalid_drafts_are_reported(answer: Any, error: type[Exception], what: str) -> None:
    engine = make_engine(cycle_model(), 4, drafter=Stub(answer))
    request = engine.add(*JOB)
    with pytest.raises(error, match=what):
        finish(engine)
    assert request.output_ids == []


def test_draft_is_called_for_usable_drafts_only() -> None:
    arguments: list[tuple[int, int, int]] = []

    def answer(tokens: list[int], k: int) -> list[int]:
        arguments.append((tokens[0], len(tokens), k))
        return cycle(tokens[-1] + 1, k)

    drafter = Stub(answer)
    engine = make_engine(cycle_model(), 6, drafter=drafter, max_num_seqs=1)
    never = SamplingParams(max_tokens=9, num_speculative_tokens=0)
    run(engine, [JOB, Job([5], never), Job([9], SamplingParams(temperature=0, max_tokens=3))])
    # A step also emits the target's own token, so fewer drafts fit at the end.
    assert arguments == [(1, 3, 6), (1, 10, 6), (1, 17, 5), (9, 1, 2)]
    drafter.max_drafts = 2
    assert make_engine(cycle_model(), 6, drafter=drafter).worker.max_k == 2


def test_slow_drafter_is_rarely_called() -> None:
    """Even though its drafts are always accepted."""
    calls = []

    def slow(tokens: list[int], k: int) -> list[int]:
        calls.append(len(tokens))
        time.sleep(0.05)
        return cycle(tokens[-1] + 1, k)

    engine = make_engine(cycle_model(), "auto", drafter=Stub(slow))
    request = run(engine, [Job([1, 2], SamplingParams(temperature=0, max_tokens=120))])[0]
    assert request.output_ids == cycle(3, 120)
    assert 3 <= len(calls) <= 6


def test_draft_times_include_calls_without_drafts() -> None:
    times = DraftTimes()
    assert times(4, 4) == 0
    for share in (0.0,) * 9 + (1.0,):
        times.add(4, 4, 2.0, share)
    assert times(5, 4) == pytest.approx(2.0 * 11 / 2)
    assert [times(4, k) for k in (0, 2, 8)] == pytest.approx([0, 5.5, 11]), "at least"
    assert times(1, 4) == 0, "fewer rows may take less"
    for _ in range(3000):
        times.fade()
    assert times(4, 4) < 1, "to be tried again"
    times.add(4, 4, 2.0, 1.0)
    assert times(4, 4) == pytest.approx(2.0 * 12 / 3)


def echo_with(**attributes: Any) -> Drafter:
    drafter = Echo()
    vars(drafter).update(attributes)
    return drafter


def test_resolve_drafters_checks_its_argument(model: Model) -> None:
    drafters: Any
    plain, none, tree = SpecConfig(), SpecConfig(method="none"), SpecConfig(tree_width=2)
    for spec, drafters, what in (
        (plain, Learner, r"drafter=Learner is a class; pass an instance: Learner\(\)"),
        (plain, "ngam", "drafter='ngam' must be a Drafter or one of draft, medusa, ngram"),
        (plain, [], r"drafter=\[\] cannot be combined with method='ngram'"),
        (plain, [Learner(), "ngram"], "Learner has runs_model=True, so it must be the last drafter"),
        (plain, 7, "drafter=7 must be a Drafter"),
        (plain, ["ngram", "draft"], r"drafter='draft' needs weights; use method=\.\.\. to load it"),
        (none, Learner(), "cannot be combined with method='none'"),
        (tree, Learner(), "tree_width=2 is not supported by Learner"),
        (plain, echo_with(max_drafts="4"), "Echo.max_drafts='4' must be an integer of at least 0"),
        (plain, echo_with(memory=5), "Echo.memory=5 must be a Memory"),
    ):
        with pytest.raises(ValueError, match=what):
            resolve_drafters(spec, drafters)
    assert make_engine(model, 4, spec={"tree_width": 2}, drafter=["ngram", Learner()]).worker.max_k == 4
    for drafters in (["ngram", Learner()], Learner()):
        with pytest.raises(ValueError, match="enforce_eager=False captures steps"):
            make_engine(model, 4, drafter=drafters, enforce_eager=False)
    with pytest.raises(NotImplementedError, match=r"SimpleDrafter must define draft\(self, tokens, k\)"):
        run(make_engine(model, 4, drafter=SimpleDrafter()), [JOB])
    with pytest.raises(NotImplementedError, match="Drafter must define propose"):
        run(make_engine(model, 4, drafter=Drafter()), [JOB])
