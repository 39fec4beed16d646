"""Ends of requests and failures: limits, stops, NaN, aborts, prompts of extreme length.

Most tests run `cycle_model`, whose output is known: t + 1 follows t. Prompts contain the cycle, so every
step accepts all its drafts, and every limit and stop lies inside an accepted run.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.config import EngineConfig, SamplingParams
from nanospec.device.worker import Worker
from nanospec.engine.request import Request
from nanospec.kernels import launch
from nanospec.models.decoder import Model
from tests import drive
from tests.drive import (
    MODES,
    Job,
    K,
    assert_idle,
    assert_same,
    cycle,
    cycle_model,
    finish,
    make_engine,
    oracle,
    outcome,
    random_jobs,
    run,
    run_alone,
    use_drafter,
)
from tests.tiny import tiny_model

V = 32  # vocabulary of the cycle
PROMPT = cycle(0, V + 4)  # the next token is 4


@pytest.fixture(scope="module")
def cyclic() -> Model:
    return cycle_model(V)


@pytest.fixture(params=MODES.values(), ids=list(MODES), autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in this file in all modes."""
    monkeypatch.setattr(drive, "DEFAULTS", {**drive.DEFAULTS, **request.param})


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, **options})


def complete(model: Model, params: SamplingParams, k: K = 7, **options: Any) -> Request:
    [request] = run(make_engine(model, k, **options), [Job(PROMPT, params)])
    return request


