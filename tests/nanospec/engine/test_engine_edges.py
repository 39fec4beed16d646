"""Ends of requests and failures: limits, stops, NaN, aborts, prompts of extreme length.

Most tests run `cycle_model`, whose output is known: t + 1 follows t. Prompts contain the cycle, so every
step accepts all its drafts, and every limit and stop lies inside an accepted run."""

from typing import Any

import pytest

from nanospec.config import EngineConfig
from nanospec.device.worker import Worker
from nanospec.models.decoder import Model
from tests.drive import MODES, Job, assert_idle, cycle, cycle_model, finish, greedy, make_engine, run

V = 32  # vocabulary of the cycle
PROMPT = cycle(0, V + 4)  # the next token is 4


@pytest.fixture(scope="module")
def cyclic() -> Model:
    return cycle_model(V)


@pytest.fixture(params=MODES.values(), ids=list(MODES))
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.mark.parametrize("k", [0, 1, 3, 7, 16])
def test_ends_inside_an_accepted_run(cyclic: Model, k: int, mode: dict[str, Any]) -> None:
    """The prompt contains the stop tokens too, where they have no effect."""
    limits, stops = (1, 2, 3, 7, 8, 9, 17), (4, 5, 8, 11, 12, 20)
    jobs = [Job(PROMPT, greedy(max_tokens=limit)) for limit in limits]
    for limit, request in zip(limits, run(make_engine(cyclic, k, **mode), jobs), strict=True):
        assert (request.output_ids, request.finish_reason) == (cycle(4, limit), "length")
        assert request.stats.num_steps == -(-limit // (k + 1))
        assert request.stats.num_accepted == limit - request.stats.num_steps
    jobs = [Job(PROMPT, greedy(stop_token_ids=[stop, 25], logprobs=stop % 3)) for stop in stops]
    for stop, request in zip(stops, run(make_engine(cyclic, k, **mode), jobs), strict=True):
        assert (request.output_ids, request.finish_reason) == (cycle(4, stop - 3), "stop")
        assert len(request.draft_sources) == request.stats.num_tokens == stop - 3
        assert request.stats.num_accepted == sum(source >= 0 for source in request.draft_sources)
        for token, entry in zip(request.output_ids, request.logprobs, strict=True):
            assert next(iter(entry.items())) == (token, (0.0, 1, None))
            assert [e.rank for e in entry.values()] == [*range(1, max(stop % 3, 1) + 1)]


@pytest.mark.parametrize("captured", [False, True], ids=["packed", "captured"])
def test_step_after_all_requests_ended_is_not_reported(cyclic: Model, captured: bool) -> None:
    engine = make_engine(cyclic, 3, async_scheduling=True, enforce_eager=not captured)
    [request] = run(engine, [Job(PROMPT, greedy(logprobs=20, max_tokens=9))])
    # A captured step is queued before the host knows the end; an eager step would wait for the device.
    assert engine.metrics.num_forward_steps == 3 + captured
    assert request.stats.num_steps == 3
    assert [len(entry) for entry in request.logprobs] == [20] * 9
    assert engine.step() == []
    assert engine.metrics.num_forward_steps == 3 + captured


@pytest.mark.parametrize("window", [2, 17])
def test_max_model_len_smaller_than_timed_contexts(cyclic: Model, window: int) -> None:
    engine = make_engine(cyclic, "auto", max_model_len=window, max_num_seqs=1)
    [request] = run(engine, [Job([3], greedy(max_tokens=None))])
    assert request.output_ids == cycle(4, window - 1)


def test_invalid_request_is_not_queued(cyclic: Model) -> None:
    engine = make_engine(cyclic, 3, max_model_len=64)
    with pytest.raises(ValueError, match="The prompt has 64 tokens, but max_model_len=64"):
        engine.add(cycle(0, 64), greedy())
    assert not engine.has_work


def test_pool_too_small_for_max_model_len_is_rejected(cyclic: Model) -> None:
    with pytest.raises(ValueError, match=r"holds the K/V of 32 tokens, but max_model_len=33"):
        make_engine(cyclic, 3, max_model_len=33, num_blocks=2)
    with pytest.raises(ValueError, match=r"max_model_len=513 exceeds the model's limit of 512"):
        Worker(EngineConfig(max_model_len=513), cyclic)
    assert make_engine(cyclic, 3, max_model_len=None, num_blocks=20).max_model_len == 320


@pytest.mark.parametrize("steps", [0, 1, 2, 4], ids=["waiting", "prefilling", "prefilled", "decoding"])
def test_abort_keeps_output_and_frees_resources(cyclic: Model, steps: int, mode: dict[str, Any]) -> None:
    engine = make_engine(cyclic, 3, max_num_batched_tokens=20, **mode)
    request, other = engine.add(PROMPT, greedy()), engine.add(PROMPT[1:], greedy())
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
