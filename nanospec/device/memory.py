"""How much of the machine's memory becomes KV cache, and how long a text may then be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..config import EngineConfig
from ..kernels.launch import arch
from ..kernels.layer.split_kv import split_kv
from ..kernels.layer.tiling import plan
from ..kernels.table import Table
from ..models.config import ModelConfig
from ..models.decoder import Model
from .graphs import MAX_STEP_TOKENS, batch_sizes

if TYPE_CHECKING:
    from ..drafters.base import Drafter

GPU_SHARE = 0.9  # of the device's memory, weights included
CPU_SHARE = 0.4  # of what is free
PIECE = 64  # tokens, in steps of which the plan looks at pieces of prompts
CPU_LIMIT = 4 << 30  # bytes; a CPU is too slow to fill more


class StepMemory(NamedTuple):
    """Bytes that the steps of an engine need on a GPU beside weights and K/V, at most.

    Attributes:
        rows: the request rows, `Table`.
        logits: of the largest step, in the one buffer for all.
        step: all else that the largest captured step needs, in the pool that all of them share.
        prefill: the same of the longest prefill, or of a step that is not captured.
    """

    rows: int
    logits: int
    step: int
    prefill: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {size:,}" for name, size in self._asdict().items())


class MemoryPlan(NamedTuple):
    """Bytes of a device that an engine takes, all of them for as long as it lives.

    Attributes:
        weights, draft_weights: of the model and of who guesses for it.
        kv_cache, draft_kv_cache: likewise; where pages are made on demand, when they are full.
        rows: the request rows, `Table`.
        steps: what steps need on a GPU beside all this (`StepMemory`), captured ones included.
    """

    weights: int
    draft_weights: int
    kv_cache: int
    draft_kv_cache: int
    rows: int
    steps: int

    def __str__(self) -> str:
        sizes = {name.replace("_", " "): size / 1e6 for name, size in self._asdict().items()}
        return f"{sum(self) / 1e6:,.1f} MB: " + ", ".join(f"{name} {mb:,.1f}" for name, mb in sizes.items())


def memory_plan(
    config: EngineConfig, model: Model, drafter: Drafter | None, tokens: int, rows: Table
) -> MemoryPlan:
    """What an engine takes whose cache holds so many tokens."""
    parts = () if drafter is None else drafter.parts
    steps = StepMemory(0, 0, 0, 0)
    if model.device.type == "cuda":
        steps = step_memory(config, model, rows.max_context, drafter)._replace(rows=0)
    return MemoryPlan(
        weights=model.weight_bytes,
        draft_weights=sum(part.weight_bytes for part in parts),
        kv_cache=tokens * model.config.kv_bytes_per_token(model.dtype),
        draft_kv_cache=tokens * (0 if drafter is None else drafter.kv_bytes_per_token),
        rows=sum(t.nbytes for t in rows if isinstance(t, torch.Tensor)),
        steps=sum(steps),
    )


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
    budget = config.kv_cache_memory or spare_memory(model.device, model.num_ranks)
    source = f"kv_cache_memory of {budget:,} bytes" if config.kv_cache_memory else f"{budget:,} spare bytes"
    if not config.kv_cache_memory and model.device.type == "cuda":
        needed = step_memory(config, model, window, drafter)
        budget, source = max(budget - sum(needed), 0), f"{source}, less what steps need ({needed}),"
    useful = config.max_num_seqs * -(-window // size)
    num_blocks = min(budget // per_block, useful)
    if config.max_model_len is None and 256 <= num_blocks * size < window:
        window = num_blocks * size
    if num_blocks * size >= window:
        _check_rows(config, model, window)
        return num_blocks, window
    raise ValueError(
        f"{source} hold the K/V of {num_blocks * size} tokens, too few for max_model_len={window}, which "
        f"takes {per_block * -(-window // size):,} bytes; give more, or lower max_model_len or max_num_seqs."
    )


def _check_rows(config: EngineConfig, model: Model, window: int) -> None:
    """Raise ValueError if the request rows alone are more than a CPU has left: it would give them, and kill
    the process when they are written."""
    if model.device.type != "cpu":
        return
    table = Table.empty(config.max_num_seqs, window, config.block_size, model.config.vocab_size, "meta")
    needed = sum(t.nbytes for t in table if isinstance(t, torch.Tensor))
    if needed > (free := _free_cpu_memory()):
        raise ValueError(
            f"max_num_seqs={config.max_num_seqs} takes {needed:,} bytes for the rows of as many requests, "
            f"and {free:,} are free; lower max_num_seqs."
        )


def step_memory(
    config: EngineConfig, model: Model, max_context: int, drafter: Drafter | None = None
) -> StepMemory:
    """What steps need for texts of up to `max_context` tokens. `tests/nanospec/device/test_memory.py`
    compares it with what they allocate."""
    c, item, rows = model.config, model.dtype.itemsize, config.max_num_seqs
    table = Table.empty(rows, max_context, config.block_size, c.vocab_size, "meta")
    k = min(config.spec.max_k, drafter.max_drafts) if drafter is not None else 0
    target, most, ranks = arch(model.like), max(MAX_STEP_TOKENS, rows), model.num_ranks
    ks = {0, k, *(n for n in config.spec.ks if n < k)}
    steps = [(b, n + 1) for b in batch_sizes(rows) for n in ks if b * (n + 1) <= most]
    tokens = max(b * q for b, q in steps)
    logits = tokens * c.vocab_size * item
    attention = max(_units(c, b, q, max_context, b * q, target) for b, q in steps)
    sampling = tokens * c.vocab_size // 4
    gathered = 2 * logits + logits // ranks if ranks > 1 else 0  # a part, all parts, and side by side
    step = _activations(c, tokens, item) + max(attention, _parts(c, tokens, item, target), sampling, gathered)
    if drafter is not None and drafter.runs_model:  # its logits, and once more while they are put together
        step += 2 * logits
    longest = config.max_num_batched_tokens
    # Fewer tokens may keep more, since the cache is divided then; so may several prompts.
    pieces = [(1 << i, n) for n in range(longest, 0, -PIECE) for i in range(rows.bit_length())]
    units = max(_units(c, b, -(-n // b), max_context, n + PIECE - 1, target) for b, n in pieces)
    prefill = _activations(c, longest, item) + max(units, _parts(c, longest, item, target))
    prefill = max(prefill, _exchanged(c, longest, item, ranks))
    # While a step is captured, the largest lies in the graphs' pool and another one is run to warm up.
    sizes = logits, step, max(step, prefill)
    return StepMemory(sum(t.nbytes for t in table if isinstance(t, torch.Tensor)), *sizes)


def _units(c: ModelConfig, rows: int, q_len: int, kv_len: int, tokens: int, target: str) -> int:
    """Bytes of the partial results of attention."""
    split = split_kv(rows, q_len, kv_len, (c.num_heads, c.num_kv_heads, c.head_dim), target)
    return 4 * split.units * tokens * c.num_heads * (c.head_dim + 5)


def _activations(c: ModelConfig, tokens: int, item: int) -> int:
    """Bytes of what lives at once within a layer: the residual stream before and after, q, k and v, what
    attention gives, the MLP's inner values, what waits for a norm of its own."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    stream = item * 2 * c.hidden_size + 4 * -(-c.hidden_size // 64)
    hidden = c.hidden_size * (2 if c.out_norms else 1)
    return tokens * (2 * stream + item * (hidden + 3 * q + 2 * kv + c.intermediate_size))


