"""A sampling parameter of one's own: it changes logits for whoever asks, alike with guessing on and off."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec import SamplingParameter, SamplingParams
from nanospec.apps.cli.options import parse, sampling_params
from nanospec.device.admission import HostWrites
from nanospec.kernels import dispatch
from nanospec.kernels.batch import Batch
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from nanospec.sampling.base import PARAMETERS, gather
from nanospec.sampling.rows import ExtraRows
from nanospec.sampling.top_n_sigma import TopNSigma
from tests.drive import (
    MODES,
    Job,
    alone,
    assert_same,
    cycle,
    cycle_model,
    make_engine,
    outcome,
    random_jobs,
    run,
    similar_model,
)
from tests.tape import Tape
from tests.tiny import Pages, tiny_model

VOCAB = 64


@pytest.fixture(autouse=True)
def tilt() -> Iterator[type[SamplingParameter]]:
    """What a user's program might hold: it depends on a sum over the row, and on the order of ids."""

    class Tilt(SamplingParameter, name="tilt", help="how much later ids gain"):
        default, low, high = 0.0, -8.0, 8.0

        def change(self, logits: Tensor, value: Tensor) -> Tensor:
            share = torch.arange(logits.shape[1], device=logits.device) / logits.shape[1]
            return logits.sub_(logits.mean(-1, keepdim=True)) + value * share

    yield Tilt
    del PARAMETERS["tilt"]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def some_that_ask(rng: random.Random, count: int) -> list[Job]:
    """Requests of all kinds, of which most ask for one parameter or both."""
    both: dict[str, float] = {"tilt": -2, "top_n_sigma": 1}
    ways: tuple[dict[str, float], ...] = ({}, {"tilt": 3}, {"top_n_sigma": 1.5}, both)
    return [
        Job(prompt, replace(params, extra_args=rng.choice(ways)))
        for prompt, params in random_jobs(rng, VOCAB, count)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "dtype"), [("naive", torch.float32), ("native", torch.bfloat16)])
def test_guessing_changes_no_output_of_requests_that_ask(backend: Any, dtype: torch.dtype, mode: str) -> None:
    """In mixed batches too, with pages for some of them, and by the sampler in C++."""
    jobs = some_that_ask(random.Random(mode), 10)
    with dispatch.forced(backend):
        model = tiny_model(dtype=dtype)
        engine = make_engine(model, 4, num_blocks=16, max_num_seqs=4, **MODES[mode])
        for request, wanted in zip(run(engine, jobs), alone(model, jobs), strict=True):
            assert_same(outcome(request), wanted, request.params)
    assert set(engine.worker.extras.columns) == {"tilt", "top_n_sigma"}


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.floats(0.1, 3), st.floats(-8, 8), st.sampled_from([0.0, 1.0]))
def test_guessing_changes_nothing_whatever_the_value(
    seed: int, sigma: float, tilt: float, heat: float
) -> None:
    """In bf16, whose bits do not depend on how many are scored: else a token may fall at the threshold."""
    extra = {"top_n_sigma": sigma, "tilt": tilt}
    params = SamplingParams(temperature=heat, seed=seed, max_tokens=24, logprobs=3, extra_args=extra)
    prompt = random.Random(seed).choices(range(6), k=20)
    plain = SamplingParams(temperature=heat, seed=seed, max_tokens=24)
    jobs = [Job(prompt, params), Job(prompt, plain)]
    with dispatch.forced("native"):
        model = tiny_model(dtype=torch.bfloat16)
        for request, wanted in zip(run(make_engine(model, 5), jobs), alone(model, jobs), strict=True):
            assert outcome(request) == wanted


