"""The noise is exponential, independent, and a function of its arguments only."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec.kernels.sampling import noise

V = 50_000


def exponentials(seed: int, position: int, n: int = V) -> Tensor:
    return noise.naive(seed, position, torch.arange(n, dtype=torch.int32)).double().exp()


def kolmogorov_smirnov(e: Tensor) -> float:
    """Return sqrt(N) times the largest distance to the Exp(1) distribution function."""
    ordered = e.sort()[0]
    n = len(ordered)
    expected = 1 - torch.exp(-ordered)
    steps = torch.arange(n, dtype=torch.float64)
    distance = torch.maximum(expected - steps / n, (steps + 1) / n - expected).max()
    return float(distance) * math.sqrt(n)


def dependence(a: Tensor, b: Tensor) -> float:
    """Return how unevenly the uniform variates of two noises fill a grid of 16 x 16 together: chi-square,
    normalized to about N(0, 1)."""
    x, y = ((1 - torch.exp(-e)).mul(16).long().clamp(max=15) for e in (a, b))
    expected = len(a) / 256
    counts = torch.bincount(x * 16 + y, minlength=256).double()
    return abs(float(((counts - expected) ** 2 / expected).sum() - 255)) / math.sqrt(2 * 255)


# One-in-a-million bounds; the seeds are fixed, so results are reproducible.
KS_BOUND, CHI_BOUND = 2.6, 6.0
SEEDS = [0, 1, 2, -1, 1 << 31, 1 << 32, 1 << 62, -(1 << 63), 123456789123456789]


def test_exponential_over_tokens_positions_and_seeds() -> None:
    for seed, position in itertools.product(SEEDS, (0, 1, 77, 131_071)):
        assert kolmogorov_smirnov(exponentials(seed, position)) < KS_BOUND
    many = torch.arange(4000)
    for token in (0, 1, 49_151):
        for seeds, positions in ((many * 0 + 7, many), (many, many * 0 + 7), (many << 32, many * 0 + 7)):
            values = noise.naive(seeds, positions, torch.tensor([token]))
            assert kolmogorov_smirnov(values.flatten().double().exp()) < KS_BOUND


def test_minima_are_exponential() -> None:
    """Minima decide which token is sampled: N times the minimum of N must be Exp(1) again."""
    minima = torch.stack([exponentials(3, p, 20_000).min() * 20_000 for p in range(600)])
    assert kolmogorov_smirnov(minima) < KS_BOUND


def test_every_seed_bit_gives_independent_noise() -> None:
    for flipped in (*(1 << bit for bit in range(63)), -(1 << 63), 5):
        assert dependence(exponentials(0, 5), exponentials(flipped, 5)) < CHI_BOUND


@pytest.mark.parametrize("step", [1, 2, 16, 1024, 65_536])
def test_positions_and_tokens_are_independent(step: int) -> None:
    e = exponentials(9, 100, V + step)
    assert dependence(e[:V], exponentials(9, 100 + step)) < CHI_BOUND
    assert dependence(e[:V], e[step : V + step]) < CHI_BOUND


def test_values_are_bounded() -> None:
    """Noise must be finite."""
    log_e = torch.cat([noise.naive(1, p, torch.arange(V)) for p in range(20)])
    assert bool(log_e.isfinite().all())
    extremes = noise.log_exponential(torch.tensor([0, 2**31 - 1], dtype=torch.int32))
    assert extremes.tolist() == pytest.approx([math.log(2.0**-32), math.log(32 * math.log(2))])


@triton.jit
def _kernel(seed, position, out, bits_out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(out + i, noise.log_e(tl.load(seed), tl.load(position), i))
    first, second = noise.block_keys(tl.load(seed), tl.load(position))
    bits = noise.block_mix(noise.block_mix(i.to(tl.uint32) ^ first) ^ second)
    tl.store(bits_out + i, bits.to(tl.int64))


@pytest.mark.parametrize("seed", SEEDS)
def test_kernel_bits_match_naive(seed: int) -> None:
    n, position = 4096, 131_071
    out, bits = torch.empty(n), torch.empty(n, dtype=torch.int64)
    _kernel[(1,)](torch.tensor([seed]), torch.tensor([position], dtype=torch.int32), out, bits, N=n)
    first, second = noise.keys(seed, position)
    assert bits.tolist() == [noise.mix(noise.mix(token ^ first) ^ second) for token in range(n)]
    expected = noise.naive(seed, position, torch.arange(n, dtype=torch.int32))
    assert float((out - expected).abs().max()) < 1e-5
    rows = noise.naive(torch.tensor([3, seed]), torch.tensor([position, position]), torch.tensor([5, 1, 1]))
    assert torch.equal(rows[1], expected[[5, 1, 1]])  # independent of other rows
