"""A weight in the layout that `arithmetic.h` multiplies with, and the product.

    packed = pack(weight)          [N, K] bfloat16, K even
    linear(x, packed, bias)        [T, K] -> [T, N]

Strips of 32 rows of the weight lie one after the other, each [K / 2, 32, 2]: what one instruction reads of 16
rows, two columns of each, is contiguous, and a strip is read from its beginning to its end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Word, call
from .mapped_memory import Arena

WIDTH = 32  # rows of a strip
FOUR_KB = 2048  # numbers; as decoder.cpp has it

_arena = Arena()


class Packed(NamedTuple):
    """data [ceil(N / 32), K / 2, 32, 2]; shape is (N, K)."""

    data: Tensor
    shape: tuple[int, int]

    def words(self, bias: Tensor | None = None) -> tuple[Word, ...]:
        """Return `Weight` of structs.h."""
        return self.data, bias, *self.shape


def pack(weight: Tensor) -> Packed:
    """Return `weight` [N, K] as strips."""
    N, K = weight.shape
    data = _arena.zeros((-(-N // WIDTH), K // 2, WIDTH, 2), weight.dtype)
    whole, rows = N // WIDTH, data.transpose(1, 2)  # [strips, 32, K / 2, 2]
    rows[:whole] = weight[: whole * WIDTH].view(-1, WIDTH, K // 2, 2)
    rows[-1, : N % WIDTH] = weight[whole * WIDTH :].view(-1, K // 2, 2)
    return Packed(data, (N, K))


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] @ weight.T + bias in bfloat16, summed in float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(len(x), weight.shape[0])
    words = *weight.words(bias), *row_words(x), *row_words(out), len(x), torch.get_num_threads()
    call("nanospec_linear", *words)
    return out


def empty_rows(T: int, K: int) -> Tensor:
    """Return [T, K] bfloat16, not contiguous where rows would be a multiple of 4 KB apart: all would fall
    into the same few lines of the first-level cache, and a product of many would wait for the second."""
    return torch.empty(T, K if K % FOUR_KB else K + WIDTH, dtype=torch.bfloat16)[:, :K]


def row_words(x: Tensor | None) -> tuple[Word, ...]:
    """Return `Rows` of structs.h."""
    return (None, 0) if x is None else (x, x.stride(0))
