"""Sampling and verification on a GPU: comparison with `naive` on a CPU. See also `bench/gpu.py kernels`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels import REJECTION, TYPICAL
from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling import accept, sample
from nanospec.kernels.speculation import report, verify
from nanospec.kernels.speculation.proposal import Proposal
from tests.kernels.batches import S, ints, make_batch, make_table, random_logits, random_table, real
from tests.util import assert_close

pytestmark = pytest.mark.gpu


def on_gpu(value: Any) -> Any:
    """Return a copy of a tensor, tuple or batch on the GPU."""
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, Batch):
        return Batch(**{name: on_gpu(getattr(value, name)) for name in Batch.__dataclass_fields__})
    if isinstance(value, tuple):
        parts = map(on_gpu, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def assert_equal(actual: Any, expected: Any) -> None:
    """Compare tuples of tensors on the GPU and on the CPU."""
    for name, ours, theirs in zip(actual._fields, actual, expected, strict=True):
        assert isinstance(ours, Tensor) == isinstance(theirs, Tensor), name
        if isinstance(ours, Tensor):
            assert torch.equal(ours.cpu(), theirs), name


@pytest.mark.parametrize("V", [63, 1000, 49152, 128256, 151936], ids=lambda V: f"V{V}")
def test_sample(V: int) -> None:
    """Mixed parameters and distributions in one batch, with many ties in bf16."""
    differing = drawn = 0
    for seed in range(12):
        rng = random.Random(seed)
        q_len = [rng.randint(1, 8) for _ in range(S)]
        base_len, rows = [rng.randint(0, 4000) for _ in q_len], ints(*rng.sample(range(S), S))
        batch = make_batch(q_len, base_len, seed % 3 > 0, seed % 3 > 1, rows=rows)
        batch.input_ids.random_(0, V)
        logits = random_logits(rng, batch.num_tokens, V, torch.bfloat16)
        given = (logits, random_table(rng, V), batch)
        expected, actual = sample.naive(*given), sample.sample(*on_gpu(given)).cpu()
        own = real(batch)
        differing += int((actual[own] != expected[own]).sum())
        drawn += len(own)
    # The top-p mass is summed in another order, and logarithms differ in the last place.
    assert differing <= drawn // 100, f"{differing} of {drawn} tokens differ"


def test_sample_is_independent_of_the_batch() -> None:
    """Tokens are the same alone, in a batch, with K = 0 and as one of 8 positions."""
    V, base = 151936, 11
    logits = (torch.randn(64, 8, V, device="cuda") * 3).bfloat16()
    table = on_gpu(
        make_table(V, temperature=[1.0, 1.0, 0.6, 0.0], top_p=[1.0, 0.9, 0.95, 1.0], top_k=[0, 0, 20, 0])
    )
    rows = torch.arange(64, dtype=torch.int32) % S
    crowd = on_gpu(make_batch([8] * 64, [base] * 64, rows=rows))
    together = sample.sample(logits.flatten(0, 1), table, crowd).view(64, 8)
    for b in range(0, 64, 7):
        for i in (0, 1, 7):
            one = on_gpu(make_batch([1], [base + i], rows=rows[b : b + 1]))
            alone = sample.sample(logits[b, i : i + 1], table, one)
            assert int(alone) == int(together[b, i])


@pytest.mark.parametrize("filtered", [False, True], ids=["all", "top_k-top_p"])
def test_accept(filtered: bool) -> None:
    """Decisions are equal except where the noise is within rounding of the threshold."""
    V, B, K = 50_000, 64, 4
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(B * (K + 1), V, generator=generator) * 2
    draft_logits = logits.view(B, K + 1, V)[:, :K] + torch.randn(B, K, V, generator=generator)
    kept: dict[str, Any] = {"top_k": [0, 50, 0, 20], "top_p": [1.0, 1.0, 0.9, 0.8]} if filtered else {}
    rules = [REJECTION, TYPICAL, REJECTION, TYPICAL]
    table = make_table(V, temperature=[1.0, 0.7, 1.3, 0.0], rule=rules, **kept)
    ids = torch.randint(0, V, (B, K + 1), generator=generator, dtype=torch.int32)
    ids[:, 1:] = draft_logits.argmax(-1).int()
    rows = torch.arange(B, dtype=torch.int32) % S
    batch = make_batch([K + 1] * B, [7] * B, rows=rows, input_ids=ids.flatten())
    none = ints()
    proposal = Proposal(none, none, none, none, none, logits=draft_logits)
    given = (sample.naive(logits, table, batch), logits, table, batch, proposal)
    expected, actual = accept.naive(*given), accept.accept(*on_gpu(given)).cpu()
    assert (actual == expected).float().mean() > 0.99


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_commit(tree: bool) -> None:
    B, Q, V, capacity = 65, 8, 500, 40
    generator = torch.Generator().manual_seed(1)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    rows = torch.randperm(B, generator=generator, dtype=torch.int32)
    rows[3] = -1
    parents = [max((t % Q - 1) // 2, 0) for t in range(B * Q)] if tree else None
    q_len = [*integers(0, Q + 1, B - 1).tolist(), Q]
    batch = make_batch(q_len, parents=parents, rows=rows, input_ids=integers(0, 3, B * Q))
    targets = integers(-1, 3, B * Q)
    table = make_table(
        V, tokens=integers(0, V, B, capacity), num_tokens=integers(1, capacity, B),
        output_counts=integers(0, 2, B, V), finished=integers(0, 5, B) == 4,
        max_len=integers(capacity // 2, capacity + 1, B), stop_ids=integers(-1, 3, B, 2),
    )  # fmt: skip
    source = integers(0, 9, B, Q - 1)
    proposal = Proposal(source, *[integers(0, 9, B), source, integers(0, 9, B), integers(0, 2, B)])
    on_device = on_gpu((targets, batch, table, proposal))
    assert_equal(verify.commit(*on_device), verify.commit(targets, batch, table, proposal))
    assert_equal(on_device[2], table)


@pytest.mark.parametrize("V", [1000, 49152, 151936], ids=lambda V: f"V{V}")
def test_logprobs(V: int) -> None:
    logits = (torch.randn(9, V, device="cuda") * 3).bfloat16()
    index = torch.tensor([8, 0, 3], dtype=torch.int32, device="cuda")
    tokens = torch.tensor([1, 2, 999], dtype=torch.int32, device="cuda")
    result = report.logprobs(logits, index, tokens, 20)
    expected = logits[index.long()].double().log_softmax(-1)
    own = expected.gather(1, tokens.long()[:, None])
    assert_close(result.own, own[:, 0], 1e-5)
    assert torch.equal(result.rank.long(), (expected > own).sum(1) + 1)
    assert_close(result.top, expected.topk(20).values, 1e-5)
    assert_close(expected.gather(1, result.top_ids.long()), expected.topk(20).values, 1e-5)
