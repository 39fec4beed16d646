"""The engine on a GPU in bf16: outputs are bitwise identical with and without speculation."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec.config import SamplingParams
from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.models.decoder import Model
from tests.drive import Job, make_engine, random_jobs, run
from tests.nanospec.extras.grammar.guided import guided_jobs, is_valid
from tests.nanospec.extras.tracing.records import check, record_of
from tests.tiny import GEMMA, tiny_model, tiny_tokenizer

VOCAB = 512
OPTIONS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256, "enable_prefix_caching": False}


def make_model(device: torch.device | str, **changes: Any) -> Model:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 2,
        "head_dim": 64, "max_position_embeddings": 4096,
    }  # fmt: skip
    return tiny_model(dtype=torch.bfloat16, device=device, **{**fields, **changes})


@pytest.fixture
def model(gpu: torch.device) -> Model:
    return make_model(gpu)


def make_jobs(seed: int) -> list[Job]:
    """Return random requests, and one that repeats a token, so that drafts are accepted."""
    again = SamplingParams(temperature=0, max_tokens=60, logit_bias={5: 60.0})
    return [*random_jobs(random.Random(seed), VOCAB, 9, max_prompt=150), Job([5, 9, 5, 5], again)]


def check_outputs(
    model: Model, k: Any, jobs: list[Job], expected: list[Any] | None = None, **options: Any
) -> tuple[Engine, list[Request]]:
    """Run jobs with `k` drafts, and compare with those of one request at a time without speculation."""
    if expected is None:
        alone = {**OPTIONS, "max_num_seqs": 1, "enforce_eager": True, "async_scheduling": False}
        alone |= {name: options[name] for name in ("max_model_len", "tokenizer") if name in options}
        plain = make_engine(model, None, **alone)
        expected = [(r.output_ids, r.finish_reason) for job in jobs for r in run(plain, [job])]
    engine = make_engine(model, k, **{**OPTIONS, **options})
    requests = run(engine, jobs)
    assert [(r.output_ids, r.finish_reason) for r in requests] == expected
    return engine, requests


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "captured"])
def test_speculation_is_bitwise_identical(model: Model, eager: bool, is_async: bool) -> None:
    """Run batches with traces, in which requests are preempted."""
    options: dict[str, Any] = {"enforce_eager": eager, "async_scheduling": is_async}
    for seed, k in enumerate((0, 1, "auto", 9)):
        _, requests = check_outputs(model, k, make_jobs(seed), trace=True, **options)
        assert k == "auto" or (requests[-1].stats.num_accepted > 0) == (k != 0)
        for request in requests:
            check(request)
    assert any(step.accepted for step in record_of(requests[-1]).steps)
    engine, _ = check_outputs(model, 8, make_jobs(2), num_blocks=22, **options)
    assert engine.metrics.num_preemptions > 0


def test_structured_output_is_bitwise_identical(model: Model, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    jobs = guided_jobs(random.Random(8), 12)
    engine, requests = check_outputs(model, 6, jobs, tokenizer=tiny_tokenizer(tmp_path))
    for request in requests:
        response_format = request.params.response_format
        if response_format is not None and request.finish_reason == "stop" and request.stop_reason is None:
            assert is_valid(request.text, response_format)
    assert engine.metrics.spec.by_drafter["grammar"][2] > 0


@pytest.mark.parametrize("name", GEMMA)
def test_gemma_features(gpu: torch.device, name: str) -> None:
    check_outputs(make_model(gpu, **{**GEMMA[name], "hidden_size": 256, "head_dim": 256}), 4, make_jobs(5))


def test_long_prompt_in_chunks_of_any_size(model: Model) -> None:
    """Chunk sizes depend on K, since decoding rows take K + 1 tokens each."""
    rng, greedy = random.Random(0), SamplingParams(temperature=0, max_tokens=40)
    again = SamplingParams(temperature=0, max_tokens=150, logit_bias={5: 60.0})
    jobs = [Job([5, 9, 5, 5], again)]
    jobs += [Job([rng.randrange(VOCAB) for _ in range(n)], greedy) for n in (40, 3000)]
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 3200}
    _, requests = check_outputs(model, 0, jobs, max_num_batched_tokens=3200, **options)
    expected = [(r.output_ids, r.finish_reason) for r in requests]
    for tokens, k in ((64, 8), (512, 0), (512, 8), (2048, 8)):
        check_outputs(model, k, jobs, expected, max_num_batched_tokens=tokens, **options)


@pytest.mark.parametrize("setup", ["ngram-tree", "draft", "dflash", "eagle3", "ngram+draft"])
def test_every_drafter(model: Model, setup: str) -> None:
    method, _, tree = setup.partition("-")
    parts: dict[str, Any] = {"spec": {"method": method, "tree_width": 3 if tree else 1}}
    if "draft" in method:
        parts["draft_model"] = make_model("cuda", num_layers=1)
    engine, _ = check_outputs(model, 5, make_jobs(3), **parts)
    assert engine.worker.graphs is not None


def test_requests_compile_no_kernel(model: Model) -> None:
    engine = make_engine(model, 4, **{**OPTIONS, "max_model_len": 2048})
    params = SamplingParams(temperature=0, max_tokens=20)
    run(engine, [Job([7, 9] * n, params) for n in (1, 5, 12, 30, 60, 200, 900)])
    assert engine.num_compiled == 0


def test_dependent_launch_is_bitwise_identical(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("0", "1", "1"):  # twice: a race would change the result
        monkeypatch.setenv("NANOSPEC_PDL", setting)
        check_outputs(model, 4, make_jobs(4))


def test_engine_frees_its_memory(model: Model) -> None:
    sizes = []
    for _ in range(4):  # the first allocates everything that persists
        run(make_engine(model, 4, **OPTIONS), make_jobs(5))
        gc.collect()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] <= sizes[0] + (4 << 20)
