"""The noise is exponential, independent, and a function of its arguments only."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from bench.check import poisoned
from nanospec.engine.request import derive_seed
from nanospec.kernels.launch import forced
from nanospec.kernels.sampling import noise
from tests.kernels.batches import ints

V = 50_000
# One-in-a-million bounds; the seeds are fixed, so results are reproducible.
KS_BOUND, CHI_BOUND = 2.6, 6.0
SEEDS = [0, 1, 2, -1, 1 << 31, 1 << 32, 1 << 62, -(1 << 63), 123456789123456789]


def exponentials(seed: int, position: int, n: int = V) -> Tensor:
    return noise.naive(seed, position, torch.arange(n, dtype=torch.int32)).double().exp()


def kolmogorov_smirnov(e: Tensor) -> float:
    """Return sqrt(N) times the largest distance to the Exp(1) distribution function."""
    n, expected = len(e), 1 - torch.exp(-e.sort()[0])
    steps = torch.arange(n, dtype=torch.float64)
    distance = torch.maximum(expected - steps / n, (steps + 1) / n - expected).max()
    return float(distance) * math.sqrt(n)


def dependence(a: Tensor, b: Tensor) -> float:
    """Return the chi-square statistic of two noises' uniform variates on a 16 x 16 grid, normalized to about
    N(0, 1). Large values show dependence."""
    x, y = ((1 - torch.exp(-e)).mul(16).long().clamp(max=15) for e in (a, b))
    expected = len(a) / 256
    counts = torch.bincount(x * 16 + y, minlength=256).double()
    return abs(float(((counts - expected) ** 2 / expected).sum() - 255)) / math.sqrt(2 * 255)


def test_exponential_over_tokens_positions_and_seeds() -> None:
    for seed, position in itertools.product(SEEDS, (0, 77, 131_071)):
        assert kolmogorov_smirnov(exponentials(seed, position)) < KS_BOUND
    many = torch.arange(4000)
    for token in (0, 49_151):
        for seeds, positions in ((many * 0 + 7, many), (many, many * 0 + 7), (many << 32, many * 0 + 7)):
            values = noise.naive(seeds, positions, torch.tensor([token]))
            assert kolmogorov_smirnov(values.flatten().double().exp()) < KS_BOUND


def test_seeds_positions_and_tokens_are_independent() -> None:
    first = exponentials(0, 5)
    samples = [derive_seed(0, 1, 0), derive_seed(0, 2, 0), derive_seed(None, 0, 1)]
    for seed in (*(1 << bit for bit in range(63)), -(1 << 63), -1, 5, *samples):
        assert dependence(first, exponentials(seed, 5)) < CHI_BOUND
    for step in (1, 2, 16, 1024, 65_536):
        e = exponentials(9, 100, V + step)
        assert dependence(e[:V], exponentials(9, 100 + step)) < CHI_BOUND
        assert dependence(e[:V], e[step:]) < CHI_BOUND


def test_small_and_extreme_values_are_exact() -> None:
    bits = torch.arange(1_000_000, 8_000_000, 1000, dtype=torch.int32)  # u from 0.0005 to 0.004
    u = (bits.double() + 0.5) * 2.0**-31
    error = noise.log_exponential(bits).double() - (-torch.log1p(-u)).log()
    below = u < noise.SMALL.value
    assert abs(float(error[below].mean())) < 3e-8  # -2e-7 without the last term of the series
    assert float(error[below].abs().max()) < 5e-7
    assert float(error.abs().max()) < 5e-5  # 1 - u is rounded
    extremes = noise.log_exponential(ints(0, 2**31 - 1))
    assert extremes.tolist() == pytest.approx([math.log(2.0**-32), math.log(32 * math.log(2))])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernel_equals_naive(dtype: torch.dtype) -> None:
    seeds, positions = torch.tensor(SEEDS), torch.arange(len(SEEDS), dtype=dtype) * 9_999
    tokens = torch.randint(0, V, (len(SEEDS), 13), dtype=dtype)
    with forced("triton"), poisoned():
        actual = noise.draw(seeds, positions, tokens)
    torch.testing.assert_close(actual, noise.naive(seeds, positions, tokens), rtol=1e-6, atol=1e-6)
