"""What a forward pass takes by the number of tokens it scores, measured."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import replace

import torch
from torch import Tensor

from .device import synchronize
from .kernels.batch import Batch
from .kernels.table import Table
from .models.decoder import Model

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per pass at which the time is measured
REPEATS = 3


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


def interpolated(ms: dict[int, float], tokens: int) -> float:
    """The time of so many tokens between those measured, or beyond them."""
    n = list(ms)
    i = min(max(bisect_left(n, tokens), 1), len(n) - 1)
    return ms[n[i - 1]] + (tokens - n[i - 1]) * (ms[n[i]] - ms[n[i - 1]]) / (n[i] - n[i - 1])
