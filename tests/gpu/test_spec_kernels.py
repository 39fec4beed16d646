"""The kernels of speculation on a GPU, in bf16, against `naive` on a CPU, and inside a CUDA graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling import accept, logprobs, sample
from nanospec.kernels.sampling.sample import Params
from nanospec.kernels.speculation import commit, ngram, ngram_tree, verify
from nanospec.kernels.speculation.proposal import Proposal
from tests.kernels.batches import S, make_params, make_rows, random_logits, random_params
from tests.util import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(value: Any) -> Any:
    """A copy of a tensor, tuple or batch on the GPU."""
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, Batch):
        return Batch(**{name: on_gpu(getattr(value, name)) for name in Batch.__dataclass_fields__})
    if isinstance(value, Params):
        return Params(*map(on_gpu, value))
    if isinstance(value, tuple):
        return tuple(map(on_gpu, value))
    return value


@pytest.mark.parametrize("V", [63, 1000, 49152, 128256, 151936], ids=lambda V: f"V{V}")
@pytest.mark.parametrize("form", ["uniform", "packed", "tree"])
def test_sample(V: int, form: str) -> None:
    """Mixed parameters and distributions in one batch; ties are many in bf16."""
    differing = drawn = 0
    for seed in range(6):
        rng = random.Random(seed)
        q_len = [rng.randint(1, 8) for _ in range(S)]
        batch = make_rows(q_len, [rng.randint(0, 4000) for _ in q_len], form != "packed", form == "tree")
        logits = random_logits(rng, batch.num_tokens, V, torch.bfloat16)
        ids = torch.randint(0, V, (batch.num_tokens,), dtype=torch.int32)
        rows = torch.tensor(rng.sample(range(S), S), dtype=torch.int32)
        params = random_params(rng, V)
        expected = sample.naive(logits, ids, rows, params, batch)
        actual = sample.sample(*on_gpu((logits, ids, rows, params, batch))).cpu()
        real = torch.cat([torch.arange(a, a + n) for a, n in zip(batch.q_start.tolist(), q_len)])
        differing += int((actual[real] != expected[real]).sum())
        drawn += len(real)
    # The mass of top-p is summed in another order and logarithms differ in the last place.
    assert differing <= drawn // 100, f"{differing} of {drawn} tokens differ"


def test_sample_does_not_depend_on_the_batch() -> None:
    """Alone, in a batch, with K = 0 and as one of 8 positions: exactly the same tokens."""
    V, base = 151936, 11
    logits = (torch.randn(64, 8, V, device="cuda") * 3).bfloat16()
    params = make_params(
        V, temperature=[1.0, 1.0, 0.6, 0.0], top_p=[1.0, 0.9, 0.95, 1.0], top_k=[0, 0, 20, 0]
    )
    params = on_gpu(params)
    rows = torch.arange(64, dtype=torch.int32, device="cuda") % S
    ids = torch.zeros(64 * 8, dtype=torch.int32, device="cuda")
    crowd = on_gpu(make_rows([8] * 64, [base] * 64, True))
    together = sample.sample(logits.flatten(0, 1), ids, rows, params, crowd).view(64, 8)
    for b in range(0, 64, 7):
        for i in (0, 1, 7):
            one = on_gpu(make_rows([1], [base + i], True))
            alone = sample.sample(logits[b, i : i + 1], ids[:1], rows[b : b + 1], params, one)
            assert int(alone) == int(together[b, i])


@pytest.mark.parametrize("length", [1, 1000, 4096, 30_000])
@pytest.mark.parametrize("B", [1, 7, 64])
def test_ngram(B: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 12, (B, 32_768), generator=generator, dtype=torch.int32)
    one = torch.ones(B, dtype=torch.int32)
    rows = torch.randperm(B, generator=generator, dtype=torch.int32)
    rows[B // 2] = -1 if B > 1 else 0
    lengths = torch.randint(1, length + 1, (B,), generator=generator, dtype=torch.int32)
    arguments = (tokens, lengths, rows, one, one * 5, one * 7, one * 40_000, 8, 5)
    expected = ngram.naive(*arguments)
    actual = ngram.propose(*on_gpu(arguments))
    assert_equal(actual, expected)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("B", "length", "k"), [(1, 1000, 8), (7, 4096, 16), (64, 4096, 8), (3, 30_000, 63)])
def test_ngram_tree(B: int, length: int, k: int, width: int) -> None:
    generator = torch.Generator().manual_seed(length + B)
    tokens = torch.randint(0, 12, (B, 32_768), generator=generator, dtype=torch.int32)
    one = torch.ones(B, dtype=torch.int32)
    rows = torch.randperm(B, generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, length + 1, (B,), generator=generator, dtype=torch.int32)
    widths = torch.randint(1, width + 1, (B,), generator=generator, dtype=torch.int32)
    arguments = (tokens, lengths, rows, one, one * 5, one * 63, one * 40_000, widths, k, 5, width)
    assert_equal(ngram_tree.propose(*on_gpu(arguments)), ngram_tree.naive(*arguments))


def assert_equal(actual: Proposal, expected: Proposal) -> None:
    for name, ours, theirs in zip(actual._fields, actual, expected, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            assert torch.equal(ours.cpu(), theirs), name


@pytest.mark.parametrize("filtered", [False, True], ids=["all", "filtered"])
def test_accept(filtered: bool) -> None:
    """The same decisions, but where chance lies within rounding."""
    V, B, K = 50_000, 64, 4
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(B * (K + 1), V, generator=generator) * 2
    draft_logits = logits.view(B, K + 1, V)[:, :K] + torch.randn(B, K, V, generator=generator)
    filters: dict[str, object] = {"top_k": [0, 50, 0, 20], "top_p": [1.0, 1.0, 0.9, 0.8]} if filtered else {}
    params = make_params(V, temperature=[1.0, 0.7, 1.3, 0.0], **filters)
    rule = torch.tensor([1, 2, 1, 2], dtype=torch.int8)  # rejection, typical
    rows = torch.arange(B, dtype=torch.int32) % S
    batch = make_rows([K + 1] * B, [7] * B, True)
    ids = torch.randint(0, V, (B, K + 1), generator=generator, dtype=torch.int32)
    ids[:, 1:] = draft_logits.argmax(-1).int()
    given = (logits, ids.flatten(), rows, params, batch)
    arguments = (sample.naive(*given), *given, rule, None, draft_logits)
    expected, actual = accept.naive(*arguments), accept.accept(*on_gpu(arguments)).cpu()
    assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_verify_and_commit(tree: bool) -> None:
    B, Q, V, capacity = 64, 8, 500, 40
    generator = torch.Generator().manual_seed(1)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    batch = make_rows([int(n) for n in integers(0, Q + 1, B)] + [Q], [0] * (B + 1), True)
    B += 1
    targets, ids = integers(-1, 3, batch.num_tokens), integers(0, 3, batch.num_tokens)
    parents = ((torch.arange(batch.num_tokens) % Q - 1) // 2).int() if tree else None
    state = (integers(0, V, B, capacity), integers(1, capacity, B), integers(0, 2, B, V))
    finished = (integers(0, 5, B) == 4).to(torch.int8)
    rows = torch.randperm(B, generator=generator, dtype=torch.int32)
    rows[3] = -1
    limits = (integers(capacity // 2, capacity + 1, B), integers(-1, 3, B, 2))
    on_device = on_gpu((targets, ids, batch, parents, *state, finished, rows, *limits))
    verdict, kept = commit.verify_and_commit(*on_device)
    expected, expected_kept = commit.verify_and_commit(
        targets, ids, batch, parents, *state, finished, rows, *limits
    )
    for ours, theirs in zip((*verdict, kept), (*expected, expected_kept)):
        assert torch.equal(ours.cpu(), theirs)
    for ours, theirs in zip(on_device[4:8], (*state, finished)):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("V", [1000, 49152, 151936], ids=lambda V: f"V{V}")
def test_logprobs(V: int) -> None:
    logits = (torch.randn(9, V, device="cuda") * 3).bfloat16()
    index = torch.tensor([8, 0, 3], dtype=torch.int32, device="cuda")
    tokens = torch.tensor([1, 2, 999], dtype=torch.int32, device="cuda")
    result = logprobs.logprobs(logits, index, tokens, 20)
    expected = logits[index.long()].double().log_softmax(-1)
    own = expected.gather(1, tokens.long()[:, None])
    assert_close(result.own, own[:, 0], 1e-5)
    assert torch.equal(result.rank.long(), (expected > own).sum(1) + 1)
    assert_close(result.top, expected.topk(20).values, 1e-5)
    assert_close(expected.gather(1, result.top_ids.long()), expected.topk(20).values, 1e-5)


def test_inside_a_graph() -> None:
    """Propose, sample, verify and commit, captured once: replays do what eager calls do."""
    B, K, V, capacity = 4, 3, 1000, 256
    Q = K + 1
    one = torch.ones(B, dtype=torch.int32, device="cuda")
    rows = torch.arange(B, dtype=torch.int32, device="cuda")
    params: Params = on_gpu(make_params(V, temperature=[0.0, 1.0, 1.0, 0.5], top_p=[1.0, 1.0, 0.8, 1.0]))
    batch: Batch = on_gpu(make_rows([Q] * B, [40] * B, True))
    table = (torch.randn(50, V, device="cuda") * 4).bfloat16()  # a model that looks at one token
    start = torch.randint(0, 9, (B, capacity), dtype=torch.int32, device="cuda")

    def state() -> tuple[Tensor, ...]:
        finished = torch.zeros(B, dtype=torch.int8, device="cuda")
        return start.clone(), one * 41, torch.zeros(B, V, dtype=torch.int32, device="cuda"), finished

    def step(tokens: Tensor, num_tokens: Tensor, counts: Tensor, finished: Tensor) -> Tensor:
        proposal = ngram.propose(tokens, num_tokens, rows, one, one * 3, one * K, one * capacity, K, 3)
        last = tokens.gather(1, (num_tokens - 1).long()[:, None])
        ids = torch.cat((last, proposal.drafts), 1).flatten()
        base = num_tokens[:, None] - 1
        batch.positions.copy_((base + torch.arange(Q, device="cuda")).flatten())
        targets = sample.sample(table[ids.long() % 50], ids, rows, params, batch)
        _, kept = commit.verify_and_commit(
            targets, ids, batch, None, tokens, num_tokens, counts, finished, rows, one * capacity,
            params.stop_ids,
        )  # fmt: skip
        return kept

    eager = state()
    expected = torch.stack([step(*eager) for _ in range(12)])
    captured = state()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(*captured)
    for before, after in zip(state(), captured):
        after.copy_(before)
    replayed = []
    for _ in range(12):
        graph.replay()
        replayed.append(kept.clone())
    assert torch.equal(torch.stack(replayed), expected)
    for ours, theirs in zip(captured, eager):
        assert torch.equal(ours, theirs)


def test_verify_alone_matches_naive() -> None:
    batch = make_rows([5, 0, 3], [0, 0, 0], True)
    targets, ids = torch.randint(0, 2, (2, batch.num_tokens), dtype=torch.int32)
    expected = verify.naive(targets, ids, batch)
    for ours, theirs in zip(verify.verify(*on_gpu((targets, ids, batch))), expected):
        assert torch.equal(ours.cpu(), theirs)
