"""Log-probabilities against float64."""

from __future__ import annotations

import math

import pytest
import torch

from nanospec.kernels.sampling.logprobs import PIECE, logprobs
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("V", [5, 63, 1000, 9001], ids=lambda V: f"V{V}")
def test_matches_float64(V: int, num_top: int, dtype: torch.dtype) -> None:
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
    result = logprobs(logits, index, tokens, num_top)
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


@pytest.mark.parametrize("token", [0, 7])
def test_a_certain_token_has_logprob_zero(token: int) -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, token] = 3.0
    one = torch.tensor([token], dtype=torch.int32)
    result = logprobs(logits, one * 0, one, 3)
    assert float(result.own) == 0.0
    assert int(result.rank) == 1
    assert float(result.top[0, 0]) == 0.0
    assert len(set(result.top_ids[0].tolist())) == 3


def test_the_lowest_of_equal_tokens_come_first() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [11, 4500]] = 1.0
    logits[1] = -3.0
    logits[1, [4999, 3, 70]] = torch.tensor([-0.0, 0.0, -0.5])
    index = torch.arange(2, dtype=torch.int32)
    for n in (1, 2, 3, 4):  # the first ones do not depend on their number
        result = logprobs(logits, index, torch.tensor([0, 0]), n)
        assert result.top_ids.tolist() == [[11, 4500, 0, 1][:n], [3, 4999, 70, 0][:n]]


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    """With two threads PyTorch adds a single row up in two halves. More rows than are copied at once."""
    generator, before, N = torch.Generator().manual_seed(0), torch.get_num_threads(), PIECE + 2
    logits = (torch.randn(N, 9000, generator=generator) * 3).bfloat16()
    rows, tokens = torch.arange(N), torch.arange(N) * 100
    torch.set_num_threads(2)
    try:
        together = logprobs(logits.float(), rows, tokens, 2)
        for n in (1, 2, 7):
            parts = [logprobs(logits.float(), rows[i : i + n], tokens[i : i + n], 2) for i in range(0, N, n)]
            for joined, whole in zip(map(torch.cat, zip(*parts)), together):
                assert torch.equal(joined, whole)
    finally:
        torch.set_num_threads(before)
