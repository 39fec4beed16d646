"""Layouts of weights and KV caches for the C++ kernels, their memory, and the matrix product.

A packed weight is a sequence of strips of 32 rows, each [K / 2, 32, 2]. The operand of one instruction, two
columns of 16 rows, is contiguous, and a strip is read sequentially.

A KV cache is [num_blocks, num_layers, Hkv, 2, block_size / 16, 16, D] (2: keys, values). The last two
dimensions are a tile: the elements of 16 positions, keys as [D / 2, 16, 2] and values as [8, D, 2], so that
the operand of one instruction is contiguous. So is a block, and in it the keys and then the values of a head,
in the order in which they are read.
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

from . import NativeArg, call

WIDTH = 32  # rows per strip
TILE = 16  # positions per tile
PAGE_ELEMENTS = 2048  # bfloat16 elements in 4 KB; same as in decoder.cpp
PIECE = 64 << 20  # bytes that an arena allocates at once
LINE = 64  # bytes per cache line


class Packed(NamedTuple):
    """A packed weight: data [ceil(N / 32), K / 2, 32, 2], shape (N, K)."""

    data: Tensor
    shape: tuple[int, int]

    def words(self, bias: Tensor | None = None) -> tuple[NativeArg, ...]:
        """Return the fields of `Weight` in structs.h."""
        return self.data, bias, *self.shape


def pack(weight: Tensor) -> Packed:
    """Return `weight` [N, K] bfloat16, K even, in strips."""
    N, K = weight.shape
    data = _arena.zeros((-(-N // WIDTH), K // 2, WIDTH, 2), weight.dtype)
    whole, rows = N // WIDTH, data.transpose(1, 2)  # [strips, 32, K / 2, 2]
    rows[:whole] = weight[: whole * WIDTH].view(-1, WIDTH, K // 2, 2)
    rows[-1, : N % WIDTH] = weight[whole * WIDTH :].view(-1, K // 2, 2)
    return Packed(data, (N, K))


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] @ weight.T + bias in bfloat16, accumulated in float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(len(x), weight.shape[0])
    words = *weight.words(bias), *row_words(x), *row_words(out), len(x), torch.get_num_threads()
    call("nanospec_linear", *words)
    return out


def empty_rows(T: int, K: int) -> Tensor:
    """Return an uninitialized tensor [T, K] bfloat16. Rows are padded if their stride would be a multiple of
    4 KB, because such rows map to the same sets of the L1 cache (conflict misses)."""
    return torch.empty(T, K if K % PAGE_ELEMENTS else K + WIDTH, dtype=torch.bfloat16)[:, :K]


def row_words(x: Tensor | None) -> tuple[NativeArg, ...]:
    """Return the fields of `Rows` in structs.h."""
    return (None, 0) if x is None else (x, x.stride(0))


def tiled_shape(num_blocks: int, layers: int, heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    return (num_blocks, layers, heads, 2, block_size // TILE, TILE, head_dim)


def is_tiled(kv_cache: Tensor) -> bool:
    return kv_cache.dim() == 7


def cache_words(kv_cache: Tensor) -> tuple[NativeArg, ...]:
    """Return the fields of `Cache` in cache.h."""
    _, layers, heads, _, tiles, _, head_dim = kv_cache.shape
    return kv_cache, layers, heads, tiles * TILE, head_dim


def zeros_on_demand(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", large_pages: bool = False
) -> Tensor:
    """Return zeros. On a CPU, pages take no time and no memory until they are written, and are returned to
    the system when the last tensor in them is freed. Huge pages are faster to read, but writing the first
    byte of one allocates 2 MiB. Raise OSError if the system cannot map the memory."""
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OSError(f"Could not map {size / 2**20:.0f} MiB of memory ({error.strerror}).") from None
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE if large_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class Arena:
    """Allocates tensors that are too small to fill a huge page from shared huge pages."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros at the next free address, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            if size > len(self._rest):
                self._rest = zeros_on_demand((max(size, PIECE),), torch.uint8, large_pages=True)
            data, self._rest = self._rest[:size], self._rest[-(-size // LINE) * LINE :]
        return data.view(dtype).view(*shape)


_arena = Arena()
