"""A weight in the layout that `arithmetic.h` multiplies with, and the product.

    packed = pack(weight)          [N, K] bfloat16, K even
    linear(x, packed, bias)        [T, K] -> [T, N]

Strips of 32 rows of the weight lie one after the other, each [K / 2, 32, 2]: what one instruction reads of 16
rows, two columns of each, is contiguous, and a strip is read from its beginning to its end.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from ctypes import c_int, c_long, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from .build import library

WIDTH = 32  # rows of a strip
HUGE = 2 << 20  # bytes of a huge page


class Weight(ctypes.Structure):
    """As in decoder.cpp."""

    _fields_ = (("data", c_void_p), ("bias", c_void_p), ("rows", c_long), ("columns", c_long))


class Packed(NamedTuple):
    """data [ceil(N / 32), K / 2, 32, 2]; shape is (N, K)."""

    data: Tensor
    shape: tuple[int, int]

    def struct(self, bias: Tensor | None = None) -> Weight:
        """For a call; does not keep the tensors alive."""
        return Weight(self.data.data_ptr(), None if bias is None else bias.data_ptr(), *self.shape)

    def unpacked(self) -> Tensor:
        """[N, K]."""
        N, K = self.shape
        return self.data.permute(0, 2, 1, 3).reshape(-1, K)[:N]


def pack(weight: Tensor) -> Packed:
    """`weight` [N, K] as strips."""
    N, K = weight.shape
    data = empty(-(-N // WIDTH), K // 2, WIDTH, 2)
    whole = N // WIDTH
    data[:whole] = _strips(weight[: whole * WIDTH])
    if N % WIDTH:
        last = weight.new_zeros(WIDTH, K)
        last[: N % WIDTH] = weight[whole * WIDTH :]
        data[whole:] = _strips(last)
    return Packed(data, (N, K))


def _strips(weight: Tensor) -> Tensor:
    return weight.view(-1, WIDTH, weight.shape[1] // 2, 2).transpose(1, 2)


def empty(*shape: int) -> Tensor:
    """Uninitialised bfloat16 numbers on huge pages where the system has them, since reading on small
    ones takes a fifth longer."""
    size = torch.Size(shape).numel() * 2
    if size < HUGE:
        return torch.empty(shape, dtype=torch.bfloat16)
    pages = mmap.mmap(-1, -(-size // HUGE) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.bfloat16, count=size // 2).view(shape)


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in bfloat16, summed in float32; to `out` [T, N] if it is given."""
    N, K = weight.shape
    x = x.contiguous()
    if x.dtype != torch.bfloat16 or x.shape[1:] != (K,) or (bias is not None and bias.shape != (N,)):
        raise ValueError(f"A weight [{N}, {K}] does not multiply {x.dtype} {list(x.shape)}.")
    result = x.new_empty(len(x), N) if out is None else out
    if result.shape != (len(x), N) or result.dtype != x.dtype or not result.is_contiguous():
        raise ValueError(f"The result must be [{len(x)}, {N}] and contiguous, not {list(result.shape)}.")
    found = library()
    assert found is not None  # somebody has packed
    struct = weight.struct(bias)
    found.nanospec_linear(
        ctypes.byref(struct), c_void_p(x.data_ptr()), c_long(len(x)), c_void_p(result.data_ptr()),
        c_int(torch.get_num_threads()),
    )  # fmt: skip
    return result