def _exchanged(c: ModelConfig, tokens: int, item: int, ranks: int) -> int:
    """Bytes of what ranks exchange: the largest are the rows of the embedding, of which each has its own,
    without those of others, and everybody's."""
    return item * tokens * c.hidden_size * (ranks + 2) if ranks > 1 else 0


def _parts(c: ModelConfig, tokens: int, item: int, arch: str) -> int:
    """Bytes of float32 sums that products of up to so many tokens keep before their parts are added up."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    sizes = {tokens, *(1 << i for i in range(tokens.bit_length()))}  # more tokens may need no parts apart
    shapes = (q + 2 * kv, hidden, c.head_dim), (hidden, q, 1), (2 * inner, hidden, 16), (hidden, inner, 1)
    tilings = ((size, n, plan(size, n, k, arch, item, unit)) for size in sizes for n, k, unit in shapes)
    return max(4 * t.splits * size * -(-n // t.rows) * t.rows * t.apart for size, n, t in tilings)


def spare_memory(device: torch.device, sharing: int = 1) -> int:
    """Bytes that the KV cache may take on this device, on a CPU one of the processes `sharing` it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - GPU_SHARE) * total), 0)
    return min(int(_free_cpu_memory() * CPU_SHARE), CPU_LIMIT) // sharing


def _free_cpu_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
