"""How much of the machine's memory becomes KV cache, and how long a text may then be."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .config import EngineConfig
from .kernels.dispatch import use_triton
from .models.decoder import Model

if TYPE_CHECKING:
    from .drafters.base import Drafter

GPU_SHARE = 0.9  # of the device's memory, weights included
CPU_SHARE = 0.4  # of what is free
CPU_LIMIT = 4 << 30  # bytes; a CPU is too slow to fill more


def plan_cache(config: EngineConfig, model: Model, drafter: Drafter | None = None) -> tuple[int, int]:
    """(number of KV blocks, max_model_len) for this model on this machine. A block has room for the same
    tokens in the drafter's cache, if it has one.

    Raises ValueError when the window is longer than a model's, or the memory too small for it.
    """
    own, whose = model.config.max_position_embeddings, "model"
    if drafter is not None and drafter.max_context is not None and drafter.max_context < own:
        own, whose = drafter.max_context, "draft model"
    window = config.max_model_len or own
    if window > own:
        raise ValueError(f"max_model_len={window} is beyond the {whose}'s own window of {own} tokens.")
    size = config.block_size
    per_token = model.config.kv_bytes_per_token(model.dtype)
    per_block = size * (per_token + (drafter.kv_bytes_per_token if drafter is not None else 0))
    budget = config.kv_cache_memory or spare_memory(model.device)
    useful = config.max_num_seqs * -(-window // size)
    num_blocks = min(budget // per_block, useful)
    if num_blocks * size >= window:
        return num_blocks, window
    if config.max_model_len is None and num_blocks * size >= 256:
        return num_blocks, num_blocks * size
    raise ValueError(
        f"kv_cache_memory of {budget:,} bytes holds {num_blocks * size} tokens, too few for max_model_len="
        f"{window}; raise it to {per_block * -(-window // size):,} or lower max_model_len."
    )


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.zeros` whose untouched pages cost neither time nor memory on a CPU: the system gives each page,
    filled with zeros, when it is first written, and takes all back when the tensor dies."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not on Linux; a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # of which the first byte costs 2 MiB
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def zero_blocks(kv_cache: torch.Tensor, blocks: Sequence[int]) -> None:
    """Zero blocks that change hands. On a CPU attention multiplies what it masks by 0, which leaves a NaN of
    the previous owner a NaN; the kernels do not load it in the first place."""
    if not use_triton(kv_cache):
        for block in blocks:
            kv_cache[:, :, :, block] = 0


def spare_memory(device: torch.device) -> int:
    """Bytes that the KV cache may take on this device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - GPU_SHARE) * total), 0)
    return min(int(_free_cpu_memory() * CPU_SHARE), CPU_LIMIT)


def _free_cpu_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kv_shape(model: Model, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """The KV cache of a model: [layers, 2, Hkv, num_blocks, block_size, D]."""
    c = model.config
    return (c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim)
