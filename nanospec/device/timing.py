"""Measure the time of steps before the first request. Captured steps are timed by bucket. For other steps,
the forward pass is timed by number of tokens, and attention by the number of cached positions it reads."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm

from ..drafters.estimates import StepCosts
from ..kernels import MAX_DRAFTS, MAX_TREE_WIDTH
from ..kernels.batch import Batch, Chunk
from ..kernels.sampling.sample import sample
from ..kernels.table import Table
from ..kernels.transfer import synchronize
from ..models.decoder import Model
from .graphs import Bucket, StepGraphs
from .step import Step

# Numbers of tokens to time a forward pass with, on both sides of its first jumps in time: at 12 (the most
# for which the C++ matmul reads each weight once) or, with AMX, at multiples of 16 or 32.
SIZES = (1, 2, 4, 8, 12, 13, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)
# The cost of a draft is a small difference between the times of short passes, and noise of 5 % could change
# its sign. Passes of LONG_TOKENS or more get FEW_REPEATS; after PATIENCE_SECONDS, all get LATE_REPEATS. Those
# of up to FEW_TOKENS have their own time limit, since longer passes of large models use up a common one.
LONG_TOKENS, REPEATS, FEW_REPEATS, LATE_REPEATS, PATIENCE_SECONDS = 64, 9, 3, 2, 2.0
FEW_TOKENS = 8
# Batches to time attention with: rows, tokens per row, and bytes of K/V, more than the CPU's cache holds.
ATTENTION_ROWS, ATTENTION_TOKENS = 8, (1, 4)
ATTENTION_BYTES = 64 << 20
SLEEP = 1 << 21  # GPU cycles, about 1 ms, in which the host launches a step
CONTEXT, PERIOD = 1024, 7  # length and period of the text of dummy rows, in tokens
FillRows = Callable[[int], AbstractContextManager[None]]
"""Fills a number of request rows with text to draft from, and empties them at the end of the `with` block."""
Barrier = Callable[[], object]
"""Queues a barrier with the other devices of a split model, so that waiting for them is not measured."""


def step_costs(
    step: Step, max_k: int, graphs: StepGraphs | None, num_blocks: int, barrier: Barrier = lambda: None
) -> StepCosts:
    """Time steps of all sizes, captured ones if `graphs` is given. Call it before the first request."""
    table = step.table
    if graphs is None:
        by_tokens = forward_ms(step.model, step.kv_cache, table, table.num_rows * (max_k + 1))
        attention = attention_ms(step.model, table, by_tokens)
        return StepCosts({table.num_rows: by_tokens}, attention=attention)
    if graphs.lazy:  # only captured steps can be timed
        graphs.capture_all()
    fill_rows, times = partial(dummy_rows, table, num_blocks), dict[int, dict[int, float]]()
    for bucket in tqdm(graphs.buckets(), desc="Timing steps", disable=None, leave=False):
        num_tokens = bucket.batch_size * (bucket.k + 1)
        times.setdefault(bucket.batch_size, {})[num_tokens] = replay_ms(graphs, bucket, fill_rows, barrier)
    for row, drafter in product(range(table.num_rows), step.drafters):
        drafter.release(row)  # discard its state from the dummy rows
    return StepCosts(times, captured=True)


@torch.inference_mode()
def forward_ms(model: Model, kv_cache: Tensor, table: Table, max_tokens: int) -> dict[int, float]:
    """Return the milliseconds of a forward pass with sampling, by number of tokens: for all SIZES up to the
    first of at least `max_tokens`. The tokens are in the first row of an empty table, or in copies of it if
    they exceed the context length. Writes nothing to the cache."""
    sizes = [n for i, n in enumerate(SIZES) if i < 2 or SIZES[i - 1] < max_tokens]
    batches = {}
    for n in sizes:
        width = min(n, table.max_context)
        batches[n] = Batch.from_chunks(table, [Chunk(0, 0, width)] * -(-n // width), prefill=False)
    few = {n: batch for n, batch in batches.items() if n <= FEW_TOKENS}
    many = {n: batch for n, batch in batches.items() if n > FEW_TOKENS}
    return _min_ms(model, kv_cache, table, few) | _min_ms(model, kv_cache, table, many)


@torch.inference_mode()
def attention_ms(model: Model, table: Table, by_tokens: Mapping[int, float]) -> tuple[float, float]:
    """Return the time that attention adds to the times `by_tokens` of `forward_ms`, as two numbers: ms per
    cached position of a row, and ms per cached position and token scored.

    The passes read a temporary cache that has been filled: unwritten memory is mapped to one page of zeros by
    the system, so reading it would be three times as fast. The table must be empty.
    """
    B, size, device = min(ATTENTION_ROWS, table.num_rows), table.block_size, table.device
    bytes_per_block = B * size * model.config.kv_bytes_per_token(model.dtype)
    blocks = min(max(ATTENTION_BYTES // bytes_per_block, 1), table.max_blocks)
    context = min(blocks * size, table.max_context) - max(ATTENTION_TOKENS)
    if context < 1:
        return 0.0, 0.0
    kv_cache = model.allocate_kv_cache(B * blocks, size).zero_()
    block_table = torch.arange(B * blocks, dtype=torch.int32, device=device).view(B, blocks)
    table = table._replace(block_table=block_table, max_blocks=blocks)
    chunks = {q: [Chunk(row, context, q) for row in range(B)] for q in ATTENTION_TOKENS}
    batches = {q: Batch.from_chunks(table, chunks[q], prefill=False) for q in chunks}
    times, costs = _min_ms(model, kv_cache, table, batches), StepCosts({B: by_tokens})
    few, many = ATTENTION_TOKENS
    low, high = ((times[q] - costs.cost(B, B * q)) / (B * context) for q in ATTENTION_TOKENS)
    query = max(high - low, 0.0) / (many - few)
    return max(low - few * query, 0.0), query


def _min_ms(model: Model, kv_cache: Tensor, table: Table, batches: Mapping[int, Batch]) -> dict[int, float]:
    """Return the minimum milliseconds of a forward pass with sampling for each batch, without writing to the
    cache. The batches are timed in turns, so that a busy moment of the machine affects them alike."""
    times = dict.fromkeys(batches, math.inf)
    batches = {key: replace(batch, slots=torch.full_like(batch.slots, -1)) for key, batch in batches.items()}
    alone = model.num_devices == 1  # several devices must run the same passes regardless of time
    deadline = time.perf_counter() + (PATIENCE_SECONDS if alone else math.inf)
    for i, (key, batch) in product(range(REPEATS), batches.items()):
        start = time.perf_counter()
        repeats = FEW_REPEATS if batch.num_tokens >= LONG_TOKENS or not alone else REPEATS
        if i >= (LATE_REPEATS if start > deadline else repeats):
            continue
        sample(model.logits(model.forward(batch, kv_cache)), table, batch)
        synchronize(model.device)
        times[key] = min((time.perf_counter() - start) * 1e3, times[key])
    return times


def replay_ms(
    graphs: StepGraphs, bucket: Bucket, fill_rows: FillRows, barrier: Barrier = lambda: None, repeats: int = 5
) -> float:
    """Return the median milliseconds of `repeats` replays of a bucket. A step changes the rows that it reads,
    so they are filled again before each replay."""
    times = []
    graphs.send([*range(bucket.batch_size)])
    for _ in range(repeats + 1):
        with fill_rows(bucket.batch_size):
            times.append(elapsed_ms(graphs.captures[bucket].replay, graphs.device, barrier))
    return statistics.median(times[1:])


def elapsed_ms(run: Callable[[], None], device: torch.device, barrier: Barrier) -> float:
    """Return the milliseconds that `run` takes. On a GPU this is the time on the device, without the time
    that the host takes to launch it."""
    synchronize(device)
    if device.type != "cuda":
        barrier()
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)  # keeps the GPU busy during the launches, so that they run without a gap
    barrier()
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


@contextmanager
def dummy_rows(table: Table, num_blocks: int, count: int, context: int = CONTEXT) -> Iterator[None]:
    """Fill the first `count` rows with greedy requests of up to `context` tokens of periodic text, for which
    n-gram lookup proposes all drafts, and with blocks spread over the cache. Empty them at the end."""
    length, device, rows = table.max_context, table.device, slice(0, count)
    blocks = torch.arange(count * table.max_blocks, device=device) % num_blocks
    table.tokens[rows] = torch.arange(length, device=device).int() % min(PERIOD, table.vocab_size)
    table.block_table[rows] = blocks.view(count, table.max_blocks).int()
    table.num_tokens[rows] = max(min(context, length // 2, length - MAX_DRAFTS - 1), 1)
    table.max_len[rows], table.max_k[rows] = length, MAX_DRAFTS
    table.min_n[rows], table.max_n[rows], table.tree_width[rows] = 1, 1, MAX_TREE_WIDTH
    table.stop_ids[rows] = -1
    try:
        yield
    finally:
        for column in (table.num_tokens, table.max_len, table.max_k, table.block_table, table.finished):
            column[rows] = 0
