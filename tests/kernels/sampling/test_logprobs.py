"""Log-probabilities against float64."""

from __future__ import annotations

import math

import pytest
import torch

from nanospec.kernels.sampling import logprobs
from tests.util import assert_close

IMPLEMENTATIONS = {"naive": logprobs.naive, "kernel": logprobs.launch}

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("V", [5, 63, 1000, 9001], ids=lambda V: f"V{V}")
def test_matches_float64(V: int, num_top: int, dtype: torch.dtype, implementation: str) -> None:
    generator = torch.Generator().manual_seed(V)
    # All values differ, so that the ids are defined.
    logits = torch.stack([torch.randperm(V, generator=generator) for _ in range(4)])
    logits = (logits * (8.0 / V) - 4).to(dtype)
    if dtype == torch.float16 and V == 9001:
        logits = (torch.stack([torch.randperm(V) for _ in range(4)]) * 2.0).to(dtype)  # exact to 2^11
        logits[:, 2000:] = -math.inf
        logits[:, :2000] = torch.arange(2000.0).flip(0) / 256
    index = torch.tensor([3, 0, 3], dtype=torch.int32)
    tokens = torch.tensor([2, -1, 4], dtype=torch.int32)
    result = IMPLEMENTATIONS[implementation](logits, index, tokens, num_top)
    x = logits[index.long()].double()
    expected = x.log_softmax(-1)
    chosen = tokens.long().clamp(min=0)[:, None]
    assert_close(result.own, expected.gather(1, chosen)[:, 0], 1e-5)
    assert result.rank.tolist() == ((x > x.gather(1, chosen)).sum(1) + 1).tolist()
    top = expected.topk(num_top, -1)
    assert result.top.shape == result.top_ids.shape == (3, num_top)
    assert_close(result.top, top.values, 1e-5)
    assert torch.equal(result.top_ids.long(), top.indices)
    assert result.rank.dtype == result.top_ids.dtype == torch.int32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("token", [0, 7])
def test_a_certain_token_has_logprob_zero(token: int, implementation: str) -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, token] = 3.0
    one = torch.tensor([token], dtype=torch.int32)
    result = IMPLEMENTATIONS[implementation](logits, one * 0, one, 3)
    assert float(result.own) == 0.0
    assert int(result.rank) == 1
    assert float(result.top[0, 0]) == 0.0
    assert len(set(result.top_ids[0].tolist())) == 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_the_lowest_of_equal_tokens_come_first(implementation: str) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [11, 4500]] = 1.0
    logits[1] = -3.0
    logits[1, [4999, 3, 70]] = torch.tensor([-0.0, 0.0, -0.5])
    index = torch.arange(2, dtype=torch.int32)
    for n in (1, 2, 3, 4):  # the first ones do not depend on their number
        result = IMPLEMENTATIONS[implementation](logits, index, torch.tensor([0, 0]), n)
        assert result.top_ids.tolist() == [[11, 4500, 0, 1][:n], [3, 4999, 70, 0][:n]]


def test_kernel_refuses_too_many() -> None:
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="exceed the limit of 5"):
        logprobs.launch(torch.zeros(1, 5), zero, zero, 6)
    chunks = 3  # of whose largest logits no more than so many are compared at once
    most, logits = logprobs.MAX_CANDIDATES // chunks, torch.zeros(1, chunks * int(logprobs.CHUNK))
    with pytest.raises(ValueError, match=f"exceed the limit of {most}"):
        logprobs.launch(logits, zero, zero, most + 1)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    """With two threads PyTorch adds a single row up in two halves."""
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    logits = (torch.randn(24, 49152, generator=generator) * 3).bfloat16()
    rows, tokens = torch.arange(24), torch.arange(24) * 100
    torch.set_num_threads(2)
    try:
        together = logprobs.naive(logits, rows, tokens, 2)
        for n in (1, 2, 7):
            parts = [logprobs.naive(logits, rows[i : i + n], tokens[i : i + n], 2) for i in range(0, 24, n)]
            for name in ("own", "top"):
                joined = torch.cat([getattr(part, name) for part in parts])
                assert torch.equal(joined, getattr(together, name))
    finally:
        torch.set_num_threads(before)
