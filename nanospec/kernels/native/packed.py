"""Layouts of weights and KV caches for the C++ kernels, their memory, and the matrix product.

A packed bfloat16 weight is a sequence of strips of 32 rows, each [K / 2, 32, 2]. The operand of one
instruction, two columns of 16 rows, is contiguous, and a strip is read sequentially.

A KV cache is [num_blocks, num_layers, Hkv, 2, block_size / 16, 16, D] (2: keys, values). The last two
dimensions are a tile: the elements of 16 positions, keys as [D / 2, 16, 2] and values as [8, D, 2], so that
the operand of one instruction is contiguous. So is a block, and in it the keys and then the values of a head,
in the order in which they are read.
"""

import contextlib
import math
import mmap
import struct
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layer.quantized import Quantized, as_integers
from . import NativeArg, call

WIDTH = 32  # rows per strip
MAX_GROUP = 64  # columns per scale of a quantized weight
STRIPS = 64  # strips of a quantized weight that are packed at once, to limit temporary memory
TILE = 16  # positions per tile
PAGE_ELEMENTS = 2048  # bfloat16 elements in 4 KB; same as in forward.h
PIECE = 64 << 20  # bytes that an arena allocates at once
LINE = 64  # bytes per cache line


class Packed(NamedTuple):
    """A packed weight."""

    data: Tensor  # [ceil(N / 32), K / 2, 32, 2] bfloat16 or [ceil(N / 32), K / group, bytes of a block] uint8
    shape: tuple[int, int]  # (N, K)
    bits: int = 16  # 16, 8 or 4
    group: int = 0  # columns per scale, 32 or 64, of a quantized weight
    has_minima: bool = False  # whether groups have a minimum
    factor: float = 1.0  # a power of two; stored scales and minima are divided by it

    def words(self, bias: Tensor | None = None) -> tuple[NativeArg, ...]:
        """Return the fields of `Weight` in structs.h."""
        form = self.bits, self.group, self.has_minima, double(self.factor), self.data[0].nbytes
        return self.data, bias, *self.shape, *form

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, K] of a quantized weight in bfloat16."""
        out = torch.empty(len(ids), self.shape[1], dtype=torch.bfloat16)
        call("nanospec_rows", *self.words(), ids.long().contiguous(), *row_words(out), len(ids))
        return out


def pack(weight: Tensor) -> Packed:
    """Return `weight` [N, K] bfloat16, K even, in strips."""
    N, K = weight.shape
    data = _arena.zeros((-(-N // WIDTH), K // 2, WIDTH, 2), weight.dtype)
    whole, rows = N // WIDTH, data.transpose(1, 2)  # [strips, 32, K / 2, 2]
    rows[:whole] = weight[: whole * WIDTH].view(-1, WIDTH, K // 2, 2)
    rows[-1, : N % WIDTH] = weight[whole * WIDTH :].view(-1, K // 2, 2)
    return Packed(data, (N, K))


def pack_quantized(weight: Quantized) -> Packed:
    """Return `weight` [N, K] in strips of blocks: for the columns of a group, the codes [2, group / 4, 16, 4]
    of 16 rows and four columns each, float16 scales [32], and minima [32] if there are any. Four-bit codes of
    16 columns share bytes with those of the next 16. Scales are divided by `factor` so that float16 holds
    them precisely."""
    weight = as_integers(weight)
    weight = weight.regrouped(math.gcd(weight.group, MAX_GROUP))
    (N, K), group, has_minima = weight.shape, weight.group, weight.minimum is not None
    largest = max(float(table.abs().max()) for table in weight.tables)
    factor = 2.0 ** max(math.frexp(largest)[1] - 15, -119)  # factor / 127 is normal in float32
    size = group * WIDTH * weight.bits // 8
    data = _arena.zeros((-(-N // WIDTH), K // group, size + 2 * WIDTH * (1 + has_minima)), torch.uint8)
    for first in range(0, len(data), STRIPS):
        rows = weight.rows(slice(first * WIDTH, (first + STRIPS) * WIDTH))
        missing, blocks = -len(rows.codes) % WIDTH, data[first : first + STRIPS]
        quads = F.pad(rows.codes, (0, 0, 0, missing)).contiguous().view(torch.int32)  # [32 S, K / 4]
        quads = quads.view(-1, 2, 16, K // group, group // 4)
        quads = quads.permute(0, 3, 1, 4, 2)  # [S, groups, 2, quads, 16]
        if weight.bits == 4:
            pairs = quads.unflatten(3, (-1, 2, 4))  # of four quads
            quads = pairs[:, :, :, :, 0] | pairs[:, :, :, :, 1] << 4
        blocks[..., :size] = quads.flatten(2).view(torch.uint8)
        tables = torch.stack(rows.tables)  # [1 or 2, 32 S, groups]
        halves = F.pad(tables / factor, (0, 0, 0, missing)).half().view(len(tables), -1, WIDTH, K // group)
        blocks[..., size:] = halves.permute(1, 3, 0, 2).flatten(2).contiguous().view(torch.uint8)
    return Packed(data, (N, K), weight.bits, group, has_minima, factor)


def linear(x: Tensor, weight: Packed, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] @ weight.T + bias in bfloat16, accumulated in float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(len(x), weight.shape[0])
    words = *weight.words(bias), *row_words(x), *row_words(out), len(x), torch.get_num_threads()
    call("nanospec_linear", *words)
    return out


def double(number: float) -> int:
    """Return the bits of a float64 as an int."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def empty_rows(T: int, K: int) -> Tensor:
    """Return an uninitialized tensor [T, K] bfloat16. Rows are padded if their stride would be a multiple of
    4 KB, because such rows map to the same sets of the L1 cache (conflict misses)."""
    return torch.empty(T, K if K % PAGE_ELEMENTS else K + WIDTH, dtype=torch.bfloat16)[:, :K]


def row_words(x: Tensor | None) -> tuple[NativeArg, ...]:
    """Return the fields of `Rows` in structs.h."""
    return (None, 0) if x is None else (x, x.stride(0))


def tiled_shape(num_blocks: int, layers: int, heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    return (num_blocks, layers, heads, 2, block_size // TILE, TILE, head_dim)


def cache_words(kv_cache: Tensor) -> tuple[NativeArg, ...]:
    """Return the fields of `Cache` in cache.h."""
    _, layers, heads, _, tiles, _, head_dim = kv_cache.shape
    return kv_cache, layers, heads, tiles * TILE, head_dim


def zeros_on_demand(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", large_pages: bool = False
) -> Tensor:
    """Return zeros. On a CPU, pages take no time and no memory until they are written, and are returned to
    the system when the last tensor in them is freed. Huge pages are faster to read, but writing the first
    byte of one allocates 2 MiB. Raise OSError (ENOMEM) if the system cannot map the memory."""
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
