"""What steps take, measured: a forward pass by the number of tokens it scores, captured steps by bucket."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from .device import synchronize
from .graphs import Bucket, StepGraphs
from .kernels.batch import Batch
from .kernels.table import Table
from .models.decoder import Model

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per pass at which the time is measured
REPEATS = 3
SLEEP = 1 << 21  # cycles, about a millisecond; the host launches a step in a fraction of that
Rehearse = Callable[[int], AbstractContextManager[None]]
"""Fills so many request rows with what drafts, and empties them at the end of the `with` block."""


@torch.inference_mode()
def forward_ms(model: Model, kv_cache: Tensor, table: Table) -> dict[int, float]:
    """Milliseconds, the least of some, of a pass over so many tokens of the first row of an empty table (of
    copies of it, where its window is shorter). Writes nothing to the cache. More tokens never take less:
    that smooths the noise."""
    found: dict[int, float] = {}
    for n in SIZES:
        width = min(n, table.max_context)
        rows = torch.zeros(-(-n // width), dtype=torch.int32, device=model.device)
        batch = Batch.of_grid(table, rows, rows, rows + width, width, bound=width)
        batch = replace(batch, positions=torch.zeros_like(batch.positions), slots=batch.slots * 0 - 1)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            model.logits(model.forward(batch, kv_cache))
            synchronize(model.device)
            times.append((time.perf_counter() - start) * 1e3)
        found[n] = max(min(times), *found.values(), 0.0)
    return found


def captured_ms(graphs: StepGraphs, rehearse: Rehearse) -> dict[int, dict[int, float]]:
    """Milliseconds by batch size and K of all captured steps. To be called before the first request."""
    found: dict[int, dict[int, float]] = {}
    for bucket in tqdm(graphs.captures, desc="Timing steps", disable=None, leave=False):
        found.setdefault(bucket.batch, {})[bucket.k] = replay_ms(graphs, bucket, rehearse)
    return found


def replay_ms(graphs: StepGraphs, bucket: Bucket, rehearse: Rehearse, repeats: int = 5) -> float:
    """Milliseconds of one replay, the median of `repeats`. A step changes the rows that it reads, so each
    starts from rehearsed rows: all do the same work."""
    capture, times = graphs.captures[bucket], []
    for _ in range(repeats + 1):
        with rehearse(bucket.batch):
            capture.rows.copy_(torch.arange(bucket.batch, dtype=torch.int32))
            times.append(elapsed_ms(capture.replay, graphs.device))
    return statistics.median(times[1:])


def elapsed_ms(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds that `run` takes: on a GPU there, not counting how long the host takes to launch it."""
    synchronize(device)
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)  # while the host launches what follows, which then starts without a gap
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)
