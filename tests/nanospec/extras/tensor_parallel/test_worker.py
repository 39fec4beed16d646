"""A model split among ranks generates the output of the whole model, with every drafter."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from nanospec.config import EngineConfig, SamplingParams
from nanospec.drafters import Drafter, SimpleDrafter, Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.medusa import MedusaDrafter
from nanospec.drafters.methods import NgramDrafter
from nanospec.engine.engine import Engine
from nanospec.extras import create_extensions
from nanospec.extras.tensor_parallel import job as ranks
from nanospec.extras.tensor_parallel.group import Group
from nanospec.extras.tensor_parallel.shard import Shard
from nanospec.extras.tensor_parallel.worker import Rank
from nanospec.models.config import ModelConfig
from nanospec.models.decoder import Model
from tests.drive import (
    MODES,
    Job,
    assert_idle,
    assert_same,
    drafters_of,
    make_spec,
    outcome,
    random_jobs,
    run,
    run_alone,
)
from tests.random_weights import random_heads
from tests.ranks import MakeDrafter, Weights, groups_of, part_of, split_engine, together, weights_of
from tests.tiny import tiny_config, tiny_model

VOCAB = 64
# (ranks, query heads, KV heads): divided; one KV head on two ranks; padded with zeros.
TWO, FOUR, PADDED = (2, 4, 2), (4, 4, 2), (2, 6, 3)


class Full(NamedTuple):
    """A whole model, its config and its weights."""

    config: ModelConfig
    weights: Weights
    model: Model


@cache
def full(heads: int = 4, kv_heads: int = 2, **more: Any) -> Full:
    config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, **more)
    weights = weights_of(config)
    return Full(config, weights, Model(config, torch.float32, "cpu", weights.__getitem__))


def make_drafters(options: EngineConfig) -> MakeDrafter:
    """Return a function that creates each rank's drafters: a draft model or Medusa heads."""
    spec = options.spec

    def make(model: Model, group: Group) -> Sequence[Drafter]:
        ready = dict[str, Drafter]()
        if "draft" in spec.methods:
            ready["draft"] = ModelDrafter(spec, tiny_model(num_layers=1), VOCAB)
        if "medusa" in spec.methods:
            ready["medusa"] = MedusaDrafter(spec, random_heads(model, 3, vocab=50), model)
        return drafters_of(spec, Target(model), ready)

    return make


def options_of(
    size: int, of: Full, setup: str, k: Any, num_blocks: int | None = None, **more: Any
) -> EngineConfig:
    """Return options for `size` ranks with `num_blocks` blocks on each."""
    method, _, width = setup.partition(" ")
    spec = make_spec(None) if setup == "none" else make_spec(k, method=method, tree_width=int(width or 1))
    if num_blocks is not None:
        local = Shard(of.config, groups_of(size)[0]).config
        per_token = local.kv_bytes_per_token(torch.float32)
        if "draft" in spec.methods:
            per_token += tiny_config(num_layers=1).kv_bytes_per_token(torch.float32)
        more["kv_cache_memory"] = 16 * num_blocks * per_token
    options = {"max_num_seqs": 4, "max_model_len": 128, "tensor_parallel_size": size, **more}
    return EngineConfig(spec=spec, **options)


def run_split(options: EngineConfig, of: Full, jobs: list[Job], drafter: MakeDrafter | None = None) -> int:
    """Check that ranks generate the output of one device; return the number of accepted drafts."""
    size = options.tensor_parallel_size
    with split_engine(size, of.config, of.weights, options, drafter) as split:
        result = [outcome(request) for request in run(split.engine, jobs)]
    split.assert_equal()
    for got, wanted in zip(result, run_alone(of.model, jobs), strict=True):
        assert_same(got, wanted)
    return split.engine.metrics.spec.num_accepted


@pytest.mark.parametrize(
    ("shape", "setup", "mode"),
    [
        (TWO, "none", "as-on-gpu"),
        (TWO, "ngram", "plain"),
        (TWO, "draft", "as-on-gpu"),
        (FOUR, "medusa 3", "plain"),
        (PADDED, "ngram 3", "as-on-gpu"),
        (PADDED, "ngram+draft 2", "plain"),
    ],
    ids=str,
)
def test_output_matches_one_device(shape: tuple[int, int, int], setup: str, mode: str) -> None:
    """Greedy and seeded sampling, filters, penalties, logprobs, prefix hits, chunks, preemption."""
    size, *heads = shape
    of, jobs = full(*heads), random_jobs(random.Random(f"{shape}{setup}"), VOCAB, 4, max_tokens=25)
    options = options_of(size, of, setup, 5, 12, max_num_batched_tokens=32, **MODES[mode])
    accepted = run_split(options, of, jobs, make_drafters(options))
    assert setup == "none" or accepted > 0


