"""Every drafter leaves the output unchanged and proposes the expected drafts."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle as cycle_of
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from nanospec import SamplingParams, SpecConfig
from nanospec.device.graphs import StepGraphs
from nanospec.device.step import Step
from nanospec.drafters import Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.eagle3 import Eagle3Drafter
from nanospec.drafters.estimates import StepCosts
from nanospec.drafters.policy import Choice
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.kernels import FROM_TARGET, GENERATED
from nanospec.models.decoder import Model
from tests.drive import (
    MODES,
    Job,
    K,
    cycle,
    cycle_model,
    greedy,
    make_engine,
    random_jobs,
    run,
    run_and_compare,
)
from tests.random_weights import hidden_state_drafter, write_drafter
from tests.tiny import tiny_model

VOCAB = 64
FEW = {1: 200.0, 2: 200.0, 3: 200.0}
SETUPS: dict[str, dict[str, Any]] = {
    "ngram-tree": {"method": "ngram", "tree_width": 3}, "draft": {"method": "draft"},
    "dflash": {"method": "dflash"}, "eagle3": {"method": "eagle3"}, "ngram+draft": {"method": "ngram+draft"},
    "ngram-tree+draft": {"method": "ngram+draft", "tree_width": 2},
    "ngram-tree+eagle3": {"method": "ngram+eagle3", "tree_width": 2, "acceptance": "typical"},
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace measured times: a step takes 1 ms, and 0.01 ms per token; a drafter takes no time."""

    def costs(step: Step, max_k: int, graphs: StepGraphs | None, *_: Any) -> StepCosts:
        if graphs is None:
            return StepCosts({64: {1: 1.01, 101: 2.01}})
        tokens = {B: [B * (k + 1) for k in graphs.ks_for(B)] for B in graphs.batch_sizes}
        return StepCosts({B: {n: 1 + 0.01 * n for n in ns} for B, ns in tokens.items()}, captured=True)

    monkeypatch.setattr("nanospec.device.worker.step_costs", costs)


@pytest.mark.slow
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(("setup", "k"), [*zip(SETUPS, cycle_of((9, "auto")))])
def test_output_matches_decoding_without_speculation(model: Model, setup: str, k: K) -> None:
    """Test penalties, logprobs, prefix hits, chunks, preemption, and a rule that greedy rows ignore."""
    accepted = preempted = 0
    for seed, (most, mode) in enumerate(((k, "plain"), (5, "as-on-gpu"))):
        options: dict[str, Any] = {"num_blocks": 8, "max_num_batched_tokens": 32, "max_num_seqs": 3}
        if "draft" in setup:
            options["draft_model"] = tiny_model(num_layers=1)
        engine = make_engine(model, most, spec=SETUPS[setup], **options, **MODES[mode])
        jobs = [
            Job(prompt, replace(params, acceptance="exact" if params.temperature else None))
            for prompt, params in random_jobs(random.Random(seed), VOCAB, 5)
        ]
        for job, request in zip(jobs, run_and_compare(engine, model, jobs, (setup, mode)), strict=True):
            assert request.stats.acceptance == (job.params.acceptance or engine.config.spec.acceptance)
        accepted += engine.metrics.spec.num_accepted
        preempted += engine.metrics.num_preemptions
    assert min(accepted, preempted) > 0


def plain_jobs(seed: int, count: int, *temperatures: float) -> list[Job]:
    """Return jobs without penalties and bias, which a draft model ignores, and without stop tokens."""
    rng = random.Random(seed)
    common = rng.choices(range(VOCAB), k=33)
    return [
        Job(
            common[: rng.choice((0, 33))] + rng.choices(range(VOCAB), k=rng.randint(1, 40)),
            SamplingParams(seed=i, max_tokens=rng.randint(20, 45), top_p=0.9, temperature=temperature),
        )
        for i, temperature in zip(range(count), cycle_of(temperatures))
    ]


def assert_same_keys(engine: Engine) -> None:
    """Check that a draft model equal to the target has the target's K/V in all blocks it counts as computed.
    Tokens are not enough, as the output of a tiny model hardly depends on its context."""
    drafter = next(part for part in engine.worker.drafters if isinstance(part, ModelDrafter))
    blocks = sorted(drafter._drafted & engine.scheduler.pool._hash_of.keys())
    assert blocks
    torch.testing.assert_close(drafter.kv[:, :, :, blocks], engine.worker.kv_cache[:, :, :, blocks])


