"""Weights and KV caches in the layouts that C++ multiplies with, the memory they lie in, and the product.

    packed = pack(weight)          [N, K] bfloat16, K even
    linear(x, packed, bias)        [T, K] -> [T, N]

Strips of 32 rows of the weight lie one after the other, each [K / 2, 32, 2]: what one instruction reads of 16
rows, two columns of each, is contiguous, and a strip is read from its beginning to its end.

A KV cache is [num_blocks, num_layers, Hkv, 2, block_size / 16, 16, D] (2: keys, values). The last two
dimensions are a tile, the numbers of 16 positions in an order of their own: keys [D / 2, 16, 2], values
[8, D, 2], so that what one instruction multiplies with lies together. So do a block, and in it what is read
one after the other, keys and values of a head.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from . import Word, call

WIDTH = 32  # rows of a strip
TILE = 16  # positions
FOUR_KB = 2048  # numbers; as decoder.cpp has it
PIECE = 64 << 20  # bytes that an arena asks for at once
LINE = 64  # bytes


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


def tiled_shape(num_blocks: int, layers: int, heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    return (num_blocks, layers, heads, 2, block_size // TILE, TILE, head_dim)


def is_tiled(kv_cache: Tensor) -> bool:
    return kv_cache.dim() == 7


def cache_words(kv_cache: Tensor) -> tuple[Word, ...]:
    """Return `Cache` of cache.h."""
    _, layers, heads, _, tiles, _, head_dim = kv_cache.shape
    return kv_cache, layers, heads, tiles * TILE, head_dim


def zeros_on_demand(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", large_pages: bool = False
) -> Tensor:
    """Return zeros; on a CPU in pages that cost neither time nor memory before they are written. The system
    takes them back when the last tensor in them dies. Large pages are read faster; the first byte of each
    costs 2 MiB. Raises OSError where there is no room."""
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(f"The system gives no {size / 2**20:.0f} MiB of memory ({error.strerror}).") from None
    with contextlib.suppress(AttributeError, OSError):  # not on Linux; a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class Arena:
    """Large pages for tensors of which most are too small to fill one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros behind the tensor that was asked for before."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            if size > len(self._rest):
                self._rest = zeros_on_demand((max(size, PIECE),), torch.uint8, large_pages=True)
            found, self._rest = self._rest[:size], self._rest[-(-size // LINE) * LINE :]
        return found.view(dtype).view(*shape)


_arena = Arena()
