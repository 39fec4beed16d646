"""The KV cache of a model: its shape, its memory and the blocks that change owners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.dispatch import use_triton
from ..kernels.native.mapped_memory import pages
from ..kernels.native.tiles import is_tiled, tiled_shape
from .decoder import Model


def kv_shape(model: Model, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Return [layers, 2, Hkv, num_blocks, block_size, D], or the tiled shape of a compiled model."""
    c = model.config
    if model.runs_compiled:
        return tiled_shape(num_blocks, c.num_layers, c.num_kv_heads, block_size, c.head_dim)
    return (c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim)


def empty_cache(model: Model, num_blocks: int, block_size: int) -> Tensor:
    """Allocate the KV cache of a model, all zeros. A tiled block is contiguous and fills large pages."""
    shape = kv_shape(model, num_blocks, block_size)
    return zeros_on_demand(shape, model.dtype, model.device, large_pages=model.runs_compiled)


def zeros_on_demand(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, large_pages: bool = False
) -> Tensor:
    """Return `torch.zeros`, on a CPU from pages that cost neither time nor memory before they are written."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = pages(math.prod(shape) * dtype.itemsize, large_pages)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def zero_blocks(kv_cache: Tensor, blocks: Sequence[int]) -> None:
    """Zero the blocks that get a new owner, where attention is `naive`: it multiplies masked values by 0, so
    a NaN of the previous owner would stay NaN. Kernels do not load masked values; compiled steps never
    write NaN."""
    if not use_triton(kv_cache) and not is_tiled(kv_cache):
        for block in blocks:
            kv_cache[:, :, :, block] = 0