def assert_all_accepted(requests: Any) -> None:
    assert all(request.stats.num_drafted == request.stats.num_accepted > 0 for request in requests)


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "mode"), [(None, "as-on-gpu"), (0.3, "plain")], ids=["as-on-gpu", "softcap"])
def test_draft_model_equal_to_target_is_always_accepted(cap: float | None, mode: str) -> None:
    """The draft model's cache stays valid after preemption, prefix hits, chunks and full acceptance."""
    model = tiny_model(logit_softcap=cap)
    options: dict[str, Any] = {"num_blocks": 11, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    engine = make_engine(model, 4, spec=SETUPS["draft"], draft_model=model, **options, **MODES[mode])
    for _ in range(2):  # the second run uses the prefix cache
        assert_all_accepted(run(engine, plain_jobs(1, 8, 0.0, 1.0)))
        assert_same_keys(engine)
    assert engine.metrics.num_preemptions > 0
    assert engine.metrics.num_cached_tokens > 0
    assert engine.metrics.spec.tokens_per_step > 4


def test_acceptance_rule_applies_to_drafts(model: Model) -> None:
    """Lookup in text of few tokens drafts often; tokens of a flat distribution are typical."""
    accepted = []
    for rule in ("exact", "typical"):
        job = Job([1, 2, 3, 1, 2] * 4, SamplingParams(temperature=9, seed=1, max_tokens=60, logit_bias=FEW))
        [request] = run(make_engine(model, 4, spec={"acceptance": rule}), [job])
        accepted.append(request.stats.num_accepted)
    assert 2 * accepted[0] < accepted[1]


def test_draft_model_catches_up_with_other_steps(model: Model) -> None:
    """The draft model's cache falls behind in steps without drafts and in steps with n-gram drafts."""
    engine = make_engine(model, 4, spec=SETUPS["ngram+draft"], min_n=2, draft_model=model, max_num_seqs=3)
    choose, rng = engine.policy.choose, random.Random(0)
    engine.policy.choose = lambda *args: choose(*args) if rng.random() < 0.4 else Choice(4, 0)  # type: ignore
    run_and_compare(engine, model, plain_jobs(2, 9, 0.7))
    by = engine.metrics.spec.by_drafter
    assert by["draft"][1] == by["draft"][2] > 30
    assert by["ngram"][1] > by["ngram"][2]


@pytest.mark.parametrize("size", [60, 70])
def test_draft_vocabulary_of_another_padded_size(model: Model, size: int) -> None:
    engine = make_engine(model, 3, spec=SETUPS["draft"], draft_model=tiny_model(vocab_size=size))
    run_and_compare(engine, model, plain_jobs(size, 2, 0.0, 1.0))
    assert engine.metrics.spec.num_drafted > 0


def draft_prefills(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Return a function that returns the size of each chunk the draft model computes to catch up."""
    drafter = engine.worker.drafters[-1]
    spy = Mock(wraps=drafter.model.write_kv)
    monkeypatch.setattr(drafter.model, "write_kv", spy)  # the target may be the same model
    return lambda: [batch.num_tokens for (batch, kv, *_), _ in spy.call_args_list if kv is drafter.kv]


@pytest.mark.parametrize("mode", MODES)
def test_draft_model_computes_prompts_cached_without_it(model: Model, mode: str, monkeypatch: Any) -> None:
    """The draft model computes prompts in chunks, also in blocks it filled for an earlier request."""
    options = {"num_blocks": 8, "max_num_batched_tokens": 16, **MODES[mode]}
    engine = make_engine(model, 4, spec=SETUPS["draft"], draft_model=model, **options)
    prompts = [random.Random(seed).choices(range(VOCAB), k=40) for seed in (3, 4)]
    run(engine, [Job(list(range(VOCAB)), greedy(60))])
    before = engine.metrics.spec.num_drafted
    run(engine, [Job(prompt, greedy(5, num_speculative_tokens=0)) for prompt in prompts])
    assert engine.metrics.spec.num_drafted == before > 0
    chunks = draft_prefills(engine, monkeypatch)
    requests = run(engine, [Job(prompt, greedy(20)) for prompt in prompts])
    assert_same_keys(engine)
    assert_all_accepted(requests)
    assert all(request.num_cached_tokens > 0 for request in requests)
    assert max(chunks()) <= 16
    assert sum(chunks()) >= 2 * 32


def test_draft_model_computes_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model computes a prompt once, also with async_scheduling, or never if lookup matches."""
    options: dict[str, Any] = {"async_scheduling": True, "enforce_eager": True}
    model = cycle_model()
    for method, prompt, computed in (("draft", cycle(0, 20), [19]), ("ngram+draft", cycle(0, 40), [])):
        engine = make_engine(model, 5, spec=SETUPS[method], draft_model=model, **options)
        chunks = draft_prefills(engine, monkeypatch)
        [request] = run(engine, [Job(prompt, greedy(60))])
        assert chunks() == computed
        assert [*request.stats.by_drafter] == [method.split("+")[0]]


def perfect_drafter(folder: Path, model: Model) -> Path:
    """Write an EAGLE-3 drafter that predicts `cycle_model` perfectly: its MLP turns the one-hot vector of a
    token into that of the next."""
    V, large = model.config.vocab_size, torch.tensor(model.config.vocab_size**0.5)  # after the norm
    stored = load_file(write_drafter(folder, "eagle3", model.config, reads=[1]) / "model.safetensors")
    weights = {name: torch.full_like(tensor, "norm" in name) for name, tensor in stored.items()}
    weights["fc.weight"] = torch.eye(V)
    for part in ("gate", "up"):
        weights[f"midlayer.mlp.{part}_proj.weight"][:V] = torch.eye(V)
    step = torch.eye(V).roll(1, 0) - torch.eye(V)
    weights["midlayer.mlp.down_proj.weight"][:, :V] = step / (F.silu(large) * large)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_perfect_drafts_are_always_accepted(mode: str, tmp_path: Path) -> None:
    """Test several rows: kernels and C++ index drafts by K, not by the number of drafts."""
    known = cycle_model()
    spec = {"method": "eagle3", "draft_model": str(perfect_drafter(tmp_path, known))}
    engine = make_engine(known, 6, spec=spec, max_num_seqs=3, **MODES[mode])
    for i, request in enumerate(run(engine, [Job(cycle(i, 6), greedy(41)) for i in range(3)])):
        assert request.output_ids == cycle(i + 6, 41)
        assert (request.stats.num_steps, request.stats.num_accepted) == (6, 35)
        assert set(request.draft_sources) == {FROM_TARGET, GENERATED}
        assert request.stats.by_drafter.keys() == {"eagle3"}


def test_missing_and_unsuitable_weights_are_rejected(model: Model) -> None:
    short = tiny_model(num_layers=1, max_position_embeddings=100)
    with pytest.raises(ValueError, match="draft model's limit of 100"):
        make_engine(model, 4, spec=SETUPS["draft"], draft_model=short, max_model_len=128)
    fitted = make_engine(model, 4, spec=SETUPS["draft"], draft_model=short, max_model_len=None)
    assert fitted.max_model_len == 100
    with pytest.raises(ValueError, match="needs a draft model"):
        make_engine(model, 3, spec={"method": "ngram+draft"})
    with pytest.raises(ValueError, match="method='eagle3' needs a drafter; set draft_model"):
        Eagle3Drafter.load(SpecConfig("eagle3"), Target(model))
    with pytest.raises(ValueError, match="dflash has runs_model=True, so it must be the last drafter"):
        make_engine(model, 3, drafter=[hidden_state_drafter("dflash", model), "ngram"])


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("eager", [True, False], ids=["packed", "captured"])
def test_automatic_k_speculates_without_changing_output(model: Model, eager: bool) -> None:
    jobs = [
        Job([3, 1, 3, 1], SamplingParams(temperature=0, max_tokens=80, logit_bias={7: 60.0})),
        Job([2, 9, 4], SamplingParams(temperature=1.0, seed=2, max_tokens=60)),
    ]
    engine = make_engine(model, "auto", max_num_seqs=2, enforce_eager=eager)
    requests = run_and_compare(engine, model, jobs)
    assert requests[0].stats.tokens_per_step > 2
    report = json.loads(json.dumps(SharedEngine(engine).report()))
    assert report["step_ms_by_batch_and_tokens"].keys() == ({"64"} if eager else {"1", "2"})
