"""How much of the machine's memory becomes KV cache, and how long a text may then be."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .config import EngineConfig
from .kernels.dispatch import use_triton
from .kernels.layer.gemm import split_k
from .kernels.layer.linear import MAX_ROWS
from .kernels.table import Table
from .models.config import ModelConfig
from .models.decoder import Model

if TYPE_CHECKING:
    from .drafters.base import Drafter

GPU_SHARE = 0.9  # of the device's memory, weights included
CPU_SHARE = 0.4  # of what is free
CPU_LIMIT = 4 << 30  # bytes; a CPU is too slow to fill more


class StepMemory(NamedTuple):
    """Bytes that the steps of an engine need on a GPU beside weights and K/V, at most.

    Attributes:
        rows: the request rows, `Table`.
        logits: of the largest step, in the one buffer for all.
        step: all else that the largest captured step needs, in the pool that all of them share.
        prefill: the same of the longest prefill.
    """

    rows: int
    logits: int
    step: int
    prefill: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {size:,}" for name, size in self._asdict().items())


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
    source = f"kv_cache_memory of {budget:,} bytes" if config.kv_cache_memory else f"{budget:,} spare bytes"
    if not config.kv_cache_memory and model.device.type == "cuda":
        needed = step_memory(config, model, window, drafter)
        budget, source = max(budget - sum(needed), 0), f"{source}, less what steps need ({needed}),"
    useful = config.max_num_seqs * -(-window // size)
    num_blocks = min(budget // per_block, useful)
    if num_blocks * size >= window:
        return num_blocks, window
    if config.max_model_len is None and num_blocks * size >= 256:
        return num_blocks, num_blocks * size
    raise ValueError(
        f"{source} hold the K/V of {num_blocks * size} tokens, too few for max_model_len={window}, which "
        f"takes {per_block * -(-window // size):,} bytes; give more, or lower max_model_len or max_num_seqs."
    )


def step_memory(
    config: EngineConfig, model: Model, max_context: int, drafter: Drafter | None = None
) -> StepMemory:
    """What steps need for texts of up to `max_context` tokens. `tests/nanospec/test_memory.py` compares it
    with what they allocate."""
    c, item, rows = model.config, model.dtype.itemsize, config.max_num_seqs
    table = Table.empty(rows, max_context, config.block_size, c.vocab_size, "meta")
    k = min(config.spec.max_k, drafter.max_drafts) if drafter is not None else 0
    tokens = max(rows, min(rows * (k + 1), MAX_ROWS))
    logits = tokens * c.vocab_size * item
    # What attention leaves of each piece of a long text, or of each of the programs that share a short one.
    pieces = -(-max_context // (512 if c.num_heads <= 2 * c.num_kv_heads else 1024))
    partials = max(tokens * pieces, tokens + 512 * (k + 1) // c.num_kv_heads)
    attention = 4 * partials * c.num_heads * (c.head_dim + 2)
    sampling = tokens * c.vocab_size // 4
    step = _activations(c, tokens, item) + max(attention, _products(c, tokens), sampling)
    if drafter is not None and drafter.runs_model:  # its logits, and once more while they are put together
        step += 2 * logits
    sizes = {config.max_num_batched_tokens, min(config.max_num_batched_tokens, MAX_ROWS)}
    prefill = max(_activations(c, size, item) + _products(c, size) for size in sizes)
    return StepMemory(sum(t.nbytes for t in table if isinstance(t, torch.Tensor)), logits, step, prefill)


def _activations(c: ModelConfig, tokens: int, item: int) -> int:
    """Bytes of what lives at once within a layer: its input, qkv, q, what attention gives, the residual, the
    MLP's inner values (gate and up too where they are not in one kernel) and the output."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    inner = c.intermediate_size * (1 if tokens <= MAX_ROWS else 4)
    return tokens * item * (5 * c.hidden_size + 3 * q + 2 * kv + inner)


def _products(c: ModelConfig, tokens: int) -> int:
    """Bytes of float32 sums, before the parts of a product are added up; longer inputs have none."""
    if tokens > MAX_ROWS:
        return 0
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    shapes = (q + 2 * kv, hidden, 1), (hidden, q, 1), (inner, hidden, 2), (hidden, inner, 1)
    return max(4 * tokens * split_k(n, columns)[0] * n * outputs for n, columns, outputs in shapes)


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