@pytest.mark.parametrize("k", [0, 1, 3, 7, 16], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 17])
def test_max_tokens_inside_an_accepted_run(cyclic: Model, k: int, limit: int) -> None:
    request = complete(cyclic, greedy(max_tokens=limit), k)
    assert request.output_ids == cycle(4, limit)
    assert request.finish_reason == "length"
    assert request.stats.num_steps == -(-limit // (k + 1))
    assert request.stats.num_accepted == limit - request.stats.num_steps


@pytest.mark.parametrize("k", [0, 1, 3, 7, 16], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("room", [1, 2, 5, 16, 17])
def test_max_model_len_inside_an_accepted_run(cyclic: Model, k: int, room: int) -> None:
    for block_size in (16, 32):  # the context length may end inside the last block
        request = complete(
            cyclic,
            greedy(max_tokens=None),
            k,
            max_model_len=len(PROMPT) + room,
            block_size=block_size,
            num_blocks=-(-(len(PROMPT) + room) // block_size),
        )
        assert request.output_ids == cycle(4, room)
        assert request.finish_reason == "length"
        assert len(request.hashes(16)) <= (len(PROMPT) + room) // 16


@pytest.mark.parametrize("k", [0, 1, 4, 7], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("stop", [4, 5, 8, 11, 12, 20])
def test_stop_token_inside_an_accepted_run(cyclic: Model, k: int, stop: int) -> None:
    """The prompt contains the stop tokens too, where they have no effect."""
    request = complete(cyclic, greedy(stop_token_ids=[stop, 25], logprobs=1), k)
    assert request.output_ids == cycle(4, stop - 3)
    assert request.finish_reason == "stop"
    assert [next(iter(entry)) for entry in request.logprobs] == request.output_ids
    assert len(request.draft_sources) == request.stats.num_tokens == stop - 3
    assert request.stats.num_accepted == sum(source >= 0 for source in request.draft_sources)


@pytest.mark.parametrize("k", [0, 7], ids=lambda k: f"K{k}")
def test_stop_token_before_min_tokens_is_not_drawn(cyclic: Model, k: int) -> None:
    """A masked stop token is replaced by another; token min_tokens + 1 is the first that may stop."""
    params = greedy(stop_token_ids=[6], min_tokens=2, max_tokens=12)
    assert complete(cyclic, params, k).output_ids == [4, 5, 6]
    barred = complete(cyclic, greedy(stop_token_ids=[6], min_tokens=3, max_tokens=12), k)
    assert barred.output_ids[:2] == [4, 5]
    assert 6 not in barred.output_ids[:3]
    assert len(barred.output_ids) > 3


def test_min_tokens_beyond_max_model_len(cyclic: Model) -> None:
    params = greedy(stop_token_ids=[6], min_tokens=2**31 - 1, max_tokens=None)
    request = complete(cyclic, params, max_model_len=64)
    assert request.num_tokens == 64
    assert 6 not in request.output_ids


def test_logprobs_of_certain_tokens_are_zero(cyclic: Model) -> None:
    request = complete(cyclic, greedy(logprobs=2, max_tokens=9))
    assert len(request.logprobs) == 9
    for token, entry in zip(request.output_ids, request.logprobs, strict=True):
        assert len(entry) == 2
        assert entry[token].logprob == 0.0
        assert entry[token].rank == 1
        assert sorted(e.rank for e in entry.values()) == [1, 2]


@pytest.mark.parametrize("captured", [False, True], ids=["packed", "captured"])
def test_step_after_all_requests_ended_is_not_reported(cyclic: Model, captured: bool) -> None:
    engine = make_engine(cyclic, 3, async_scheduling=True, enforce_eager=not captured)
    [request] = run(engine, [Job(PROMPT, greedy(logprobs=20, max_tokens=9))])
    # A captured step is queued before the end is known; an eager step would wait for the device.
    assert engine.metrics.num_forward_steps == 3 + captured
    assert request.stats.num_steps == 3
    assert [len(entry) for entry in request.logprobs] == [20] * 9


def test_logprobs_zero_reports_sampled_token_only(cyclic: Model) -> None:
    request = complete(cyclic, greedy(logprobs=0, max_tokens=9))
    assert [list(entry) for entry in request.logprobs] == [[t] for t in cycle(4, 9)]


def test_logprobs_match_model_logits() -> None:
    """Logprobs are not those of a neighboring row, and exclude bias and temperature."""
    model = tiny_model(vocab_size=24)
    params = SamplingParams(
        temperature=0.5, seed=3, max_tokens=12, logprobs=3, logit_bias={1: 3.0}, repetition_penalty=1.3
    )
    job = Job([1, 2, 3, 1, 2], params)
    [wanted] = run_alone(model, [job])
    text = job.prompt + wanted.token_ids
    engine = make_engine(model, 4)
    use_drafter(engine, oracle([text]))
    [request] = run(engine, [job])
    logits: list[Tensor] = []
    score = model.logits

    def keep(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits.append(score(hidden, out))
        return logits[-1]

    model.logits = keep  # type: ignore
    one = SamplingParams(max_tokens=1)
    run_alone(model, [Job(text[:n], one) for n in range(len(job.prompt), len(text))], **MODES["plain"])
    truth = torch.cat(logits).log_softmax(-1)
    for i, (token, entry) in enumerate(zip(request.output_ids, request.logprobs, strict=True)):
        assert entry[token].logprob == pytest.approx(float(truth[i, token]), abs=1e-4)
        assert entry[token].rank == 1 + int((truth[i] > truth[i, token]).sum())
        best = truth[i].topk(3).indices.tolist()
        assert set(entry) == {token, *best}


def test_penalties_count_tokens_emitted_in_the_same_step(cyclic: Model) -> None:
    """A bias repeats one token until the penalty ends the run after a known count."""
    logit = float(8 * V**0.5)
    bias = {9: logit + 3}
    for k in (0, 3, 7):
        engine = make_engine(cyclic, k)
        use_drafter(engine, oracle([[*PROMPT, *[9] * 30]]) if k else None)
        params = greedy(logit_bias=bias, frequency_penalty=1.0, max_tokens=5)
        [request] = run(engine, [Job(PROMPT, params)])
        # 9 leads by 3: after three occurrences it ties with its rival, and ties go to the lower id.
        assert request.output_ids[:3] == [9, 9, 9]
        assert request.output_ids[3:] == run_alone(cyclic, [Job(PROMPT, params)])[0].token_ids[3:]
        assert request.output_ids != [9] * 5


@pytest.mark.parametrize("k", [0, 5], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 62, 63])
def test_prompts_of_any_length(cyclic: Model, k: int, length: int) -> None:
    engine = make_engine(cyclic, k, max_model_len=64)
    for _ in range(2):  # the second run uses the prefix cache
        [request] = run(engine, [Job(cycle(3, length), greedy(max_tokens=70))])
        assert request.output_ids == cycle(3 + length, 64 - length)
    assert request.num_cached_tokens == (length - 1) // 16 * 16


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], {}, "The prompt is empty"),
        (cycle(0, 64), {}, "The prompt has 64 tokens, but max_model_len=64"),
        ([1, V], {}, f"The prompt contains token id {V}; ids are integers from 0 to {V - 1}."),
        ([1], {"stop_token_ids": [V]}, f"stop_token_ids contains token id {V}"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_invalid_request_is_rejected_without_side_effects(
    cyclic: Model, prompt: list[int], params: dict[str, Any], sentence: str
) -> None:
    engine = make_engine(cyclic, 3, max_model_len=64)
    with pytest.raises(ValueError) as caught:
        engine.add(prompt, SamplingParams(**params))
    assert sentence in str(caught.value)
    assert not engine.has_work
    assert engine.metrics.to_dict() == make_engine(cyclic, 3).metrics.to_dict()


def test_step_without_work_does_nothing(cyclic: Model) -> None:
    engine = make_engine(cyclic, 3)
    assert engine.step() == []
    assert engine.metrics.num_forward_steps == 0
    run(engine, [Job(PROMPT, greedy())])
    assert engine.step() == []


@pytest.mark.parametrize("steps", [0, 1, 2, 4], ids=["waiting", "prefilling", "prefilled", "decoding"])
def test_abort_keeps_output_and_frees_resources(cyclic: Model, steps: int) -> None:
    engine = make_engine(cyclic, 3, max_num_batched_tokens=20)
    request = engine.add(PROMPT, greedy())
    other = engine.add(PROMPT[1:], greedy())
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    engine.abort(request)  # a second abort has no effect
    assert request.finish_reason == "abort"
    assert request.output_ids == cycle(4, 4 * max(steps - 2 - engine.lag, 0))
    finish(engine)
    assert_idle(engine)
    assert other.output_ids == cycle(4, 20)
    assert (engine.metrics.num_aborted, engine.metrics.num_finished) == (1, 1)
    engine.abort(other)
    assert other.finish_reason == "length"


@pytest.mark.parametrize("window", [2, 8, 17, 40])
def test_max_model_len_smaller_than_timed_contexts(cyclic: Model, window: int) -> None:
    engine = make_engine(cyclic, "auto", max_model_len=window, max_num_seqs=1)
    [request] = run(engine, [Job([3], greedy(max_tokens=None))])
    assert request.output_ids == cycle(4, window - 1)


@pytest.mark.parametrize("k", [0, 4], ids=lambda k: f"K{k}")
def test_preempted_requests_resume(k: int) -> None:
    """Limits, penalties, min_tokens and seeds count from the prompt, not from the point of resumption."""
    model = tiny_model(vocab_size=24)
    params = [
        SamplingParams(temperature=1, seed=1, max_tokens=50),
        SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=0.3, max_tokens=50),
        SamplingParams(temperature=0.7, seed=2, stop_token_ids=range(20), min_tokens=40, max_tokens=50),
        SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=50, logprobs=2),
    ]
    jobs = [Job([i, 5, 7, 5, 7], p) for i, p in enumerate(params)]
    expected = run_alone(model, jobs, max_model_len=64)
    engine = make_engine(model, k, max_model_len=64, num_blocks=7)
    if k:
        texts = [job.prompt + e.token_ids for job, e in zip(jobs, expected, strict=True)]
        use_drafter(engine, oracle(texts, wrong=lambda at: at % 7 == 0))
    requests = run(engine, jobs)
    assert sum(request.num_preemptions > 0 for request in requests) >= 2
    for request, wanted in zip(requests, expected, strict=True):
        assert_same(outcome(request), wanted)
        assert request.stats.num_tokens == len(request.output_ids) == len(request.draft_sources)


POISON = 23  # the embedding of this token is NaN


@pytest.fixture
def nan_model() -> Model:
    model = tiny_model(vocab_size=24)
    model.embedding = model.embedding.clone()
    model.embedding[POISON] = float("nan")
    return model


HEALTHY = [
    Job(job.prompt, job.params)
    for job in random_jobs(random.Random(8), POISON, 6, max_tokens=30)
    if not job.params.logit_bias
]


def healthy_jobs() -> list[Job]:
    """Return requests that never draw the poisoned token."""
    bias = {POISON: -1e6}
    return [Job(job.prompt, SamplingParams(**{**vars(job.params), "logit_bias": bias})) for job in HEALTHY]


@pytest.mark.parametrize("k", [0, 4], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("num_blocks", [9, 40], ids=lambda n: f"{n}-blocks")
def test_nan_aborts_one_request_only(nan_model: Model, k: int, num_blocks: int) -> None:
    jobs = healthy_jobs()
    expected = run_alone(nan_model, jobs)
    engine = make_engine(nan_model, k, num_blocks=num_blocks)
    sick_prompt = [1, 2, 3, POISON, *range(20), 4, 5, 6]
    prompts = [sick_prompt, sick_prompt[:5], list(range(20)) * 2 + [POISON] * 30]
    for _ in range(2):  # the second time, every block has been used before
        requests, sick = [], []
        for i, job in enumerate(jobs):
            if i % 2 == 0:
                sick.append(engine.add(prompts[i // 2 % 3], SamplingParams(max_tokens=9, logprobs=1)))
            requests.append(engine.add(job.prompt, job.params))
        finish(engine)
        assert_idle(engine)
        for request in sick:
            assert request.finish_reason == "abort"
            assert request.output_ids == request.logprobs == []
            assert request.error == (
                f"At position {request.num_tokens} the logits are NaN or infinite; check the weights "
                "and the dtype (float16 is limited to 65,504)."
            )
        for request, wanted in zip(requests, expected, strict=True):
            assert_same(outcome(request), wanted)


def test_nan_after_some_tokens_keeps_them(nan_model: Model) -> None:
    """The poisoned token is drawn from finite logits; the logits after it are NaN."""
    params = SamplingParams(temperature=0, logit_bias={POISON: 1e6}, max_tokens=9, logprobs=1)
    for k in (0, 4):
        engine = make_engine(nan_model, k)
        [request] = run(engine, [Job([1, 2, 3], params)])
        assert request.output_ids == [POISON]
        assert len(request.logprobs) == 1
        assert request.finish_reason == "abort"


def test_blocks_of_a_nan_request_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transient fault (here NaN in one prefill) must not stay in the prefix cache."""
    model = tiny_model(vocab_size=24)
    job = Job([i * 5 % 24 for i in range(40)], SamplingParams(temperature=0, max_tokens=8))
    [wanted] = run_alone(model, [job])
    engine = make_engine(model, 3)
    embedding = model.embedding
    model.embedding = embedding * float("nan")
    copies = [engine.add(job.prompt, job.params) for _ in range(3)]
    engine.step()
    model.embedding = embedding
    finish(engine)
    assert [request.finish_reason for request in copies] == ["abort"] * 3
    [again] = run(engine, [job])
    assert_same(outcome(again), wanted)


@pytest.mark.parametrize("event", ["abort", "preempt"])
def test_nan_in_released_blocks_is_harmless(event: str) -> None:
    model = tiny_model(vocab_size=24)
    jobs = [Job([i, 7, i, 7, i], SamplingParams(temperature=0, max_tokens=40)) for i in range(4)]
    expected = run_alone(model, jobs, max_model_len=64)
    engine = make_engine(model, 3, max_model_len=64, num_blocks=8, max_num_batched_tokens=16)
    embedding = model.embedding
    model.embedding = embedding * float("nan")
    sick = engine.add(list(range(20)) * 3, SamplingParams(max_tokens=4))
    engine.step()
    engine.step()
    model.embedding = embedding
    if event == "preempt":
        engine.scheduler._preempt(sick, type(engine.scheduler.schedule())())
    engine.abort(sick)
    for request, wanted in zip(run(engine, jobs), expected, strict=True):
        assert_same(outcome(request), wanted)


def test_block_table_row_holds_own_blocks_only(cyclic: Model) -> None:
    """Beyond its own blocks a row's table repeats them, also after the row held a longer request."""
    engine = make_engine(cyclic, 3, max_model_len=64, max_num_seqs=2)
    run(engine, [Job(cycle(0, 60), greedy()), Job(cycle(9, 50), greedy())])
    requests = [engine.add(cycle(0, 5), greedy()), engine.add(cycle(0, 20), greedy())]
    engine.step()
    for request in requests:
        assert set(engine.worker.table.block_table[request.row].tolist()) == set(request.blocks)


def test_reallocated_blocks_are_zeroed(cyclic: Model) -> None:
    engine = make_engine(cyclic, 3, num_blocks=8)
    engine.worker.kv_cache.fill_(float("nan"))
    request = engine.add(cycle(0, 20), greedy())
    engine.step()
    assert torch.isfinite(engine.worker.kv_cache[:, :, :, request.blocks]).all()
    with launch.forced("triton"):  # the kernel never loads masked elements
        cyclic.zero_blocks(engine.worker.kv_cache, [7])
    assert torch.isnan(engine.worker.kv_cache[:, :, :, 7]).all()


@pytest.mark.parametrize("where", ["model", "allocation", "commit"])
def test_interrupted_step_leaves_a_usable_engine(
    cyclic: Model, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(cyclic, 3, num_blocks=8, max_num_batched_tokens=30)
    requests = [engine.add(cycle(i, 33 + i), greedy()) for i in range(4)]
    engine.step()
    target: Any
    target, name = {
        "model": (engine.worker.model, "forward"),
        "allocation": (engine.scheduler.pool, "allocate"),
        "commit": (engine.scheduler, "register"),
    }[where]
    original = getattr(target, name)

    def interrupted(*args: Any) -> None:
        original(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
    engine.abort_all()
    assert_idle(engine)
    assert all(request.is_finished for request in requests)
    assert engine.metrics.num_aborted + engine.metrics.num_finished == 4
    again = run(engine, [Job(cycle(i, 33 + i), greedy()) for i in range(4)])
    assert [request.output_ids for request in again] == [cycle(33 + 2 * i, 20) for i in range(4)]


def test_abort_all_after_device_failure(cyclic: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cyclic, 3)
    requests = [engine.add(cycle(i, 33 + i), greedy()) for i in range(4)]
    engine.step()

    def fail(row: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.worker, "release", fail)
    engine.abort_all("It failed.")
    assert_idle(engine)
    assert [request.error for request in requests] == ["It failed."] * 4
    assert engine.metrics.num_aborted == 4


def test_pool_too_small_for_max_model_len_is_rejected(cyclic: Model) -> None:
    with pytest.raises(ValueError, match=r"holds the K/V of 32 tokens, but max_model_len=33"):
        make_engine(cyclic, 3, max_model_len=33, num_blocks=2)
    with pytest.raises(ValueError, match=r"max_model_len=513 exceeds the model's limit of 512"):
        Worker(EngineConfig(max_model_len=513), cyclic)
    assert make_engine(cyclic, 3, max_model_len=None, num_blocks=20).max_model_len == 320
