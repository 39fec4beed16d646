"""What steps take, measured before the first request: captured steps by bucket; of steps that are not
captured the forward pass by the number of tokens that it scores, and its attention by what it reads."""

from __future__ import annotations

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
from ..kernels.batch import Batch
from ..kernels.sampling.sample import sample
from ..kernels.table import Table
from ..kernels.transfer import synchronize
from ..models.decoder import Model
from .graphs import Bucket, StepGraphs
from .step import Step

# Tokens per pass at which the time is measured: also on both sides of where it jumps, which is at 12 (up to
# which a compiled product reads a weight once) or, with AMX, at every 16 or 32. Between them it grows evenly.
# Beyond, it goes on as between the last two: they have a jump between them.
SIZES = (1, 2, 4, 8, 12, 13, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)
# What a draft costs a step is a small difference of the times of short passes, whose sign noise of 5 % would
# turn. Passes of LONG tokens get FEW_REPEATS, and after PATIENCE seconds every pass gets LATE_REPEATS in all.
LONG, REPEATS, FEW_REPEATS, LATE_REPEATS, PATIENCE = 64, 9, 3, 2, 2.0
# Of the passes that show what attention takes: rows, and tokens of each; bytes of keys and values, too many
# for a processor's cache to keep them while the weights are read.
ATTENTION_ROWS, ATTENTION_TOKENS = 8, (1, 4)
ATTENTION_BYTES = 64 << 20
SLEEP = 1 << 21  # cycles, about a millisecond; the host launches a step in a fraction of that
CONTEXT, PERIOD = 1024, 7  # of the texts of rehearsed rows, in tokens
Rehearse = Callable[[int], AbstractContextManager[None]]
"""Fills so many request rows with what drafts, and empties them at the end of the `with` block."""
Meet = Callable[[], object]
"""Queues a wait for the other devices of a split model, so that waiting for them is not measured."""


def step_costs(
    step: Step, max_k: int, graphs: StepGraphs | None, num_blocks: int, meet: Meet = tuple
) -> StepCosts:
    """Time steps of all sizes, captured if there are `graphs`. To be called before the first request."""
    table = step.table
    if graphs is None:
        packed = forward_ms(step.model, step.kv_cache, table, table.num_rows * (max_k + 1))
        return StepCosts(None, packed, step.draft_times, attention_ms(step.model, table, packed))
    if graphs.lazy:  # only captured steps can be timed
        graphs.capture_all()
    rehearse, found = partial(rehearsal, table, num_blocks), dict[int, dict[int, float]]()
    for bucket in tqdm(graphs.buckets(), desc="Timing steps", disable=None, leave=False):
        found.setdefault(bucket.batch, {})[bucket.k] = replay_ms(graphs, bucket, rehearse, meet=meet)
    for row, drafter in product(range(table.num_rows), step.drafters):
        drafter.release(row)  # what it remembers of the rehearsal
    return StepCosts(captured=found)


