"""The engine on a GPU in bf16: speculation is bitwise identical however steps are run."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec import SimpleDrafter
from nanospec.config import SamplingParams
from nanospec.models.decoder import Model
from tests.drive import Job, make_engine, outcome, random_jobs, run
from tests.nanospec.extras.grammar.guided import guided_jobs, is_right
from tests.nanospec.extras.tracing.records import check, record_of
from tests.random_weights import random_heads
from tests.tiny import GEMMA, tiny_model, tiny_tokenizer

VOCAB = 512


def make_model(device: torch.device | str, **changes: Any) -> Model:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    return tiny_model(dtype=torch.bfloat16, device=device, **{**fields, **changes})


@pytest.fixture
def model(gpu: torch.device) -> Model:
    return make_model(gpu)


def make_jobs(seed: int) -> list[Job]:
    """Return random requests, and one that repeats a token, so that drafts are accepted."""
    again = SamplingParams(temperature=0, max_tokens=60, logit_bias={5: 60.0})
    return [*random_jobs(random.Random(seed), VOCAB, 9, max_prompt=150), Job([5, 9, 5, 5], again)]


@pytest.mark.parametrize("lag", [False, True], ids=["direct", "lagged"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "captured"])
@pytest.mark.parametrize("k", [0, 1, 4, 9])
def test_speculation_is_bitwise_identical(model: Model, k: int, eager: bool, lag: bool) -> None:
    jobs = make_jobs(k)
    options: dict[str, Any] = {"max_model_len": 256, "enable_prefix_caching": False}
    plain = make_engine(model, None, max_num_seqs=1, enforce_eager=True, async_scheduling=False, **options)
    expected = [outcome(run(plain, [job])[0]) for job in jobs]
    engine = make_engine(model, k, max_num_seqs=6, enforce_eager=eager, async_scheduling=lag, **options)
    requests = run(engine, jobs)
    for request, wanted in zip(requests, expected, strict=True):
        assert request.output_ids == wanted.token_ids
        assert request.finish_reason == wanted.finish_reason
    assert (requests[-1].stats.num_accepted > 0) == (k > 0)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "captured"])
def test_trace_matches_requests(model: Model, eager: bool) -> None:
    options: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256, "spec": {"tree_width": 2}}
    engine = make_engine(model, 5, enforce_eager=eager, trace=True, **options)
    requests = run(engine, make_jobs(3))
    for request in requests:
        check(request)
    assert any(step.accepted for step in record_of(requests[-1]).steps)


def outputs(model: Model, k: int, jobs: list[Job], **options: Any) -> list[list[int]]:
    engine = make_engine(model, k, enable_prefix_caching=False, **options)
    return [request.output_ids for request in run(engine, jobs)]


@pytest.mark.parametrize("name", GEMMA)
def test_gemma_features(gpu: torch.device, name: str) -> None:
    model, jobs = make_model(gpu, **{**GEMMA[name], "hidden_size": 256, "head_dim": 256}), make_jobs(5)
    options: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256}
    assert outputs(model, 4, jobs, **options) == outputs(model, 0, jobs, **options)


def long_jobs() -> list[Job]:
    """Return a request that accepts drafts, a short one, and one with a prompt of 3,000 tokens."""
    rng = random.Random(0)
    again = SamplingParams(temperature=0, max_tokens=150, logit_bias={5: 60.0})
    greedy = SamplingParams(temperature=0, max_tokens=40)
    texts = [
        [5, 9, 5, 5],
        [rng.randrange(VOCAB) for _ in range(40)],
        [rng.randrange(VOCAB) for _ in range(3000)],
    ]
    return [Job(texts[0], again), Job(texts[1], greedy), Job(texts[2], greedy)]


@pytest.mark.parametrize("tokens", [64, 512, 2048])
def test_long_prompt_in_chunks_of_any_size(model: Model, tokens: int) -> None:
    """Chunk sizes depend on K, since decoding rows take K + 1 tokens each."""
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 3200}
    expected = outputs(model, 0, long_jobs(), max_num_batched_tokens=3200, **options)
    for k in (0, 8):
        assert outputs(model, k, long_jobs(), max_num_batched_tokens=tokens, **options) == expected, k


def test_preemption_is_bitwise_identical(model: Model) -> None:
    jobs = make_jobs(2)
    options: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256}
    expected = outputs(model, 0, jobs, **options)
    for k in (0, 8):
        engine = make_engine(model, k, num_blocks=22, enable_prefix_caching=False, **options)
        assert [request.output_ids for request in run(engine, jobs)] == expected, k
        assert engine.metrics.num_preemptions > 0


@pytest.mark.parametrize("lag", [False, True], ids=["direct", "lagged"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "captured"])
def test_structured_output_with_and_without_speculation(
    model: Model, tmp_path: Path, eager: bool, lag: bool
) -> None:
    """In batches with unguided requests."""
    pytest.importorskip("llguidance")
    options: dict[str, Any] = {"max_model_len": 256, "tokenizer": tiny_tokenizer(tmp_path)}
    jobs = guided_jobs(random.Random(8), 12)
    plain = make_engine(model, None, max_num_seqs=1, enforce_eager=True, async_scheduling=False, **options)
    expected = [outcome(run(plain, [job])[0]) for job in jobs]
    engine = make_engine(model, 6, max_num_seqs=6, enforce_eager=eager, async_scheduling=lag, **options)
    for request, wanted in zip(run(engine, jobs), expected, strict=True):
        assert request.output_ids == wanted.token_ids
        assert request.finish_reason == wanted.finish_reason
        response_format = request.params.response_format
        if response_format is not None and request.finish_reason == "stop" and request.stop_reason is None:
            assert is_right(request.text, response_format)
    assert engine.metrics.spec.by_drafter["grammar"][2] > 0


def test_simple_drafter_runs_without_capture(model: Model) -> None:
    class Repeat(SimpleDrafter):
        def draft(self, tokens: list[int], k: int) -> list[int]:
            return tokens[-1:] * k

    jobs = make_jobs(5)
    expected = outputs(model, 0, jobs, max_num_seqs=6, max_model_len=256)
    engine = make_engine(model, 4, drafter=["ngram", Repeat()], max_num_seqs=6, max_model_len=256)
    assert [request.output_ids for request in run(engine, jobs)] == expected
    assert engine.worker.graphs is None
    assert engine.metrics.spec.by_drafter["Repeat"][2] > 0


def test_dependent_launch_is_bitwise_identical(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, result = make_jobs(4), []
    for setting in ("0", "1", "1"):  # twice: a race would change the result
        monkeypatch.setenv("NANOSPEC_PDL", setting)
        result.append(outputs(model, 4, jobs, max_num_seqs=6, max_model_len=256))
    assert result[0] == result[1] == result[2]


@pytest.mark.parametrize("k", [0, 4])
def test_steps_do_not_wait_for_the_device(model: Model, k: int) -> None:
    """While block tables grow, a request is admitted, one is aborted and one ends."""
    engine = make_engine(model, k, max_num_seqs=4, max_model_len=2048)
    params = SamplingParams(temperature=0, max_tokens=1000)
    first, second = (engine.add([5, 9, 5, 9, 5, i], params) for i in range(2))
    for _ in range(10):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(80):
            if i == 20:
                engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
            if i == 40:
                engine.abort(second)
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(first.output_ids) >= 80


def test_engine_frees_its_memory(model: Model) -> None:
    outputs(model, 4, make_jobs(5), max_num_seqs=6, max_model_len=256)  # allocates everything that persists

    def left() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    before = left()
    for _ in range(3):
        outputs(model, 4, make_jobs(5), max_num_seqs=6, max_model_len=256)
    assert left() <= before + (4 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu(model: Model) -> None:
    jobs, options = make_jobs(6), {"max_num_seqs": 6, "max_model_len": 256}
    assert torch.cuda.current_device() == 0
    assert outputs(make_model("cuda:1"), 4, jobs, **options) == outputs(model, 4, jobs, **options)


def test_automatic_k_captures_and_times_every_bucket(model: Model) -> None:
    engine = make_engine(model, "auto", max_num_seqs=8, max_model_len=256)
    assert engine.worker.graphs is not None
    assert set(engine.worker.graphs.captures) == set(engine.worker.graphs.buckets())
    requests = run(engine, make_jobs(1))
    assert requests[-1].stats.tokens_per_step > 2


SETUPS: dict[str, dict[str, Any]] = {
    "ngram-tree": {"method": "ngram", "tree_width": 3},
    "draft": {"method": "draft"},
    "medusa": {"method": "medusa"},
    "medusa-tree": {"method": "medusa", "tree_width": 3},
    "ngram+draft": {"method": "ngram+draft"},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_output_is_unchanged_with_every_drafter(model: Model, setup: str) -> None:
    """In bf16, including trees."""
    dtype = torch.bfloat16
    target = tiny_model(dtype=dtype, device="cuda", vocab_size=VOCAB)
    parts: dict[str, Any] = {}
    if "draft" in setup:
        parts["draft_model"] = tiny_model(dtype=dtype, device="cuda", vocab_size=VOCAB, num_layers=1)
    if "medusa" in setup:
        parts["heads"] = random_heads(target, 3)
    jobs = make_jobs(3)
    options: dict[str, Any] = {"max_model_len": 256, "enable_prefix_caching": False}
    plain = make_engine(target, None, max_num_seqs=1, enforce_eager=True, async_scheduling=False, **options)
    expected = [outcome(run(plain, [job])[0]) for job in jobs]
    engine = make_engine(target, 5, spec=SETUPS[setup], max_num_seqs=6, **parts, **options)
    for request, wanted in zip(run(engine, jobs), expected, strict=True):
        assert request.output_ids == wanted.token_ids
    assert engine.worker.graphs is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_draft_model_equal_to_target_is_always_accepted(model: Model, temperature: float) -> None:
    engine = make_engine(model, 4, spec={"method": "draft"}, draft_model=model, max_model_len=256)
    jobs = [Job([i, 2, 3], SamplingParams(temperature=temperature, seed=i, max_tokens=60)) for i in range(5)]
    for request in run(engine, jobs):
        assert request.stats.num_accepted == request.stats.num_drafted > 20
