"""Speculation never changes the output: tokens, finish reasons and logprobs.

The reference runs every request alone, without drafts, prefix cache, chunked prefill or preemption.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.config import SamplingParams
from nanospec.drafters.policy import Policy
from nanospec.engine.request import Request
from nanospec.kernels.speculation.report import RowReport
from nanospec.models.decoder import Model
from tests.drive import (
    FunctionDrafter,
    Job,
    K,
    Outcome,
    assert_idle,
    assert_same,
    cycle,
    cycle_model,
    finish,
    junk,
    make_engine,
    oracle,
    outcome,
    random_jobs,
    run,
    run_alone,
    use_drafter,
)
from tests.tiny import tiny_model

VOCAB, WINDOW = 24, 100


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(vocab_size=VOCAB, max_position_embeddings=128)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    rng = random.Random(1)
    jobs = random_jobs(rng, VOCAB, 8) + random_jobs(rng, VOCAB, 4, max_tokens=WINDOW)
    return [*jobs, jobs[0], Job(jobs[0].prompt, SamplingParams(temperature=0, max_tokens=30))]


@pytest.fixture(scope="module")
def expected(model: Model, jobs: list[Job]) -> list[Outcome]:
    return run_alone(model, jobs, max_model_len=WINDOW)


DRAFTERS: dict[str, Callable[[list[list[int]]], FunctionDrafter | None]] = {
    "ngram": lambda texts: None,
    "truth": oracle,
    "truth-with-errors": lambda texts: oracle(texts, wrong=lambda at: at % 4 == 1),
    "junk": lambda texts: junk(VOCAB),
}


def check(
    model: Model, jobs: list[Job], expected: list[Outcome], k: K, drafter: str = "ngram", **options: Any
) -> list[Request]:
    engine = make_engine(model, k, **{"max_model_len": WINDOW, **options})
    replacement = DRAFTERS[drafter]([job.prompt + e.token_ids for job, e in zip(jobs, expected)])
    if replacement is not None:
        use_drafter(engine, replacement)
    requests = run(engine, jobs)
    for i, (request, wanted) in enumerate(zip(requests, expected, strict=True)):
        assert_same(outcome(request), wanted, (i, jobs[i]))
    total, stats = engine.metrics.spec, [request.stats for request in requests]
    assert total.num_tokens == sum(s.num_tokens for s in stats) == sum(len(e[0]) for e in expected)
    for name in ("num_steps", "num_drafted", "num_accepted", "num_steps_with_drafts"):
        assert getattr(total, name) == sum(getattr(s, name) for s in stats)
    assert sum(total.accepted_by_position) == total.num_accepted
    assert sum(total.drafted_by_position) == total.num_drafted
    assert engine.metrics.num_cached_tokens == sum(r.num_cached_tokens for r in requests)
    assert engine.metrics.num_preemptions == sum(r.num_preemptions for r in requests)
    assert engine.metrics.num_finished == len(requests)
    return requests


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 3, 8, "auto"], ids=lambda k: f"K{k}")
def test_drafts_do_not_change_output(
    model: Model, jobs: list[Job], expected: list[Outcome], k: K, drafter: str
) -> None:
    requests = check(model, jobs, expected, k, drafter)
    for job, request in zip(jobs, requests, strict=True):
        if job.params.num_speculative_tokens == 0:
            assert request.stats.num_drafted == 0
        own = job.params.num_speculative_tokens
        assert len(request.stats.drafted_by_position) <= (16 if own is None else own)


LIMITS: dict[str, dict[str, Any]] = {
    "one-row": {"max_num_seqs": 1},
    "budget-of-one": {"max_num_batched_tokens": 1},
    "chunks-of-7": {"max_num_batched_tokens": 7},
    "smallest-pool": {"num_blocks": 7},
    "small-pool-chunks": {"num_blocks": 9, "max_num_batched_tokens": 40},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "small-pool-no-prefix-cache": {"num_blocks": 8, "enable_prefix_caching": False},
    "block-size-32": {"block_size": 32, "num_blocks": 5},
}


@pytest.mark.parametrize("k", [None, 0, 5], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("limits", LIMITS.values(), ids=list(LIMITS))
def test_limits_do_not_change_output(
    model: Model, jobs: list[Job], expected: list[Outcome], k: K, limits: dict[str, Any]
) -> None:
    requests = check(model, jobs, expected, k, "truth-with-errors" if k else "ngram", **limits)
    if limits.get("num_blocks", 100) < 9:
        assert sum(request.num_preemptions for request in requests) > 0, "the pool is not small"


def test_single_request_matches_batch(model: Model, jobs: list[Job], expected: list[Outcome]) -> None:
    for job, wanted in list(zip(jobs, expected, strict=True))[::3]:
        check(model, [job], [wanted], 5)


@pytest.mark.parametrize("drafter", ["ngram", "truth", "junk"])
@pytest.mark.parametrize("mode", ["async", "captured", "async-captured"])
def test_capture_and_async_scheduling_do_not_change_output(
    model: Model, jobs: list[Job], expected: list[Outcome], mode: str, drafter: str
) -> None:
    """Captured steps have padded rows and rows of padding, which must have no effect."""
    options = {"async_scheduling": "async" in mode, "enforce_eager": "captured" not in mode}
    check(model, jobs, expected, 5, drafter, lazy_capture=True, **options)
    check(model, jobs, expected, 3, drafter, lazy_capture=True, num_blocks=9, max_num_seqs=5, **options)


@pytest.mark.parametrize("k", [None, 3, "auto"], ids=lambda k: f"K{k}")
def test_all_steps_are_captured_at_start(
    model: Model, jobs: list[Job], expected: list[Outcome], k: K
) -> None:
    options: dict[str, Any] = {"max_num_seqs": 3, "enforce_eager": False}
    engine = make_engine(model, k, max_model_len=WINDOW, **options)
    assert engine.worker.graphs is not None
    captured = len(engine.worker.graphs.captures)
    for request, wanted in zip(run(engine, jobs), expected, strict=True):
        assert_same(outcome(request), wanted)
    assert len(engine.worker.graphs.captures) == captured > 0


def test_perfect_drafts_are_all_accepted_with_bonus_token(model: Model) -> None:
    k, count = 4, 50  # 10 steps of k + 1 tokens
    for temperature in (0.0, 1.0):
        job = Job([1, 2, 3], SamplingParams(temperature=temperature, seed=5, max_tokens=count))
        wanted = run_alone(model, [job])[0]
        engine = make_engine(model, k)
        use_drafter(engine, oracle([job.prompt + wanted.token_ids]))
        [request] = run(engine, [job])
        assert request.output_ids == wanted.token_ids
        assert request.stats.tokens_per_step == k + 1
        assert request.stats.acceptance_rate == request.stats.efficiency == 1
        assert request.stats.accepted_by_position == [count // (k + 1)] * k


def test_bad_drafts_cost_no_extra_steps(model: Model) -> None:
    jobs = [Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=40))]
    engine = make_engine(model, 6)
    use_drafter(engine, FunctionDrafter(lambda history, wanted: [(history[0] + 7) % VOCAB] * wanted))
    [request] = run(engine, jobs)
    assert request.output_ids == run_alone(model, jobs)[0].token_ids
    assert request.stats.num_drafted > 150
    assert request.stats.num_steps + request.stats.num_accepted == 40


def test_drafts_of_repetitive_text_are_accepted() -> None:
    """Check acceptance itself: it could drop to zero while outputs stay correct."""
    model = cycle_model(8)
    params = SamplingParams(temperature=0, max_tokens=54)
    [request] = run(make_engine(model, 5), [Job(cycle(0, 10, 8), params)])
    assert request.output_ids == cycle(10, 54, 8)
    assert request.stats.num_steps == 9
    assert request.stats.acceptance_rate == 1
    sources = [s for s in request.draft_sources if s >= 0]
    assert len(sources) == 45
    assert all(request.tokens[s] == t for s, t in zip(request.draft_sources, request.output_ids) if s >= 0)


def test_drafts_after_a_stop_do_not_count_as_accepted() -> None:
    engine = make_engine(cycle_model(8), 5)
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[4])
    [request] = run(engine, [Job(cycle(0, 10, 8), params)])
    assert request.output_ids == [2, 3, 4]
    for stats in (request.stats, engine.metrics.spec):
        assert (stats.num_drafted, stats.num_accepted, stats.num_tokens) == (5, 3, 3)
        assert stats.accepted_by_position == [1, 1, 1, 0, 0]


def test_request_without_match_does_not_disable_others() -> None:
    model = cycle_model(64)
    params = SamplingParams(temperature=0, max_tokens=24)
    repetitive, fresh = Job(cycle(0, 90, 64), params), Job(cycle(5, 3, 64), params)
    requests = run(make_engine(model, 3), [repetitive, fresh, fresh])
    assert requests[0].stats.tokens_per_step == 4
    for request in requests[1:]:
        assert request.stats.num_drafted == 0
        assert request.output_ids == cycle(8, 24, 64)


def test_ngram_drafts_match_plain_python_lookup(model: Model) -> None:
    """Drafts equal those of an n-gram search in plain Python."""
    engine = make_engine(model, 5, min_n=2)
    [drafter], seen = engine.worker.drafters, 0

    def reference(text: list[int], wanted: int) -> list[int]:
        for n in (4, 3, 2):
            for end in range(len(text) - 1, n - 1, -1):
                if len(text) > n and text[end - n : end] == text[-n:]:
                    for _ in range(wanted):
                        text = [*text, text[end]]
                        end += 1
                    return text[len(text) - wanted :]
        return []

    propose = drafter.propose

    def compared(state: Any, rows: Tensor, *limits: int) -> Any:
        nonlocal seen
        proposal = propose(state, rows, *limits)
        same = FunctionDrafter(reference).propose(state, rows, *limits)
        assert proposal.num_drafts.tolist() == same.num_drafts.tolist()
        assert proposal.drafts.tolist() == same.drafts.tolist()
        seen += int(same.num_drafts.sum())
        return proposal

    drafter.propose = compared  # type: ignore[method-assign, assignment]
    run(engine, random_jobs(random.Random(3), VOCAB, 8))
    assert seen > 150


@pytest.mark.parametrize("k", [None, 0], ids=["none", "K0"])
def test_nothing_is_proposed_without_speculation(model: Model, k: K, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanospec.drafters.methods import NgramDrafter
    from nanospec.drafters.policy import AutoPolicy

    def fail(*args: object) -> None:
        raise AssertionError("proposing work was done")

    for kind, name in ((NgramDrafter, "propose"), (AutoPolicy, "count_drafts")):
        monkeypatch.setattr(kind, name, fail)
    engine = make_engine(model, k)
    [request] = run(engine, [Job([1, 2, 1, 2, 1], SamplingParams(temperature=0, max_tokens=9))])
    assert request.stats.num_steps == 9
    assert request.stats.num_drafted == 0


def test_policy_observes_every_step_and_resets_with_row(
    model: Model,
) -> None:
    events: list[tuple[Any, ...]] = []

    class Spy(Policy):
        def observe(self, row: int, report: RowReport) -> None:
            events.append((row, report.num_drafted, report.num_accepted))

        def reset(self, row: int) -> None:
            events.append((row,))

    limits = ((8, None), (6, None), (4, 1), (3, 0))
    jobs = [
        Job([i, 2], SamplingParams(temperature=0, max_tokens=n, num_speculative_tokens=own))
        for i, (n, own) in enumerate(limits)
    ]
    engine = make_engine(model, 3, max_num_seqs=1)
    engine.policy = Spy()
    texts = [run_alone(model, [job])[0].token_ids for job in jobs]
    use_drafter(engine, oracle([job.prompt + text for job, text in zip(jobs, texts, strict=True)]))
    run(engine, jobs)
    step, drafted = (0, 3, 3), (0, 1, 1)
    assert events == [(0,), step, step, (0,), step, drafted, (0,), drafted, drafted, (0,)]


def test_num_speculative_tokens_per_request() -> None:
    model = cycle_model(8)
    jobs = [
        Job(cycle(0, 10, 8), SamplingParams(temperature=0, max_tokens=12, num_speculative_tokens=n))
        for n in (0, 1, 2, None, 63)
    ]
    requests = run(make_engine(model, 3), jobs)
    assert [request.stats.num_steps for request in requests] == [12, 6, 4, 3, 3]


def test_seeded_output_is_independent_of_batch(model: Model) -> None:
    params = SamplingParams(temperature=1, seed=11, max_tokens=30)
    job = Job([3, 1, 4, 1, 5], params)
    [wanted] = run_alone(model, [job])
    for others in range(1, 4):
        batch = random_jobs(random.Random(others), VOCAB, others)
        batch.insert(others // 2, job)
        assert run(make_engine(model, 3), batch)[others // 2].output_ids == wanted.token_ids
    different = [Job(job.prompt, SamplingParams(temperature=1, seed=s, max_tokens=30)) for s in (1, 2)]
    texts = [tuple(o.token_ids) for o in [wanted, *run_alone(model, different)]]
    assert len(set(texts)) == 3


def test_unseeded_requests_follow_engine_seed(model: Model) -> None:
    jobs = [Job([3, 1, 4], SamplingParams(temperature=1, max_tokens=20))] * 3
    runs = [[r.output_ids for r in run(make_engine(model, 3, seed=s), jobs)] for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for ids in runs[0]}) == 3


def test_samples_of_one_prompt_share_blocks(model: Model) -> None:
    engine = make_engine(model, 3)
    prompt = [i * 7 % VOCAB for i in range(50)]
    params = SamplingParams(n=4, temperature=1, seed=2, max_tokens=10)
    requests = [engine.add(prompt, params, i) for i in range(4)]
    engine.step()
    used = engine.scheduler.pool.num_blocks - len(engine.scheduler.pool.free)
    assert used == 3 + 4  # three full blocks once, the rest of the prompt four times
    assert engine.metrics.num_prefill_tokens == 49 + 3
    finish(engine)
    assert len({tuple(request.output_ids) for request in requests}) == 4
    for i, request in enumerate(requests):
        [alike] = run_alone(
            model, [Job(prompt, SamplingParams(temperature=1, seed=request.seed, max_tokens=10))]
        )
        assert request.output_ids == alike.token_ids, i


def test_no_sharing_without_prefix_caching(model: Model) -> None:
    engine = make_engine(model, 3, enable_prefix_caching=False)
    job = Job([i * 7 % VOCAB for i in range(50)], SamplingParams(temperature=0, max_tokens=5))
    run(engine, [job, job])
    run(engine, [job])
    assert engine.metrics.num_cached_tokens == 0
    assert engine.metrics.num_prefill_tokens == 3 * 49


def test_preempted_requests_own_blocks_are_not_cache_hits(model: Model) -> None:
    engine = make_engine(model, 2, num_blocks=6, max_num_seqs=3, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=40)
    requests = run(engine, [Job([i + 1, 2 * i + 5, 3] * 7, params) for i in range(3)])
    assert engine.metrics.num_preemptions >= 2
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0]
    assert (engine.metrics.num_prompt_tokens, engine.metrics.num_cached_tokens) == (63, 0)
    last = max(requests, key=lambda request: request.finish_time or 0)
    [again] = run(engine, [Job(last.prompt_ids, params)])
    assert again.num_cached_tokens == engine.metrics.num_cached_tokens == 16


def test_cached_blocks_match_fresh_prefill(model: Model) -> None:
    """Also where drafts were written and rejected. The last token is never taken from the cache."""
    engine = make_engine(model, 6)
    use_drafter(engine, junk(VOCAB))
    job = Job([i * 7 % VOCAB for i in range(20)], SamplingParams(temperature=1, seed=1, max_tokens=45))
    [request] = run(engine, [job])
    blocks = engine.scheduler.pool.match(request.hashes(16))
    assert len(blocks) == 4  # 64 of the 65 tokens, the last of which has no K/V yet
    fresh = make_engine(model, None)
    again = fresh.add(request.tokens, SamplingParams(max_tokens=1))
    fresh.step()
    cached = engine.worker.kv_cache[:, :, :, blocks]
    torch.testing.assert_close(cached, fresh.worker.kv_cache[:, :, :, again.blocks[:4]])


@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_schedule_does_not_change_output(data: st.DataObject, model: Model) -> None:
    """Compare random arrivals, aborts and limits with each request run alone."""
    draw = data.draw
    rng = random.Random(draw(st.integers(0, 10**6), label="jobs"))
    window = draw(st.sampled_from((40, 64, 100)), label="window")
    jobs = random_jobs(rng, VOCAB, draw(st.integers(1, 6)), max_prompt=window - 1, max_tokens=25)
    expected = run_alone(model, jobs, max_model_len=window)
    least = -(-window // 16)
    engine = make_engine(
        model,
        draw(st.sampled_from((None, 1, 3, 8, "auto")), label="K"),
        max_model_len=window,
        max_num_seqs=draw(st.integers(1, 6), label="rows"),
        max_num_batched_tokens=draw(st.sampled_from((1, 5, 17, 2048)), label="budget"),
        enable_prefix_caching=draw(st.booleans(), label="prefix caching"),
        async_scheduling=draw(st.booleans(), label="async"),
        enforce_eager=draw(st.booleans(), label="eager"),
        lazy_capture=True,
        num_blocks=draw(st.integers(least, 3 * least), label="blocks"),
    )
    if engine.worker.drafters:
        texts = [job.prompt + e.token_ids for job, e in zip(jobs, expected, strict=True)]
        replacement = DRAFTERS[draw(st.sampled_from(sorted(DRAFTERS)), label="drafter")](texts)
        use_drafter(engine, replacement or engine.worker.drafters[0])
    arrivals = [draw(st.integers(0, 12), label="arrival") for _ in jobs]
    aborts = {i: draw(st.integers(0, 20)) for i in draw(st.sets(st.sampled_from(range(len(jobs)))))}
    requests: dict[int, Request] = {}
    for now in range(4000):
        if now > 12 and not engine.has_work:
            break
        for i, job in enumerate(jobs):
            if arrivals[i] == now:
                requests[i] = engine.add(job.prompt, job.params)
            if i in requests and aborts.get(i) == now:
                engine.abort(requests[i])
        engine.step()
    assert_idle(engine)
    for i, request in requests.items():
        if request.finish_reason == "abort":
            assert request.output_ids == expected[i].token_ids[: len(request.output_ids)]
        else:
            assert_same(outcome(request), expected[i], jobs[i])
    assert all(request.is_finished for request in requests.values())
