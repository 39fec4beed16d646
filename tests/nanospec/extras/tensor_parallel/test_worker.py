"""A model split among ranks generates the output of the whole model, with every drafter."""

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import HashStore

from nanospec.config import EngineConfig, SamplingParams
from nanospec.device.worker import Worker
from nanospec.drafters import Drafter, Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.methods import NgramDrafter
from nanospec.engine.engine import Engine
from nanospec.extras import create_extensions
from nanospec.extras.tensor_parallel import job as ranks
from nanospec.extras.tensor_parallel import worker
from nanospec.extras.tensor_parallel.group import Group
from nanospec.extras.tensor_parallel.worker import Rank, for_followers
from nanospec.kernels.launch import GPUS
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

    def make(model: Model, group: Group) -> Sequence[Drafter]:
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

    def make(model: Model, group: Group) -> Sequence[Drafter]:
        noise = drive.random_drafter(VOCAB, group.rank)
        noise.reads_on_host = True
        return NgramDrafter(options.spec), noise

    metrics = run_split(options, full(), random_jobs(random.Random(37), VOCAB, 4, max_tokens=25), make)
    assert metrics.spec.num_accepted > 0 or k == "auto"
    assert metrics.num_preemptions > 0


def test_followers_get_substitutes_of_host_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ModelDrafter(make_spec(2), tiny_model(), VOCAB)
    monkeypatch.setattr(ModelDrafter, "reads_on_host", True)
    substitute, method = for_followers([drafter, "ngram"])
    assert method == "ngram"
    for name in ("name", "max_drafts", "runs_model", "makes_trees", "memory", "reads_on_host"):
        assert getattr(substitute, name) == getattr(drafter, name)


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


def test_memory_and_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """All captures are made at the start, and released before the group is closed: NCCL waits for them."""
    whole, left = full(heads=6, kv_heads=3), list[int]()
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
        captures = graphs.captures
        assert len(captures) == len(graphs.buckets())
        monkeypatch.setattr(split.groups[0], "close", lambda: left.append(len(captures)))
    assert left == [0]


def test_dropped_engine_ends_its_job() -> None:
    """Objects needed to end the job, such as captures, must not keep the worker alive."""
    whole, [group], job = full(), groups_of(1), ranks.Job([], HashStore(), 30)
    options, job.group = options_of(1, "ngram", 3, trace=True, **MODES["as-on-gpu"]), group
    engine = Engine(options, Rank(group, job, options, whole.model, (), create_extensions(options)))
    run(engine, [Job([1, 2, 1, 2], SamplingParams(max_tokens=5))])
    assert job.failure is None
    del engine
    gc.collect()
    assert job.failure == ranks.CLOSED


def test_smallest_rank_limits_all_and_gpus_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = full()

    def plan(group: Group) -> tuple[int, int]:
        memory = (40, 20)[group.rank] * 16 * whole.config.kv_bytes_per_token(torch.float32) // 2
        options = EngineConfig(spec=make_spec(None), kv_cache_memory=memory, max_num_seqs=4)
        rank = Rank(group, None, options, part_of(whole.config, whole.weights, group))
        return rank.num_blocks, rank.max_model_len

    assert together(2, plan) == [(20, 320)] * 2
    gpus = iter([GPUS["sm_86"], GPUS["sm_86"]._replace(multiprocessors=80)])
    monkeypatch.setattr(worker, "gpu_of", lambda weight: next(gpus))
    with pytest.raises(ValueError, match="have different GPUs"):
        together(2, plan)
