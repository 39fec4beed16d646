"""Every drafter leaves the output unchanged and proposes the expected drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from nanospec import SamplingParams
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.estimates import StepCosts
from nanospec.drafters.medusa import CONTENDERS, Heads, MedusaDrafter, tree_paths
from nanospec.engine.engine import Engine
from nanospec.kernels import FROM_TARGET, GENERATED, launch
from nanospec.kernels.batch import Batch
from nanospec.kernels.layer.linear import make_linear
from nanospec.kernels.sampling import noise
from nanospec.kernels.speculation.verify import Verdict
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from tests.drive import MODES, Job, cycle, cycle_model, make_engine, random_jobs, run, run_and_compare
from tests.kernels.batches import make_batch, proposal_of
from tests.random_weights import random_heads
from tests.tiny import tiny_model

VOCAB = 64
SETUPS: dict[str, dict[str, Any]] = {
    "ngram-tree": {"method": "ngram", "tree_width": 3},
    "draft": {"method": "draft"},
    "medusa": {"method": "medusa"},
    "medusa-tree": {"method": "medusa", "tree_width": 3},
    "ngram+draft": {"method": "ngram+draft"},
    "ngram-tree+draft": {"method": "ngram+draft", "tree_width": 2},
    "ngram+medusa": {"method": "ngram+medusa"},
    "ngram-tree+medusa-tree": {"method": "ngram+medusa", "tree_width": 2},
}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def parts(model: Model) -> dict[str, Any]:
    """A draft model and heads whose drafts are sometimes accepted."""
    return {"draft_model": tiny_model(num_layers=1), "heads": random_heads(model, 3, vocab=50)}


def engine_of(model: Model, parts: dict[str, Any], setup: str, k: Any = 5, **options: Any) -> Any:
    spec = SETUPS[setup]
    needed = {"draft": "draft_model", "medusa": "heads"}
    given = {needed[m]: parts[needed[m]] for m in spec["method"].split("+") if m in needed}
    return make_engine(model, k, spec=spec, **given, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setup", SETUPS)
def test_output_matches_decoding_without_speculation(
    model: Model, parts: dict[str, Any], setup: str, mode: str
) -> None:
    """Greedy and seeded sampling, penalties, logprobs, prefix hits, chunks and preemption."""
    accepted = preempted = 0
    for seed in range(3):
        jobs = random_jobs(random.Random(seed), VOCAB, 7)
        engine = engine_of(
            model, parts, setup, (9, 5, 2)[seed], num_blocks=9, max_num_batched_tokens=32, max_num_seqs=4,
            **MODES[mode],
        )  # fmt: skip
        run_and_compare(engine, model, jobs, (setup, mode, seed))
        accepted += engine.metrics.spec.num_accepted
        preempted += engine.metrics.num_preemptions
    assert min(accepted, preempted) > 0


@pytest.mark.parametrize("setup", SETUPS)
def test_automatic_k_does_not_change_output(model: Model, parts: dict[str, Any], setup: str) -> None:
    jobs = random_jobs(random.Random(2), VOCAB, 7)
    engine = engine_of(model, parts, setup, "auto", max_num_seqs=3)
    run_and_compare(engine, model, jobs, setup)


def plain_jobs(seed: int, count: int, **params: Any) -> list[Job]:
    """Return jobs without penalties and bias, which a draft model ignores, and without stop tokens."""
    rng = random.Random(seed)
    common = rng.choices(range(VOCAB), k=33)
    return [
        Job(
            common[: rng.choice((0, 33))] + rng.choices(range(VOCAB), k=rng.randint(1, 40)),
            SamplingParams(seed=i, max_tokens=rng.randint(20, 45), **params),
        )
        for i in range(count)
    ]


def assert_same_keys(engine: Engine) -> None:
    """Check that a draft model equal to the target has the target's K/V in all blocks it counts as computed.
    Tokens alone would not show it: the output of a tiny model hardly depends on its context."""
    drafter = next(part for part in engine.worker.drafters if isinstance(part, ModelDrafter))
    blocks = sorted(drafter._drafted & engine.scheduler.pool._hash_of.keys())
    assert blocks
    torch.testing.assert_close(drafter.kv[:, :, :, blocks], engine.worker.kv_cache[:, :, :, blocks])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("cap", "temperature"), [(0.0, 0.0), (0.0, 1.0), (0.3, 1.0)], ids=["greedy", "sampled", "capped"]
)
def test_draft_model_equal_to_target_is_always_accepted(cap: float, mode: str, temperature: float) -> None:
    """Also after preemption, prefix hits, chunked prompts and full acceptance: its cache is never stale."""
    model = tiny_model(logit_softcap=cap or None)
    engine = make_engine(
        model, 4, spec=SETUPS["draft"], draft_model=model, num_blocks=11, max_num_seqs=3,
        max_num_batched_tokens=32, **MODES[mode],
    )  # fmt: skip
    for seed in range(2):  # the second run uses the prefix cache
        requests = run(engine, plain_jobs(1, 8, temperature=temperature, top_p=0.9))
        stats = engine.metrics.spec
        for request in requests:
            ends = request.stats.num_drafted - request.stats.num_accepted
            assert ends == 0, (seed, request.id)
        assert_same_keys(engine)
    assert stats.num_accepted / stats.num_drafted == 1
    assert engine.metrics.num_preemptions > 0
    assert engine.metrics.num_cached_tokens > 0
    assert stats.tokens_per_step > 4


def test_draft_model_catches_up_with_other_steps(model: Model) -> None:
    """Its cache falls behind in steps without drafts and in steps with n-gram drafts."""
    engine = make_engine(model, 4, spec=SETUPS["ngram+draft"], min_n=2, draft_model=model, max_num_seqs=3)
    choose, rng = engine.policy.choose, random.Random(0)
    engine.policy.choose = lambda *args: choose(*args) if rng.random() < 0.4 else (4, 0)  # type: ignore
    run_and_compare(engine, model, plain_jobs(2, 9, temperature=0.7))
    by = engine.metrics.spec.by_drafter
    assert by["draft"][1] == by["draft"][2] > 30
    assert by["ngram"][1] > by["ngram"][2]


def test_draft_model_computes_prompt_cached_without_it(model: Model) -> None:
    """Even though it had filled all the second prompt's blocks for an earlier request."""
    engine = make_engine(model, 4, spec=SETUPS["draft"], draft_model=model, num_blocks=8)
    prompts = [random.Random(seed).choices(range(VOCAB), k=40) for seed in (3, 4)]
    run(engine, [Job(list(range(VOCAB)), SamplingParams(temperature=0, max_tokens=60))])
    before = engine.metrics.spec.num_drafted
    plain = SamplingParams(temperature=0, max_tokens=5, num_speculative_tokens=0)
    run(engine, [Job(prompt, plain) for prompt in prompts])
    assert engine.metrics.spec.num_drafted == before > 0
    requests = run(engine, [Job(prompt, SamplingParams(temperature=0, max_tokens=20)) for prompt in prompts])
    assert_same_keys(engine)
    for request in requests:
        assert request.num_cached_tokens > 0
        assert request.stats.num_drafted == request.stats.num_accepted > 0


