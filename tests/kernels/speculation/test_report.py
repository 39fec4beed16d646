"""Log-probabilities: comparison with float64."""

import math

import pytest
import torch

from nanospec.kernels.speculation.report import PIECE, kept_logprobs, logprobs
from tests.kernels.batches import ints
from tests.util import assert_close

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("num_top", [0, 5])
@pytest.mark.parametrize(("V", "dtype"), [(5, torch.float16), (63, torch.float32), (9001, torch.float32)])
def test_matches_float64(V: int, dtype: torch.dtype, num_top: int) -> None:
    generator = torch.Generator().manual_seed(V)
    # All values differ, so that top ids are unique.
    logits = torch.stack([torch.randperm(V, generator=generator) for _ in range(4)])
    logits = (logits * (8.0 / V) - 4).to(dtype)
    index, tokens = ints(3, 0, 3), ints(2, -1, 4)
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


def test_ties_are_ordered_by_token_id() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [11, 4500]] = 1.0
    near = torch.tensor([[2.0, 2.0 + 2**-22, -2.0 - 2**-22, -2.0]])  # neighboring float32 numbers
    assert logprobs(near, ints(0), ints(0), 4).top_ids.tolist() == [[1, 0, 3, 2]]
    logits[1] = -3.0
    logits[1, [4999, 3, 70]] = torch.tensor([-0.0, 0.0, -0.5])
    logits[2] = -math.inf
    logits[2, 7] = 3.0
    for n in (1, 2, 3, 4):  # the first ids do not depend on n
        result = logprobs(logits, ints(0, 1, 2), ints(0, 0, 7), n)
        expected = [11, 4500, 0, 1], [3, 4999, 70, 0], [7, 0, 1, 2]
        assert result.top_ids.tolist() == [ids[:n] for ids in expected]
    assert (float(result.own[2]), int(result.rank[2]), float(result.top[2, 0])) == (0.0, 1, 0.0)  # certain


def test_logprobs_of_kept_tokens() -> None:
    """Only kept tokens of rows that request log-probabilities are reported, with at most V top tokens."""
    logits, counts = torch.randn(6, 9, generator=torch.Generator().manual_seed(1)), [0] * 5
    lines = [[2, *counts, 4, 5, -1, -1], [1, *counts, 6, -1, -1, -1], [1, *counts, 7, 8, -1, -1]]
    path, q_start = torch.tensor([[0, 1], [0, 0], [1, 0]], dtype=torch.int32), ints(0, 2, 4)
    result = kept_logprobs(torch.tensor(lines, dtype=torch.int32), path, q_start, logits, [20, -1, 0])
    expected = logprobs(logits, ints(0, 1, 5), ints(4, 5, 7), 9)
    assert all(map(torch.equal, result, expected))


@pytest.mark.slow
def test_result_is_bitwise_independent_of_other_rows() -> None:
    """With two threads, PyTorch sums a single row in two halves. The rows exceed PIECE."""
    generator, before, N = torch.Generator().manual_seed(0), torch.get_num_threads(), PIECE + 2
    logits = (torch.randn(N, 9000, generator=generator) * 3).bfloat16()
    rows, tokens = torch.arange(N), torch.arange(N) * 100
    torch.set_num_threads(2)
    try:
        together = logprobs(logits.float(), rows, tokens, 2)
        for n in (1, 7):
            parts = [logprobs(logits.float(), rows[i : i + n], tokens[i : i + n], 2) for i in range(0, N, n)]
            for joined, whole in zip(map(torch.cat, zip(*parts)), together):
                assert torch.equal(joined, whole)
    finally:
        torch.set_num_threads(before)