@torch.inference_mode()
def forward_ms(model: Model, kv_cache: Tensor, table: Table, most: int) -> dict[int, float]:
    """Return the milliseconds, the least of some, of a pass over so many tokens of the first row of an empty
    table (of copies of it, where its window is shorter) and of choosing the next ones, up to the first size
    of at least `most`. Writes nothing to the cache."""
    sizes = [n for i, n in enumerate(SIZES) if i < 2 or SIZES[i - 1] < most]
    batches = {}
    for n in sizes:
        width = min(n, table.max_context)
        rows = torch.zeros(-(-n // width), dtype=torch.int32, device=model.device)
        batches[n] = Batch.of_grid(table, rows, rows, rows + width, width, bound=width)
    return _least_ms(model, kv_cache, table, batches)


@torch.inference_mode()
def attention_ms(model: Model, table: Table, by_tokens: Mapping[int, float]) -> tuple[float, float]:
    """Return what attention adds to the times `by_tokens` of `forward_ms`: ms for each cached position of a
    row, and ms for each token that is scored there.

    The passes read a cache of their own, since pages that nothing was written to are one page of zeros for
    the system, and three times as fast. To be called while the table is empty.
    """
    B, size, device = min(ATTENTION_ROWS, table.num_rows), table.block_size, table.device
    per_page = B * size * model.config.kv_bytes_per_token(model.dtype)
    pages = min(max(ATTENTION_BYTES // per_page, 1), table.max_blocks)
    context = min(pages * size, table.max_context) - max(ATTENTION_TOKENS)
    if context < 1:
        return 0.0, 0.0
    kv_cache = model.empty_cache(B * pages, size).zero_()
    block_table = torch.arange(B * pages, dtype=torch.int32, device=device).view(B, pages)
    table = table._replace(block_table=block_table, max_blocks=pages)
    rows = torch.arange(B, dtype=torch.int32, device=device)
    first = torch.full_like(rows, context)
    counts = {q: torch.full_like(rows, q) for q in ATTENTION_TOKENS}
    batches = {q: Batch.of_grid(table, rows, first, n, q, context + q) for q, n in counts.items()}
    times, costs = _least_ms(model, kv_cache, table, batches), StepCosts(packed=by_tokens)
    few, many = ATTENTION_TOKENS
    low, high = ((times[q] - costs.cost(B, B * q)) / (B * context) for q in ATTENTION_TOKENS)
    query = max(high - low, 0.0) / (many - few)
    return max(low - few * query, 0.0), query


def _least_ms(model: Model, kv_cache: Tensor, table: Table, batches: Mapping[int, Batch]) -> dict[int, float]:
    """Return milliseconds by key, the least of some; nothing is written to the cache. The batches take turns,
    so that no busy moment of the machine falls on one alone."""
    times = dict.fromkeys(batches, math.inf)
    batches = {key: replace(batch, slots=torch.full_like(batch.slots, -1)) for key, batch in batches.items()}
    alone = model.num_devices == 1  # several devices must do the same
    deadline = time.perf_counter() + (PATIENCE if alone else math.inf)
    for i, (key, batch) in product(range(REPEATS), batches.items()):
        start = time.perf_counter()
        repeats = FEW_REPEATS if batch.num_tokens >= LONG or not alone else REPEATS
        if i >= (LATE_REPEATS if start > deadline else repeats):
            continue
        sample(model.logits(model.forward(batch, kv_cache)), table, batch)
        synchronize(model.device)
        times[key] = min((time.perf_counter() - start) * 1e3, times[key])
    return times


def replay_ms(
    graphs: StepGraphs, bucket: Bucket, rehearse: Rehearse, repeats: int = 5, meet: Meet = tuple
) -> float:
    """Return the milliseconds of one replay, the median of `repeats`. A step changes the rows that it reads,
    so each starts from rehearsed rows: all do the same work."""
    times = []
    graphs.send([*range(bucket.batch)])
    for _ in range(repeats + 1):
        with rehearse(bucket.batch):
            times.append(elapsed_ms(graphs.captures[bucket].replay, graphs.device, meet))
    return statistics.median(times[1:])


def elapsed_ms(run: Callable[[], None], device: torch.device, meet: Meet) -> float:
    """Return the milliseconds that `run` takes: on a GPU there, not counting how long the host takes to
    launch it."""
    synchronize(device)
    if device.type != "cuda":
        meet()
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)  # while the host launches what follows, which then starts without a gap
    meet()
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


@contextmanager
def rehearsal(table: Table, num_blocks: int, count: int, context: int = CONTEXT) -> Iterator[None]:
    """Fill the first `count` rows with greedy requests of up to `context` tokens of periodic text, which
    n-gram lookup drafts in full, on pages spread over the cache; empty them at the end."""
    length, device, rows = table.max_context, table.device, slice(0, count)
    pages = torch.arange(count * table.max_blocks, device=device) % num_blocks
    table.tokens[rows] = torch.arange(length, device=device).int() % min(PERIOD, table.vocab_size)
    table.block_table[rows] = pages.view(count, table.max_blocks).int()
    table.num_tokens[rows] = max(min(context, length // 2, length - MAX_DRAFTS - 1), 1)
    table.max_len[rows], table.limit[rows] = length, MAX_DRAFTS
    table.min_n[rows], table.max_n[rows], table.width[rows] = 1, 1, MAX_TREE_WIDTH
    table.stop_ids[rows] = -1
    try:
        yield
    finally:
        for column in (table.num_tokens, table.max_len, table.limit, table.block_table, table.finished):
            column[rows] = 0
