"""Sampling noise that is a pure function of (seed, absolute position, token id).

    naive(seed, position, tokens) = log E,   E ~ Exp(1), independent for different arguments

Sampling uses argmax(score - T log E), the Gumbel-max trick (Gumbel, 1954): -log E is a Gumbel variate.
There is no generator state, so the token sampled at a position depends neither on the batch nor on the
number of tokens verified at once. This is what makes speculation lossless.

The random bits come from a 32-bit integer hash (two multiplications and three shifts, constants by C.
Wellons, "Prospecting for Hash Functions", 2018). Seed and position yield two 32-bit keys, and the token id
is mixed with both. `naive` and `log_e`, its version for kernels, have identical bits; their logarithms may
differ in the last place, which changes the sampled token with a probability of about 1e-7.
"""

from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2, use_triton

Ints = TypeVar("Ints", int, Tensor)
_MASK = 0xFFFFFFFF
MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
MULTIPLIER_2 = tl.constexpr(0x846CA68B)
SEED_LOW = tl.constexpr(0x9E3779B9)  # arbitrary odd constants keep the key streams apart
SEED_HIGH = tl.constexpr(0x85EBCA6B)
SECOND_KEY = tl.constexpr(0xC2B2AE35)
SMALL = tl.constexpr(1e-3)  # below this, -log(1 - u) is computed by its series


def draw(seed: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Return `naive` of seeds [n] int64, positions [n] and token ids [n, N], all contiguous, on a GPU in one
    launch."""
    if not use_triton(tokens):
        return naive(seed, position, tokens)
    out, (n, N) = tokens.new_empty(tokens.shape, dtype=torch.float32), tokens.shape
    _draw[(n,)](seed, position, tokens, out, N, WIDTH=next_power_of_2(N), num_warps=1)
    return out


def naive(seed: Ints, position: Ints, tokens: Tensor) -> Tensor:
    """Return log E, float32 [..., N] between -22.2 and 3.1, for token ids [N] or [..., N] and a seed and a
    position, which are integers or int64 tensors [...]."""
    first, second = keys(seed, position)
    if isinstance(first, Tensor):
        first, second = first[..., None], second[..., None]
    return log_exponential(mix(mix(tokens.long() ^ first) ^ second) & 0x7FFFFFFF)


def log_exponential(bits: Tensor) -> Tensor:
    """Return log E for E = -log(1 - u), where u = (bits + 1/2) / 2^31 is uniform in (0, 1)."""
    u = (bits.float() + 0.5) * 2.0**-31
    # Small values of E determine the argmax, so they need full relative precision.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return torch.where(u < SMALL.value, series, -torch.log((1.0 - u).clamp(min=2.0**-32))).log()


def keys(seed: Ints, position: Ints) -> tuple[Ints, Ints]:
    """Return two 32-bit keys, integers or int64 tensors, of a 64-bit seed and a position."""
    low = mix((seed & _MASK) ^ SEED_LOW.value)
    high = mix((seed >> 32 & _MASK) ^ SEED_HIGH.value)
    first = mix(mix(low ^ position) ^ high)
    second = mix(mix(high ^ position ^ SECOND_KEY.value) ^ low)
    return first, second


def mix(x: Ints) -> Ints:
    """Mix the bits of 32-bit integers, given as int or int64. (Overflow keeps the low 32 bits correct.)"""
    x = (x ^ x >> 16) * MULTIPLIER_1.value & _MASK
    x = (x ^ x >> 15) * MULTIPLIER_2.value & _MASK
    return x ^ x >> 16


@triton.jit
def log_e(seed, position, tokens):
    """Return `naive` of a block of token ids for an int64 seed and an int32 position."""
    first, second = block_keys(seed, position)
    bits = block_mix(block_mix(tokens.to(tl.uint32) ^ first) ^ second)
    u = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    tail = -tl.log(tl.maximum(1.0 - u, 1.0 / 4294967296.0))
    return tl.log(tl.where(u < SMALL, series, tail))


@triton.jit
def block_keys(seed, position):
    """Return `keys` of scalars."""
    position = position.to(tl.uint32)
    low = block_mix(seed.to(tl.uint32) ^ SEED_LOW)
    high = block_mix((seed >> 32).to(tl.uint32) ^ SEED_HIGH)
    first = block_mix(block_mix(low ^ position) ^ high)
    second = block_mix(block_mix(high ^ position ^ SECOND_KEY) ^ low)
    return first, second


@triton.jit
def block_mix(x):
    """Return `mix` of uint32 values."""
    x = (x ^ (x >> 16)) * MULTIPLIER_1
    x = (x ^ (x >> 15)) * MULTIPLIER_2
    return x ^ (x >> 16)


@triton.jit
def _draw(seeds, positions, tokens, out, N, WIDTH: tl.constexpr):
    i, j = tl.program_id(0), tl.arange(0, WIDTH)
    ids = tl.load(tokens + i * N + j, j < N, other=0)
    tl.store(out + i * N + j, log_e(tl.load(seeds + i), tl.load(positions + i), ids), j < N)