def test_only_what_is_kept_is_drawn_and_reported(model: Model) -> None:
    params = SamplingParams(temperature=50, seed=1, max_tokens=40, logprobs=20)
    jobs = [Job([1, 2, 3], replace(params, extra_args={"top_n_sigma": 1})), Job([1, 2, 3], params)]
    few, all_of_them = run(make_engine(model, None), jobs)
    first, kept = all_of_them.logprobs[0], few.logprobs[0]
    scores = Pages(model, 1, 64).step({0: torch.tensor([1, 2, 3])})[0][-1]
    assert {*kept} == {t for t in range(VOCAB) if scores[t] >= scores.max() - scores.std()}
    assert 1 < len(kept) < 20 <= len(first)
    assert sum(math.exp(entry.logprob) for entry in kept.values()) == pytest.approx(1)


def test_requests_that_do_not_ask_are_left_alone_and_cost_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, 3, max_num_seqs=1)
    job = Job([1, 2, 1, 2], SamplingParams(max_tokens=6, extra_args={"tilt": 0}))  # 0 is no wish
    run(engine, [job])
    assert engine.worker.extras.columns == {}
    run(engine, [Job(job.prompt, SamplingParams(max_tokens=6, extra_args={"tilt": 1}))])

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(ExtraRows, "change", never)
    run(engine, [job])  # in the row of one that did
    assert engine.worker._step.change_logits is None


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_other_rules_of_acceptance_see_the_changed_logits(model: Model, rule: str) -> None:
    """Greedy but for the noise: with one token left there is nothing to choose, for whichever rule."""
    guess = {"method": "ngram+draft", "acceptance": rule}
    extra = {"top_n_sigma": 0.01, "tilt": 4.0}
    asked = SamplingParams(temperature=1, seed=2, max_tokens=30, extra_args=extra)
    jobs = [Job([1, 2, 3, n], asked) for n in range(4)]
    engine = make_engine(model, 3, guess=guess, draft_model=similar_model(0.2))
    for request, wanted in zip(run(engine, jobs), alone(model, jobs), strict=True):
        assert request.output_ids == wanted.token_ids


def test_recorded_steps_make_recordings_of_their_own(model: Model) -> None:
    engine = make_engine(model, 1, max_num_seqs=2, enforce_eager=False, async_scheduling=True)
    recorded = engine.worker.graphs
    assert recorded is not None
    before = len(recorded.captures)
    for tilt in (2.0, -3.0, 0.0):
        params = SamplingParams(temperature=0.5, seed=4, max_tokens=9, extra_args={"tilt": tilt})
        jobs = [Job([5, 6, 5, 6], params), Job([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))]
        for request, wanted in zip(run(engine, jobs), alone(model, jobs), strict=True):
            assert_same(outcome(request), wanted, tilt)
    assert (len(recorded.captures), recorded.fallbacks) == (before, 0)


def test_nothing_of_the_host_is_frozen_into_a_recording() -> None:
    """As on a GPU: several positions at once, padded. Neighbours keep the logits of stop tokens, too."""
    table = Table.empty(2, 64, 16, VOCAB, "cpu")
    table.min_len[:], table.stop_ids[:, 0] = 64, 3
    extra, writes = ExtraRows(table, may_wait=False), HostWrites()
    extra._at_once = 4
    rows = torch.tensor([0, -1, 1], dtype=torch.int32)
    extra.admit(writes, 0, {"tilt": 1.0, "top_n_sigma": 2.0})
    writes.flush()
    batch = Batch.of_grid(table, rows, rows.clamp(min=0), torch.full_like(rows, 2), 2)
    given = torch.randn(6, VOCAB)
    logits = given.clone()
    with Tape() as tape:
        extra.change(logits, batch)
    assert torch.equal(logits[4:], given[4:])
    before = logits[:2].clone()
    for row, asked in enumerate(({"tilt": 2.0}, {"tilt": 1.0, "top_n_sigma": 2.0})):
        extra.admit(writes, row, asked)
    writes.flush()
    logits.copy_(given.roll(4, 0))
    for entry in tape.entries:
        entry()
    assert torch.equal(logits[4:], before)
    assert not torch.equal(logits[:2], before)