def test_draft_vocabulary_of_another_padded_size(model: Model) -> None:
    for size in (60, 70):
        draft = tiny_model(vocab_size=size)
        engine = make_engine(model, 3, spec=SETUPS["draft"], draft_model=draft)
        jobs = random_jobs(random.Random(size), 60, 3)
        run_and_compare(engine, model, jobs)
        assert engine.metrics.spec.num_drafted > 0


def test_draft_and_target_caches_share_block_count(model: Model) -> None:
    draft = tiny_model(num_layers=1)
    engine = make_engine(model, 4, spec=SETUPS["draft"], draft_model=draft, num_blocks=20)
    assert engine.scheduler.pool.num_blocks == 20
    [drafter] = engine.worker.drafters
    assert drafter.kv.shape[3] == engine.worker.kv_cache.shape[3] == 20  # type: ignore[attr-defined]
    short = tiny_model(num_layers=1, max_position_embeddings=100)
    with pytest.raises(ValueError, match="draft model's limit of 100"):
        make_engine(model, 4, spec=SETUPS["draft"], draft_model=short, max_model_len=128)
    fitted = make_engine(model, 4, spec=SETUPS["draft"], draft_model=short, max_model_len=None)
    assert fitted.max_model_len == 100


def cycle_heads(model: Model, count: int) -> Heads:
    """Return heads that predict `cycle_model` perfectly."""
    hidden = model.config.hidden_size
    silent = torch.zeros(count, hidden, hidden), torch.zeros(count, 1, hidden)
    own = tuple(make_linear(8 * torch.eye(hidden).roll(2 + i, 0)) for i in range(count))
    return Heads((silent,), own, None)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_perfect_heads_are_always_accepted(mode: str, width: int) -> None:
    known = cycle_model()
    engine = make_engine(
        known, 6, spec={"method": "medusa", "tree_width": width}, heads=cycle_heads(known, 3), **MODES[mode]
    )
    params = SamplingParams(temperature=0, max_tokens=41)
    [request] = run(engine, [Job(cycle(3, 5), params)])
    assert request.output_ids == cycle(8, 41)
    depth = 3 if width == 1 else 2  # of a tree with six nodes
    assert request.stats.num_steps <= 2 + -(-40 // (depth + 1)) + 2
    assert set(request.draft_sources) == {FROM_TARGET, GENERATED}
    assert request.stats.by_drafter.keys() == {"medusa"}


def test_perfect_heads_for_every_row_of_a_batch() -> None:
    """Also for rows after the first: kernels and C++ index drafts by K, not by the number of drafts."""
    known = cycle_model()
    engine = make_engine(known, 6, spec=SETUPS["medusa"], heads=cycle_heads(known, 3), max_num_seqs=3)
    jobs = [Job(cycle(i, 6), SamplingParams(temperature=0, max_tokens=41)) for i in range(3)]
    steps = [request.stats.num_steps for request in run(engine, jobs)]
    assert max(steps) <= min(steps) + 2 <= 15


@pytest.mark.parametrize("width", [1, 3])
def test_heads_use_target_noise(model: Model, width: int) -> None:
    """Head i drafts the token with the largest score - T log E among its likeliest, using the noise of the
    draft's position; in a tree also the next largest."""
    drafter, table = medusa_of(model, width)
    heads, rows = drafter.heads, torch.arange(3, dtype=torch.int32)
    assert heads.token_map is not None
    drafter.hidden.normal_(generator=torch.Generator().manual_seed(1))
    drafter.ready.fill_(True)
    table.seed.fill_(-(2**40) - 3)
    table.temperature[:] = torch.tensor([0.0, 1.0, 2.5])
    table.max_len[2] = 12  # at most two drafts fit
    assert drafter.propose(table, rows, 3).num_drafts.tolist() == [3, 3, 2]
    result, logits = drafter._candidates(table, rows), heads.logits(drafter.hidden[:3]).float()
    for b, i in product(range(3), range(3)):
        few = logits[b, i] < logits[b, i].topk(CONTENDERS).values[-1]
        luck = noise.naive(-(2**40) - 3, 9 + i, heads.token_map.int())
        drawn = (logits[b, i] - table.temperature[b] * luck).masked_fill(few, -1e9).topk(width).indices
        assert result[b, i].tolist() == heads.token_map[drawn].tolist()


def medusa_of(model: Model, width: int) -> tuple[MedusaDrafter, Table]:
    """Return a drafter of three heads that makes trees, and a table of rows with a limit of 8 drafts."""
    spec = {"method": "medusa", "tree_width": width}
    heads = random_heads(model, 3, vocab=20)
    engine = make_engine(model, 8, spec=spec, heads=heads, max_num_seqs=3)
    drafter, table = engine.worker.drafters[0], engine.worker.table
    assert isinstance(drafter, MedusaDrafter)
    table.num_tokens[:], table.max_len[:], table.max_k[:], table.tree_width[:] = 9, 60, 8, width
    return drafter, table


def test_heads_use_hidden_state_of_last_accepted_token(model: Model) -> None:
    """At the end of the accepted path; a released row has no state."""
    drafter, table = medusa_of(model, 3)
    rows, hidden = torch.arange(3, dtype=torch.int32), torch.randn(12, model.config.hidden_size)
    batch = make_batch([6, 6], parents=[0, 0, 1, 0, 3, 3] + [0] * 6, rows=torch.tensor([2, -1]).int())
    path = torch.tensor([[0, 3, 5, 0, 0, 0], [0] * 6], dtype=torch.int32)
    verdict = Verdict(path, torch.tensor([3, 0], dtype=torch.int32), path)
    drafter.learn(table, proposal_of(batch), batch, verdict, hidden)
    assert torch.equal(drafter.hidden[:3], torch.stack([0 * hidden[0], 0 * hidden[0], hidden[5]]))
    assert drafter.propose(table, rows, 8).num_drafts.tolist() == [0, 0, 8]
    drafter.release(2)
    assert drafter.propose(table, rows, 8).num_drafts.tolist() == [0, 0, 0]


def test_tree_width_per_request(model: Model) -> None:
    drafter, table = medusa_of(model, 3)
    table.tree_width[:] = torch.tensor([1, 2, 9])
    drafter.ready.fill_(True)
    result = drafter.propose(table, torch.arange(3, dtype=torch.int32), 8)
    assert result.parents is not None
    assert result.num_drafts.tolist() == [3, 8, 8]
    assert result.parents[0, :3].tolist() == [0, 1, 2]
    assert [result.parents[b].tolist().count(0) for b in (1, 2)] == [2, 3]


def test_tree_accepts_continuation_that_chain_misses(model: Model) -> None:
    """The latest occurrence has another continuation than the earlier one."""
    known = cycle_model()
    prompt = [*cycle(0, 12), 30, 2, 3, 30, 2, 3]  # 3 -> 4 earlier, 3 -> 30 later
    steps = {}
    for width in (1, 2):
        engine = make_engine(known, 6, spec={"tree_width": width})
        [request] = run(engine, [Job(prompt, SamplingParams(temperature=0, max_tokens=9))])
        assert request.output_ids == cycle(4, 9)
        steps[width] = request.stats.num_steps
        if width == 2:
            assert request.draft_sources[:3] == [4, 5, 6]
    assert steps[2] < steps[1]


def test_per_request_speculation_limits(model: Model, parts: dict[str, Any]) -> None:
    """Tree widths, K and no speculation, in one batch."""
    engine = engine_of(model, parts, "medusa-tree", 8)
    job = plain_jobs(4, 1, temperature=0)[0]
    widths: list[Any] = [{"tree_width": 1}, {"tree_width": 8}, {"num_speculative_tokens": 2}]
    widths += [{"num_speculative_tokens": 0}]
    requests = run(engine, [Job(job.prompt, replace(job.params, **limits)) for limits in widths])
    assert len({tuple(r.output_ids) for r in requests}) == 1
    drafted = [len(r.stats.drafted_by_position) for r in requests]
    assert drafted == [3, 8, 2, 0]


def test_tree_paths_order() -> None:
    for heads, width, k in ((4, 1, 8), (4, 3, 20), (2, 8, 63), (5, 4, 63)):
        paths = tree_paths(heads, width, k)
        assert len(set(paths)) == len(paths) == min(k, sum(width**d for d in range(1, heads + 1)))
        for i, path in enumerate(paths):
            assert len(path) == 1 or path[:-1] in paths[:i]
            assert max(path) < width
    assert tree_paths(4, 1, 8) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert tree_paths(3, 2, 3) == [(0,), (0, 0), (1,)]


@pytest.mark.parametrize("method", ["draft", "medusa", "ngram+draft"])
def test_method_without_its_weights_is_rejected(model: Model, method: str) -> None:
    with pytest.raises(ValueError, match="needs"):
        make_engine(model, 3, spec={"method": method})


def draft_prefills(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the size of each chunk the draft model computes to catch up."""
    sizes: list[int] = []
    drafter = engine.worker.drafters[-1]
    write_kv = drafter.model.write_kv

    def spy(batch: Batch, kv_cache: torch.Tensor) -> None:
        if kv_cache is drafter.kv:  # the target may be the same model
            sizes.append(batch.num_tokens)
        write_kv(batch, kv_cache)

    monkeypatch.setattr(drafter.model, "write_kv", spy)
    return sizes


def test_draft_model_is_not_run_while_lookup_matches(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cycle_model(), 5, spec=SETUPS["ngram+draft"], draft_model=cycle_model())
    sizes = draft_prefills(engine, monkeypatch)
    [request] = run(engine, [Job(cycle(0, 40), SamplingParams(temperature=0, max_tokens=60))])
    assert request.stats.by_drafter.keys() == {"ngram"}
    assert not sizes  # not even the prompt


def test_draft_model_that_does_not_pay_is_rarely_run(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(
        model, "auto", spec=SETUPS["draft"], draft_model=tiny_model(seed=9), max_model_len=400
    )
    engine.policy.costs = StepCosts(packed={1: 10.0, 64: 40.0}, propose=lambda rows, passes: 5.0 * passes)
    sizes = draft_prefills(engine, monkeypatch)
    [request] = run(engine, [Job([1, 2, 3], SamplingParams(temperature=1, seed=1, max_tokens=300))])
    assert len(sizes) <= 25
    assert request.stats.num_drafted <= 40


@pytest.mark.parametrize("lag", [False, True])
def test_fully_cached_prompt_drafts_in_first_step(model: Model, lag: bool) -> None:
    engine = make_engine(
        model, 4, spec=SETUPS["draft"], draft_model=model, async_scheduling=lag, enforce_eager=not lag
    )
    job = Job(list(range(33)), SamplingParams(temperature=0, max_tokens=20))
    for _ in range(2):
        [request] = run(engine, [job])
        assert request.stats.num_steps == 4
        assert request.stats.num_drafted == request.stats.num_accepted == 16
    assert request.num_cached_tokens == 32


@pytest.mark.parametrize("mode", MODES)
def test_draft_model_catches_up_in_chunks(model: Model, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_num_batched_tokens": 32, "max_model_len": 256, **MODES[mode]}
    engine = make_engine(model, 4, spec=SETUPS["draft"], draft_model=model, **options)
    rng = random.Random(0)
    prompts = [rng.choices(range(VOCAB), k=150) for _ in range(3)]
    plain, spec = (SamplingParams(temperature=0, max_tokens=40, num_speculative_tokens=k) for k in (0, None))
    run(engine, [Job(prompt, plain) for prompt in prompts])
    sizes = draft_prefills(engine, monkeypatch)
    requests = run(engine, [Job(prompt, spec) for prompt in prompts])
    assert max(sizes) <= 32
    assert sum(sizes) >= 3 * 140
    for request in requests:
        assert request.stats.num_drafted == request.stats.num_accepted > 0


def test_tree_width_is_limited_by_head_vocabulary(model: Model) -> None:
    with pytest.raises(ValueError, match="exceeds the 4 tokens"):
        make_engine(model, 3, spec={"method": "medusa", "tree_width": 6}, heads=random_heads(model, 2, 4))
    few = tiny_model(vocab_size=5)
    with pytest.raises(ValueError, match="tree_width=6 exceeds the 5 tokens"):
        make_engine(few, 3, spec={"method": "medusa", "tree_width": 6}, heads=random_heads(few, 2))


@pytest.mark.parametrize("backend", ["naive", "auto"])
@pytest.mark.parametrize("setup", ["ngram-tree", "medusa-tree"])
def test_trees_larger_than_sliding_window(setup: str, backend: Any) -> None:
    """The window holds the last positions of a node's path, wherever those are stored."""
    windowed = tiny_model(windows=(None, 4))
    parts = {"heads": random_heads(windowed, 3, vocab=50)}
    jobs = random_jobs(random.Random(4), VOCAB, 5)
    with launch.forced(backend):
        engine = engine_of(windowed, parts, setup, 12, max_num_seqs=4)
        run_and_compare(engine, windowed, jobs, setup)
    assert engine.metrics.spec.num_accepted > 0


def test_draft_model_catches_up_with_triton_without_capture() -> None:
    with launch.forced("triton"):
        target = tiny_model(num_layers=1)
        engine = make_engine(
            target, 2, spec=SETUPS["draft"], draft_model=target, enforce_eager=True, max_num_seqs=1,
            max_model_len=48,
        )  # fmt: skip
        choose, steps = engine.policy.choose, iter([(2, 0)] * 5)
        engine.policy.choose = lambda *args: next(steps, choose(*args))  # type: ignore
        [request] = run(engine, [Job([1, 2, 3], SamplingParams(temperature=0, max_tokens=12))])
    assert request.stats.num_drafted == request.stats.num_accepted > 0


def test_draft_model_does_not_recompute_with_lag(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With lag the host knows less than the device; where it may wait, it reads the device's state."""
    engine = make_engine(
        model, 4, spec=SETUPS["draft"], draft_model=model, async_scheduling=True, enforce_eager=True
    )
    sizes = draft_prefills(engine, monkeypatch)
    run(engine, [Job(list(range(20)), SamplingParams(temperature=0, max_tokens=30))])
    assert sizes == [19]
