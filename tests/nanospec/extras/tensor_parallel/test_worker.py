"""A model split among ranks generates the output of the whole model, with every drafter."""

import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from nanospec.config import EngineConfig, SamplingParams
from nanospec.device.worker import Worker
from nanospec.drafters import Drafter, Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.ngram import NgramDrafter
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.extras import create_extensions
from nanospec.extras.tensor_parallel.process_group import ProcessGroup, RankFailed
from nanospec.extras.tensor_parallel.worker import RankWorker
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from tests import drive
from tests.drive import MODES, Job, assert_same, drafters_of, make_spec, outcome, random_jobs, run, run_alone
from tests.random_weights import write_drafter
from tests.ranks import MakeDrafter, Weights, groups_of, part_of, split_engine, together, weights_of
from tests.tiny import tiny_config, tiny_model

VOCAB = 62  # not divisible by four ranks


class Full(NamedTuple):
    config: ModelConfig
    weights: Weights
    model: Model


@cache
def full(heads: int = 4, kv_heads: int = 2) -> Full:
    config = tiny_config(vocab_size=VOCAB, num_heads=heads, num_kv_heads=kv_heads)
    weights = weights_of(config)
    return Full(config, weights, Model(config, torch.float32, "cpu", weights.__getitem__))


def make_drafters(options: EngineConfig) -> MakeDrafter:
    """Return a function that creates each rank's drafters."""
    spec = options.spec

    def make(model: Model, group: ProcessGroup) -> Sequence[Drafter]:
        draft = ModelDrafter(spec, tiny_model(num_layers=1, vocab_size=VOCAB), VOCAB)
        return drafters_of(spec, Target(model), {"draft": draft})

    return make


def options_of(size: int, method: str, k: Any, width: int = 1, **more: Any) -> EngineConfig:
    options = {"max_num_seqs": 4, "max_model_len": 128, "tensor_parallel_size": size, **more}
    return EngineConfig(spec=make_spec(k, method=method, tree_width=width), **options)


def run_split(options: EngineConfig, whole: Full, jobs: list[Job], drafter: MakeDrafter | None = None) -> Any:
    """Check that ranks generate the output of one device, and return the metrics."""
    size = options.tensor_parallel_size
    with split_engine(size, whole.config, whole.weights, options, drafter) as split:
        result = [outcome(request) for request in run(split.engine, jobs)]
    split.assert_equal()
    for got, wanted in zip(result, run_alone(whole.model, jobs), strict=True):
        assert_same(got, wanted)
    return split.engine.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "method", "width", "mode"),
    [
        ((2, 4, 2), "draft", 1, "as-on-gpu"),
        ((4, 4, 2), "eagle3", 1, "plain"),  # two ranks have one KV head
        ((2, 6, 3), "ngram", 3, "as-on-gpu"),  # padded with zeros
    ],
    ids=str,
)
def test_output_matches_one_device(
    shape: tuple[int, int, int], method: str, width: int, mode: str, tmp_path: Path
) -> None:
    """Test greedy and seeded sampling, filters, penalties, logprobs, prefix hits, chunks and preemption."""
    size, *heads = shape
    whole, jobs = full(*heads), random_jobs(random.Random(f"{shape}{method}"), VOCAB, 4, max_tokens=25)
    options = options_of(size, method, 5, width, max_num_batched_tokens=32, **MODES[mode])
    if method == "eagle3":
        folder = str(write_drafter(tmp_path, method, whole.config, vocab=40))
        options = replace(options, spec=replace(options.spec, draft_model=folder))
    spec = run_split(options, whole, jobs, make_drafters(options)).spec
    assert spec.num_accepted > 0
    if method == "eagle3":  # drafts depend on the states that all ranks keep
        drafters = make_drafters(options)(whole.model, groups_of(1)[0])
        one = Engine(options, Worker(options, whole.model, drafters))
        run(one, jobs)
        assert one.metrics.spec.by_drafter == spec.by_drafter


@pytest.mark.slow
@pytest.mark.parametrize("k", [4, "auto"])
def test_ranks_agree_on_random_drafts_and_timed_k(k: Any) -> None:
    """Each rank on its own would choose other drafts, and another number of drafts."""
    memory = 9 * 16 * full().config.kv_bytes_per_token(torch.float32) // 2
    options = options_of(2, "ngram", k, trace=True, kv_cache_memory=memory)

    def make(model: Model, group: ProcessGroup) -> Sequence[Drafter]:
        noise = drive.random_drafter(VOCAB, group.rank)
        noise.reads_on_host = True
        return NgramDrafter(options.spec), noise

    metrics = run_split(options, full(), random_jobs(random.Random(37), VOCAB, 4, max_tokens=25), make)
    assert metrics.spec.num_accepted > 0 or k == "auto"
    assert metrics.num_preemptions > 0


