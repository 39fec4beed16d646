"""Unused memory is not resident; the memory of steps is estimated before they run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanospec.config import EngineConfig, SamplingParams, SpecConfig
from nanospec.device import resources
from nanospec.device.graphs import KS, StepGraphs
from nanospec.device.resources import plan_cache, spare_memory, step_bytes
from nanospec.drafters.methods import NgramDrafter
from nanospec.kernels.batch import Batch
from nanospec.kernels.native.packed import zeros_on_demand
from nanospec.kernels.table import Table
from tests.drive import finish, make_engine
from tests.dry import DryRun, dry_step, meta_model
from tests.tiny import tiny_config, tiny_model

MIB = 1 << 20


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not report resident pages")
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_zeros_on_demand() -> None:
    """The process also allocates elsewhere, so its memory is only known to about 30 MiB."""
    before, shape = resident(), (2, 1024, MIB // 2)
    zeros = zeros_on_demand(shape, torch.bfloat16)  # 2 GiB
    assert (zeros.shape, zeros.dtype, zeros.device.type) == (shape, torch.bfloat16, "cpu")
    assert resident() - before < 32 * MIB
    assert not zeros[:, ::100].any()  # reading allocates nothing either
    zeros[0, ::16, 0] = 1  # one page in each of 64 places
    assert resident() - before < 32 * MIB
    zeros[1, :256] = 1
    assert 224 * MIB <= resident() - before < 288 * MIB
    assert zeros[1, 255].float().sum() == MIB // 2
    view = zeros[1, 32].view(torch.int8)
    del zeros
    assert view.any()
    assert resident() - before > 224 * MIB  # while a view exists
    del view
    assert resident() - before < 32 * MIB


def test_large_cache_uses_memory_on_demand() -> None:
    target, draft = (tiny_model(seed, dtype=torch.bfloat16, head_dim=32) for seed in (0, 1))
    before = resident()
    options: dict[str, Any] = {"max_num_seqs": 4096, "max_model_len": 512, "kv_cache_memory": 2 << 30}
    engine = make_engine(target, 3, draft_model=draft, spec={"method": "draft"}, **options)
    assert engine.scheduler.pool.num_blocks > 60_000
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
    finish(engine)
    assert resident() - before < 200 * MIB


MODELS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3,
                     "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8,
                   "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_heads": 32, "num_kv_heads": 8,
                 "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rows", "k"), [("smollm2-135m", 1, 4), ("qwen3-0.6b", 12, "auto"), ("qwen3-8b", 256, 5)]
)
def test_step_bytes_covers_captures_and_prefill(
    name: str, rows: int, k: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the memory of two layers on `meta` tensors."""

    def peak_bytes(device: torch.device, run: Callable[[], None]) -> int:
        with DryRun() as counted:
            run()
        return counted.peak

    monkeypatch.setattr(resources, "peak_bytes", peak_bytes)
    model = meta_model(tiny_config(**MODELS[name]))
    spec = SpecConfig(num_speculative_tokens=k, acceptance="typical")
    step, config = dry_step(model, spec, rows), EngineConfig(spec=spec, max_num_seqs=rows)
    graphs = StepGraphs(step, model.device, rows, [*(k for k in KS if k < spec.max_k), spec.max_k])
    step.share_logits(graphs.max_tokens)
    one, largest = torch.empty(1, dtype=torch.int32, device="meta"), 0
    with DryRun():
        step(one, 0)  # allocations that persist
    for batch, length, _ in graphs.buckets():
        with DryRun() as run:
            step(torch.empty(batch, dtype=torch.int32, device="meta"), length)
        largest = max(largest, run.peak)
    prefill = 0
    for tokens in (500, 1785, config.max_num_batched_tokens):
        prompt = Batch.from_grid(step.table, one, one, one, tokens)
        with DryRun() as run:
            model.forward(replace(prompt, prefill=True), step.kv_cache)
        prefill = max(prefill, run.peak)
    needed = resources.row_bytes(step.table) + step._logits.nbytes + largest + max(largest, prefill)
    measured = step_bytes(config, model, step.drafters, model.config.max_position_embeddings)
    assert needed <= measured <= 5 * needed
    if k == 4:  # a drafter that runs a model needs its own logits
        modelled: Any = SimpleNamespace(runs_model=True, max_drafts=63)
        more = step_bytes(config, model, [modelled], model.config.max_position_embeddings)
        assert more - measured >= 2 * step._logits.nbytes


def test_step_bytes_of_short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and prefills of all rows over the whole context are measured, and parts of these."""
    shapes: set[tuple[int, int]] = set()
    from_grid = Batch.from_grid

    def spy(table: Table, rows: torch.Tensor, first: Any, count: Any, width: int, bound: int) -> Batch:
        shapes.add((len(rows), width))
        return from_grid(table, rows, first, count, width, bound)

    monkeypatch.setattr(Batch, "from_grid", spy)
    monkeypatch.setattr(resources, "peak_bytes", lambda device, run: 0)
    spec = SpecConfig(num_speculative_tokens=8)
    drafters = [NgramDrafter(spec)]
    step_bytes(EngineConfig(spec=spec, max_num_seqs=2), meta_model(tiny_config()), drafters, 4)
    assert shapes == {(2, 1), (1, 1), (2, 4), (1, 4), (2, 2)}


def test_plan_cache_leaves_memory_for_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(spec=SpecConfig(method="none"), max_num_seqs=64)
    model, needed = tiny_model(), 1 << 20
    per_block = 16 * model.config.kv_bytes_per_token(model.dtype)
    spare = 40 * per_block
    monkeypatch.setattr(resources, "step_bytes", lambda *_: needed)
    monkeypatch.setattr(resources, "spare_memory", lambda device, sharing: spare)
    assert plan_cache(config, model) == (40, 512)
    assert plan_cache(replace(config, max_num_seqs=1), model) == (32, 512), "as many as can be used"
    spare = 16 * per_block
    assert plan_cache(config, model) == (16, 256), "a shorter context"
    model.device = torch.device("cuda")
    spare = 8 << 20
    assert plan_cache(config, model) == ((spare - needed) // per_block, 512)
    with pytest.raises(ValueError, match=r"kv_cache_memory of 16,384 bytes holds the K/V of 32 tokens"):
        plan_cache(replace(config, kv_cache_memory=2 * per_block), model)
    spare = needed + 100
    with pytest.raises(ValueError, match=r"free memory of 100 bytes holds the K/V of 0"):
        plan_cache(config, model)


def test_request_rows_that_exceed_memory_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_free_cpu_memory", lambda: MIB)
    with pytest.raises(
        ValueError, match=r"max_num_seqs=4096 needs .* bytes for request rows, but only 1,048,576"
    ):
        make_engine(tiny_model(), 3, max_num_seqs=4096, kv_cache_memory=MIB)


def test_spare_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 30
    monkeypatch.setattr(resources, "_free_cpu_memory", lambda: free)
    assert spare_memory(torch.device("cpu"), 2) == int(0.4 * free) // 2
    free = 1 << 40
    assert spare_memory(torch.device("cpu"), 4) == 1 << 30, "of at most 4 GiB"
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    assert spare_memory(torch.device("cuda"), 2) == 600
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 1000))
    assert spare_memory(torch.device("cuda"), 2) == 0
