"""Writes of the host: the kernel against `naive`, and both against plain assignment."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from nanospec.kernels import transfer
from nanospec.kernels.transfer import Write

DTYPES = (torch.int32, torch.int64, torch.int8, torch.bool, torch.float32)
Do = Callable[[Sequence[Write]], None]
both = pytest.mark.parametrize("do", [transfer.naive, transfer.launch], ids=["naive", "kernel"])


def random_values(rng: random.Random, dtype: torch.dtype, count: int) -> list[float]:
    if dtype == torch.float32:
        some = (0.1, -0.0, 1e-42, math.inf, -3e38)
        return [rng.choice((rng.gauss(0, 1), *some)) for _ in range(count)]
    bits = {torch.int32: 31, torch.int64: 63, torch.int8: 7, torch.bool: 0}[dtype]
    low, high = (0, 1) if dtype == torch.bool else (-(1 << bits), (1 << bits) - 1)
    return [rng.choice((low, high, rng.randint(low, high))) for _ in range(count)]


def fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of other memory, full of what no write writes."""
    return [torch.full_like(tensor, 1 if tensor.dtype == torch.bool else 99) for tensor in tensors]


@both
@pytest.mark.parametrize("seed", range(4))
def test_every_place_gets_its_value_and_no_other_is_touched(seed: int, do: Do) -> None:
    rng = random.Random(seed)
    widths = [rng.choice((1, 7, 63, 1024, 1025, 20_000)) for _ in DTYPES]
    shapes = [torch.empty(5, width, dtype=dtype) for dtype, width in zip(DTYPES, widths, strict=True)]
    shapes += [torch.empty(5, dtype=dtype) for dtype in DTYPES]
    actual, expected, writes = fresh(shapes), fresh(shapes), []
    for tensor, wanted in zip(actual, expected, strict=True):
        for row in rng.sample(range(5), 2):
            width = tensor.stride(0)
            end = rng.randint(1, width)
            values = random_values(rng, tensor.dtype, rng.choice((1, end, rng.randint(1, end))))
            writes.append((tensor, row, end, values))
            own = torch.tensor(values, dtype=tensor.dtype)
            wanted.view(5, width)[row, :end] = own[torch.arange(end).clamp(max=len(values) - 1)]
    do(writes)
    for tensor, wanted in zip(actual, expected, strict=True):
        assert torch.equal(tensor, wanted)


@both
def test_minus_zero_and_seeds_keep_their_bits(do: Do) -> None:
    column, seeds = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    do([(column, 1, 1, [-0.0]), (seeds, 0, 1, [-(2**63)])])
    assert math.copysign(1, column[1].item()) == -1
    assert seeds.tolist() == [-(2**63), 0]
