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
        """`Weight` of structs.h."""
        return self.data, bias, *self.shape


def pack(weight: Tensor) -> Packed:
    """`weight` [N, K] as strips."""
    N, K = weight.shape
    data = _arena.zeros((-(-N // WIDTH), K // 2, WIDTH, 2), weight.dtype)
    whole = N // WIDTH
    data[:whole] = _strips(weight[: whole * WIDTH])
    if N % WIDTH:
        last = weight.new_zeros(WIDTH, K)
        last[: N % WIDTH] = weight[whole * WIDTH :]
        data[whole:] = _strips(last)
    return Packed(data, (N, K))


def _strips(weight: Tensor) -> Tensor:
    return weight.view(-1, WIDTH, weight.shape[1] // 2, 2).transpose(1, 2)


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in bfloat16, summed in float32; to `out` [T, N] if it is given."""
    N, K = weight.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.dtype != torch.bfloat16 or x.shape[1:] != (K,) or (bias is not None and bias.shape != (N,)):
        raise ValueError(f"A weight [{N}, {K}] does not multiply {x.dtype} {list(x.shape)}.")
    result = x.new_empty(len(x), N) if out is None else out
    if result.shape != (len(x), N) or result.dtype != x.dtype or not result.is_contiguous():
        raise ValueError(f"The result must be [{len(x)}, {N}] and contiguous, not {list(result.shape)}.")
    words = *weight.words(bias), *row_words(x), *row_words(result), len(x), torch.get_num_threads()
    call("nanospec_linear", *words)
    return result


def empty_rows(T: int, K: int) -> Tensor:
    """[T, K] bfloat16, not contiguous where rows would be a multiple of 4 KB apart: all of them would fall
    into the same few lines of the first-level cache, and a product of many would wait for the second."""
    return torch.empty(T, K if K % FOUR_KB else K + WIDTH, dtype=torch.bfloat16)[:, :K]


def row_words(x: Tensor | None) -> tuple[Word, ...]:
    """`Rows` of structs.h."""
    return (None, 0) if x is None else (x, x.stride(0))
