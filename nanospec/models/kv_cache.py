"""The memory of a KV cache, and the blocks that change owners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.launch import use_triton
from ..kernels.native.mapped_memory import pages
from ..kernels.native.tiles import is_tiled
from .decoder import Model


def empty_cache(model: Model, num_blocks: int, block_size: int) -> Tensor:
    """Allocate the KV cache of a model, all zeros. A block in tiles is contiguous and fills large pages."""
    shape = model.kv_shape(num_blocks, block_size)
    if model.device.type != "cpu":
        return torch.zeros(shape, dtype=model.dtype, device=model.device)
    return zeros_on_demand(shape, model.dtype, large_pages=len(shape) == 7)  # in tiles


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype, large_pages: bool = False) -> Tensor:
    """Return zeros on the CPU, in pages that cost neither time nor memory before they are written."""
    memory = pages(math.prod(shape) * dtype.itemsize, large_pages)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def zero_blocks(kv_cache: Tensor, blocks: Sequence[int]) -> None:
    """Zero the blocks that get a new owner, where attention is `naive`: it multiplies masked values by 0, so
    a NaN of the previous owner would stay NaN. Kernels do not load masked values; compiled models never
    write NaN."""
    if not use_triton(kv_cache) and not is_tiled(kv_cache):
        for block in blocks:
            kv_cache[:, :, :, block] = 0