def test_aborts_and_nan_logits_do_not_affect_other_requests() -> None:
    whole = full()
    broken = {name: weight.clone() for name, weight in whole.weights.items()}
    broken["model.embed_tokens.weight"][7] = float("nan")
    params = [SamplingParams(seed=seed, max_tokens=20, logit_bias={7: -100}) for seed in range(3)]
    jobs = [Job([20 + seed, 30] * 9, each) for seed, each in enumerate(params)]
    options = options_of(2, "ngram", 4, **MODES["as-on-gpu"])
    with split_engine(2, whole.config, broken, options) as split:
        engine = split.engine
        bad, *_ = (engine.add(prompt, params[0]) for prompt in ([1, 7], [1, 2]))
        for _ in range(6):
            engine.step()
        engine.abort_all()  # steps in flight are never fetched
        assert "NaN" in str(bad.error)
        assert engine.worker.table.finished[:2].all()  # both rows are released
        again = run(engine, jobs)
    for request, expected in zip(again, run_alone(whole.model, jobs), strict=True):
        assert_same(outcome(request), expected)
    split.assert_equal()


def test_failure_stops_all_ranks_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure of a command, the engine has no work, and further commands repeat the error."""
    whole, options = full(), options_of(2, "ngram", 3)

    def fail(*args: Any) -> None:
        raise RuntimeError("no memory left")

    with split_engine(2, whole.config, whole.weights, options) as split:
        engine = split.engine
        shared, worker = SharedEngine(engine), engine.worker
        run(engine, [Job([1, 2, 1, 2], SamplingParams(max_tokens=5))])
        monkeypatch.setattr(worker, "_set_blocks", fail)
        for kind in (RuntimeError, RankFailed):
            engine.add([1, 2, 3], SamplingParams(max_tokens=5))
            with pytest.raises(kind, match="no memory left"):
                shared.step()
            assert not engine.has_work
        assert str(worker.failure).startswith("All ranks were stopped, because rank 0 failed in 'admit': ")


def test_memory_and_captures() -> None:
    whole = full(heads=6, kv_heads=3)
    options = options_of(2, "draft", 3, enforce_eager=False)
    with split_engine(2, whole.config, whole.weights, options, make_drafters(options)) as split:
        worker = split.engine.worker
        graphs, draft, (first, second) = worker.graphs, worker.drafters[0], worker.memory
        assert isinstance(draft, ModelDrafter)
        assert first == second
        assert first["weights"] == worker.model.weight_bytes < 0.7 * whole.model.weight_bytes
        assert first["kv_cache"] == worker.kv_cache.nbytes
        assert first["draft_weights"] == draft.model.weight_bytes  # each rank has the whole draft model
        assert first["draft_kv_cache"] == draft.kv.nbytes
        assert graphs is not None
        assert len(graphs.captures) == len(graphs.buckets())


def test_dropped_engine_ends_its_ranks() -> None:
    """Objects needed to stop the ranks, such as captures, must not keep the worker alive."""
    whole, [group], ended = full(), groups_of(1), list[int]()
    options = options_of(1, "ngram", 3, trace=True, **MODES["as-on-gpu"])
    worker = RankWorker(group, options, whole.model, (), create_extensions(options))
    worker.end = weakref.finalize(worker, ended.append, 1)
    engine = Engine(options, worker)
    run(engine, [Job([1, 2, 1, 2], SamplingParams(max_tokens=5))])
    assert ended == []
    del engine, worker
    gc.collect()
    assert ended == [1]


def test_smallest_rank_limits_all() -> None:
    whole = full()

    def plan(group: ProcessGroup) -> tuple[int, int]:
        memory = (40, 20)[group.rank] * 16 * whole.config.kv_bytes_per_token(torch.float32) // 2
        options = EngineConfig(spec=make_spec(None), kv_cache_memory=memory, max_num_seqs=4)
        rank = RankWorker(group, options, part_of(whole.config, whole.weights, group))
        return rank.num_blocks, rank.max_model_len

    assert together(2, plan) == [(20, 320)] * 2