class Noise(SimpleDrafter):
    """Drafts at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def draft(self, tokens: list[int], k: int) -> list[int]:
        after = [i for i, token in enumerate(tokens) if i and tokens[i - 1] == tokens[-1]]
        first = self.random.choice(after or [0])
        return tokens[first : first + k]


@pytest.mark.parametrize("k", [4, "auto"])
def test_ranks_agree_on_random_drafts_and_timed_k(k: Any) -> None:
    """Each rank alone would choose other drafts, and other numbers of drafts."""
    of, jobs = full(), random_jobs(random.Random(1), VOCAB, 4, max_tokens=25)
    options = options_of(2, of, "ngram", k, trace=True)

    def make(model: Model, group: Group) -> Sequence[Drafter]:
        return NgramDrafter(options.spec), Noise(group.rank)

    assert run_split(options, of, jobs, make) > 0 or k == "auto"


def test_vocabulary_padding_is_never_sampled() -> None:
    """The logits of padding are 0, as likely as any token here."""
    of = full(vocab_size=33)
    assert Shard(of.config, groups_of(4)[0]).num_tokens * 4 > 33
    hot = [SamplingParams(temperature=50.0, seed=seed, max_tokens=12) for seed in range(3)]
    run_split(options_of(4, of, "none", None), of, [Job([1, 2, 3], params) for params in hot])


def test_aborts_and_nan_logits_do_not_affect_other_requests() -> None:
    of, rng = full(), random.Random(3)
    broken = {name: weight.clone() for name, weight in of.weights.items()}
    broken["model.embed_tokens.weight"][7] = float("nan")
    others = [token for token in range(VOCAB) if token != 7]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=20, logit_bias={7: -100})
        for i in range(5)
    ]
    jobs = [Job(rng.choices(others, k=20) * 2, sampling) for sampling in params]
    wanted = run_alone(of.model, jobs)
    options = options_of(2, of, "ngram", 4, **MODES["as-on-gpu"])
    with split_engine(2, of.config, broken, options) as split:
        engine = split.engine
        bad = engine.add([1, 7], params[0])
        requests = [engine.add(job.prompt, job.params) for job in jobs]
        for step in range(200):
            if step in (3, 7):
                engine.abort(requests[step // 3])
            if not engine.has_work:
                break
            engine.step()
        assert_idle(engine)
        assert all(engine.worker.table.finished.tolist())
        assert bad.finish_reason == "abort"
        assert "NaN" in str(bad.error)
        assert [r.finish_reason for r in requests].count("abort") == 2
        for request, expected in zip(requests, wanted, strict=True):
            assert request.output_ids == expected.token_ids[: len(request.output_ids)]
        engine.add(*jobs[0])
        engine.step()
        engine.abort_all()  # steps in flight are never fetched
        again = run(engine, jobs[:2])
    for request, expected in zip(again, wanted, strict=False):
        assert outcome(request).token_ids == expected.token_ids
    split.assert_equal()


def test_all_steps_are_captured_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All captures are released before the group is closed, since NCCL waits for them."""
    of, left = full(), list[int]()
    options = options_of(2, of, "ngram", 3, enforce_eager=False)
    with split_engine(2, of.config, of.weights, options) as split:
        graphs, group = split.engine.worker.graphs, split.groups[0]
        assert graphs is not None
        captures = graphs.captures
        monkeypatch.setattr(graphs, "capture", lambda bucket: pytest.fail(f"{bucket} is captured late"))
        for params in ({"temperature": 0}, {"top_p": 0.5, "seed": 7}, {"temperature": 0, "logprobs": 1}):
            job = Job([1, 2, 3, 1, 2, 3], SamplingParams(max_tokens=9, **params))
            assert_same(outcome(run(split.engine, [job])[0]), run_alone(of.model, [job])[0])
        assert len(captures) == len(graphs.buckets())
        close = group.close

        def spy() -> None:
            left.append(len(captures))
            close()

        monkeypatch.setattr(group, "close", spy)
    assert left == [0]


def test_dropped_engine_ends_its_job() -> None:
    """Objects needed to end the job, such as captures, must not keep the worker alive."""
    of, [group], job = full(), groups_of(1), ranks.Job([], HashStore(), 30)
    options, job.group = options_of(1, of, "ngram", 3, trace=True, **MODES["as-on-gpu"]), group
    engine = Engine(options, Rank(group, job, options, of.model, (), create_extensions(options)))
    run(engine, [Job([1, 2, 1, 2], SamplingParams(max_tokens=5))])
    assert job.failure is None
    del engine
    gc.collect()
    assert job.failure == ranks.CLOSED


def test_memory_plan_matches_allocations() -> None:
    """Weights count as stored in memory; every rank has the whole draft model."""
    of = full(heads=6, kv_heads=3)
    options = options_of(2, of, "draft", 3)
    with split_engine(2, of.config, of.weights, options, make_drafters(options)) as split:
        worker = split.engine.worker
        first, second = worker.memory
        assert first == second
        draft: Any = worker.drafters[0]
        assert first["kv_cache"] == worker.kv_cache.nbytes
        assert first["draft_weights"] == draft.model.weight_bytes
        assert first["draft_kv_cache"] == draft.kv.nbytes
        local = Shard(of.config, split.groups[0])
        shapes = {**local.config.parameter_shapes()}
        shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (local.num_tokens, 32))
        assert first["weights"] == 4 * sum(math.prod(shape) for shape in shapes.values())
        assert first["rows"] == sum(t.nbytes for t in worker.table if isinstance(t, Tensor))


def test_smallest_rank_limits_all() -> None:
    of, given = full(), {0: 40, 1: 20}

    def plan(group: Group) -> tuple[int, int]:
        local = Shard(of.config, group).config.kv_bytes_per_token(torch.float32)
        memory = 16 * local * given[group.rank]
        options = EngineConfig(spec=make_spec(None), kv_cache_memory=memory, max_num_seqs=4)
        worker = Rank(group, None, options, part_of(of.config, of.weights, group))
        return worker.num_blocks, worker.max_model_len

    assert together(2, plan) == [(20, 320)] * 2
