"""Unused memory is not resident; the memory of steps is estimated before they run, and captures share it."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from nanospec.config import EngineConfig, SamplingParams, SpecConfig
from nanospec.device import memory
from nanospec.device.graphs import KS, StepGraphs
from nanospec.device.memory import plan_cache, spare_memory, step_bytes
from nanospec.drafters.policy import Choice
from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.launch import forced
from nanospec.kernels.layer import paged
from nanospec.kernels.layer.split_kv import Split
from tests.drive import Job, make_engine, run
from tests.no_gpu import DryRun, meta_step
from tests.tiny import tiny_config, tiny_model

MIB = 1 << 20
# Two layers with the sizes of Qwen3-0.6B
QWEN3 = tiny_config(
    hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128, vocab_size=151936,
    max_position_embeddings=40960,
)  # fmt: skip


def resident() -> int:
    """Return the resident memory of this process in bytes, known to about 30 MiB."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not report resident pages")
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_large_cache_uses_memory_on_demand() -> None:
    target, draft = (tiny_model(seed, dtype=torch.bfloat16, head_dim=32) for seed in (0, 1))
    before = resident()
    options: dict[str, Any] = {"max_num_seqs": 4096, "max_model_len": 512, "kv_cache_memory": 2 << 30}
    engine = make_engine(target, 3, draft_model=draft, spec={"method": "draft"}, **options)
    assert engine.scheduler.pool.num_blocks > 60_000
    run(engine, [Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))])
    assert resident() - before < 200 * MIB


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launch Triton kernels instead of C++, in an interpreter that does nothing."""
    monkeypatch.setattr(GridExecutor, "__call__", lambda *args, **kwargs: None)
    with forced("triton"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("rows", "k"), [(1, 4), (12, "auto"), (256, 5)])
def test_step_bytes_covers_captures_and_prefill(rows: int, k: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
        with DryRun() as counted:
            run()
        return counted.peak

    monkeypatch.setattr(memory, "peak_bytes", peak_bytes)
    spec = SpecConfig(num_speculative_tokens=k, acceptance="typical")
    step, config = meta_step(QWEN3, spec, rows), EngineConfig(spec=spec, max_num_seqs=rows)
    model = step.model
    graphs = StepGraphs(step, model.device, rows, [*(k for k in KS if k < spec.max_k), spec.max_k])
    step.share_logits(graphs.max_tokens)
    one = torch.empty(1, dtype=torch.int32, device="meta")
    with DryRun():
        step(one, Choice(0))  # allocations that persist
    with DryRun() as captures:
        graphs.capture_all()
    assert captures.alive < 20_000 * len(graphs.captures), "captures must share the logits"
    largest, prefill = captures.peak, 0
    for tokens in (500, 1785, config.max_num_batched_tokens):
        prompt = Batch.from_chunks(step.table, [Chunk(0, step.table.max_context - tokens, tokens)])
        prefill = max(prefill, peak_bytes(one.device, partial(model.forward, prompt, step.kv_cache)))
    needed = memory.row_bytes(step.table) + step._logits.nbytes + largest + max(largest, prefill)
    measured = step_bytes(config, model, step.drafters, model.config.max_position_embeddings)
    assert needed <= measured <= 5 * needed
    if k == 4:  # a drafter that runs a model needs its own logits
        modelled: Any = SimpleNamespace(runs_model=True, max_drafts=63)
        total = step_bytes(config, model, [modelled], model.config.max_position_embeddings)
        assert total - measured >= 2 * step._logits.nbytes


@pytest.mark.usefixtures("no_kernels")
def test_step_bytes_measures_rows_that_split_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention needs memory for partial results only if there are few rows, not in the largest step."""
    spec, splits = SpecConfig(num_speculative_tokens=1), list[tuple[int, int]]()
    choose = paged.split_kv

    def spy(rows: int, *rest: Any) -> Split:
        split = choose(rows, *rest)
        splits.append((rows, split.units))
        return split

    monkeypatch.setattr(paged, "split_kv", spy)
    monkeypatch.setattr(memory, "peak_bytes", lambda _, run: run() or 0)
    model = meta_step(QWEN3, spec, 1).model
    with DryRun():
        step_bytes(EngineConfig(spec=spec, max_num_seqs=1024), model, [], 40960)
    assert {units for rows, units in splits if rows > 32} == {0}
    assert max(units for rows, units in splits if rows == 32) == 80


def test_plan_cache_leaves_memory_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(spec=SpecConfig(method="none"), max_num_seqs=64)
    model, needed = tiny_model(), 1 << 20
    per_block = 16 * model.config.kv_bytes_per_token(model.dtype)
    spare = 40 * per_block
    monkeypatch.setattr(memory, "step_bytes", lambda *_: needed)
    monkeypatch.setattr(memory, "spare_memory", lambda device, sharing, share: spare // sharing)
    assert plan_cache(config, model) == (40, 512)
    model.num_devices = 2
    assert plan_cache(config, model) == (20, 320), "ranks share the memory"
    model.num_devices = 1
    assert plan_cache(replace(config, max_num_seqs=1), model) == (32, 512), "more blocks than can be used"
    spare = 16 * per_block
    assert plan_cache(config, model) == (16, 256), "the context must fit the cache"
    model.device = torch.device("cuda")
    spare = 8 << 20
    assert plan_cache(config, model) == ((spare - needed) // per_block, 512)
    with pytest.raises(ValueError, match=r"kv_cache_memory of 16,384 bytes holds the K/V of 32 tokens"):
        plan_cache(replace(config, kv_cache_memory=2 * per_block), model)
    spare = needed + 100
    with pytest.raises(ValueError, match=r"free memory of 100 bytes holds the K/V of 0"):
        plan_cache(config, model)


def test_request_rows_that_exceed_memory_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_cpu_memory", lambda: MIB)
    with pytest.raises(ValueError, match=r"max_num_seqs=4096 needs .* request rows, but only 1,048,576"):
        make_engine(tiny_model(), 3, max_num_seqs=4096, kv_cache_memory=MIB)


def test_spare_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 30
    monkeypatch.setattr(memory, "_free_cpu_memory", lambda: free)
    assert spare_memory(torch.device("cpu"), 2) == int(0.4 * free) // 2
    free = 1 << 40
    assert spare_memory(torch.device("cpu"), 4) == 1 << 30, "more than 4 GiB"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, spare in ((700, 600), (50, 0)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 1000))
        assert spare_memory(torch.device("cuda"), 2) == spare
    assert spare_memory(torch.device("cuda"), 2, 1.0) == free