def test_a_barred_stop_token_is_not_all_that_is_left() -> None:
    """The model is sure of the next token, which ends the text but may not come yet."""
    extra = {"top_n_sigma": 0.5}
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=4, stop_token_ids=[2], extra_args=extra)
    [request] = run(make_engine(cycle_model(), 3), [Job([1], params)])
    assert request.error is None
    assert 2 not in request.output_ids[:4]
    [request] = run(make_engine(cycle_model(), 3), [Job([1], replace(params, min_tokens=0))])
    assert request.output_ids == cycle(2, 1)


@pytest.mark.parametrize("position", [3, 0])
def test_a_position_has_the_same_bits_whatever_is_scored_beside_it(position: int) -> None:
    V = 50_000  # PyTorch adds up so long a row by several threads if it is alone
    table = Table.empty(2, 64, 16, V, "cpu")
    table.max_len[:], table.num_tokens[:] = 64, 8
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for first, count in ((0, 6), (position, 1)):
            extra, writes = ExtraRows(table, may_wait=True), HostWrites()
            for row in range(2):
                extra.admit(writes, row, {"tilt": 1.0, "top_n_sigma": 2.0})
            writes.flush()
            one = torch.ones(1, dtype=torch.int32)
            batch = Batch.of_grid(table, one, one * first, one * count, count)
            own = logits[first : first + count].clone()
            extra.change(own, batch)
            found.append(own[position - first])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits[position])


def test_a_bad_definition_gets_a_sentence() -> None:
    assert SamplingParams(extra_args=None).extra_args == {}  # type: ignore[arg-type]
    for name in ("top_p", "prompt", "a-b", ""):
        with pytest.raises(ValueError, match="must be a word that is not in use"):
            type("Bad", (SamplingParameter,), {}, name=name, help="")
    with pytest.raises(ValueError, match=r"default=0.0 must lie between 1 and 1.0"):
        type("Bad", (SamplingParameter,), {"low": 1}, name="bad", help="")


def test_a_change_that_goes_wrong_gets_a_sentence(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([1], SamplingParams(max_tokens=3, extra_args={"tilt": 1}))
    monkeypatch.setattr(PARAMETERS["tilt"], "change", lambda logits, value: logits[:, :5])
    with pytest.raises(ValueError, match=r"tilt.change must give .* not \[1, 5\] for \[1, 64\]"):
        run(make_engine(model, 2), [job])
    monkeypatch.setattr(PARAMETERS["tilt"], "change", lambda logits, value: logits - float("inf"))
    [request] = run(make_engine(model, 2), [job])
    assert request.finish_reason == "abort"
    assert request.error is not None
    assert "nothing to draw from at position 1" in request.error
    assert "NaN or infinite logits, or extra_args={'tilt': 1}" in request.error  # which of both, nobody knows


def test_the_command_line_and_lines_of_json_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    params = sampling_params(parse(["--prompt", "a", "--top-n-sigma", "1.5"]))
    assert params.extra_args == {"top_n_sigma": 1.5}
    assert sampling_params(parse(["--prompt", "a"])).extra_args == {}
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    assert "--top-n-sigma X keep tokens within" in " ".join(capsys.readouterr().out.split())
    assert gather({"tilt": 1, "seed": 2}, {"top_n_sigma": 3}) == {
        "seed": 2,
        "extra_args": {"top_n_sigma": 3, "tilt": 1},
    }
    assert gather({"seed": 2, "extra_args": {}}, {"tilt": 1}) == {"seed": 2, "extra_args": {}}


def test_top_n_sigma_behind_a_parameter_that_leaves_tokens_out() -> None:
    """Infinite logits have no part in the deviation, which they would make NaN."""
    logits = torch.tensor([[4.0, 3.0, -2.0, -3.0], [4.0, 3.0, float("-inf"), -3.0]])
    kept = TopNSigma().change(logits, torch.tensor([[0.5], [0.5]])).isfinite()
    assert kept.tolist() == [[True, True, False, False]] * 2
    alone = TopNSigma().change(torch.tensor([[5.0]]), torch.tensor([[1.0]]))
    assert alone.tolist() == [[5.0]]  # a vocabulary of one
