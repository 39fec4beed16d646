"""What a step costs, measured."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from .kernels.batch import Batch
from .models.decoder import Model

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per pass at which the cost is measured
REPEATS = 3


class StepCosts:
    """Measured ms of a step, smoothed: more rows or tokens never cost less.

    Attributes:
        recorded: ms by captured batch size and K, ascending; empty if steps are packed. Every batch size
            needs K = 0; larger K may be missing where they cannot pay.
        packed: ms by number of tokens scored, ascending; empty if steps are recorded.
        propose: (rows, passes) -> ms that running a model takes. Lookup takes none.
    """

    def __init__(
        self,
        recorded: Mapping[int, Mapping[int, float]] | None = None,
        packed: Mapping[int, float] | None = None,
        propose: Callable[[int, int], float] = lambda rows, passes: 0.0,
    ) -> None:
        recorded, packed = recorded or {}, packed or {}
        if bool(recorded) == bool(packed) or any(0 not in by_k for by_k in recorded.values()):
            raise ValueError("Give the times of packed steps, or of recorded ones with K=0 for every batch.")
        self.recorded: dict[int, dict[int, float]] = {}
        least: dict[int, float] = {}  # by K, of smaller batches
        for size in sorted(recorded):
            self.recorded[size] = _rising({k: max(ms, least.get(k, 0.0)) for k, ms in recorded[size].items()})
            least |= self.recorded[size]
        self.packed = _rising(packed)
        self.propose = propose
        self._sizes, self._tokens, self._ms = [*self.recorded], [*self.packed], [*self.packed.values()]

    def by_k(self, batch: int) -> dict[int, float]:
        """ms by K of a recorded step, in the smallest captured batch that holds so many rows."""
        i = bisect_left(self._sizes, batch)
        if i == len(self._sizes):
            raise ValueError(f"A batch of {batch} exceeds the largest captured one, {self._sizes[-1]}.")
        return self.recorded[self._sizes[i]]

    def cost(self, batch: int, tokens: int) -> float:
        """ms of a step that scores so many tokens of so many rows, K + 1 of each if it is recorded; of
        packed steps interpolated."""
        if self.recorded:
            return self.by_k(batch)[tokens // batch - 1]
        n, ms = self._tokens, self._ms
        i = min(max(bisect_left(n, tokens), 1), len(n) - 1)
        return ms[i - 1] + (tokens - n[i - 1]) * (ms[i] - ms[i - 1]) / (n[i] - n[i - 1])

    def of_one_row(self) -> dict[int, float]:
        """ms of a step of one request by the number of tokens it scores, as far as measured."""
        return {k + 1: ms for k, ms in self.by_k(1).items()} if self.recorded else self.packed

    def report(self) -> dict[str, object]:
        """For the statistics."""
        if self.recorded:
            return {"step_ms_by_batch_and_k": self.recorded}
        return {"step_ms_by_tokens": self.packed}


def _rising(ms: Mapping[int, float]) -> dict[int, float]:
    return dict(zip(sorted(ms), accumulate((ms[n] for n in sorted(ms)), max)))


@torch.inference_mode()
def forward_cost(model: Model, kv_cache: Tensor, block_table: Tensor, block_size: int) -> StepCosts:
    """Time the model by the number of tokens scored for one row of `block_table`. Writes nothing to the
    cache."""
    zeros = torch.zeros(SIZES[-1], dtype=torch.int32, device=model.device)
    window = block_table.shape[1] * block_size
    times = []
    for n in SIZES:
        times.append(math.inf)
        for _ in range(REPEATS):
            batch = Batch(
                positions=zeros[:n],
                slots=zeros[:n] - 1,
                block_table=block_table[:1],
                q_start=zeros[:1],
                q_len=zeros[:1] + n,
                base_len=zeros[:1],
                max_q_len=n,
                max_kv_len=min(n, window),
            )
            start = time.perf_counter()
            model.logits(model.forward(zeros[:n], kv_cache, batch))
            synchronize(model.device)
            times[-1] = min(times[-1], (time.perf_counter() - start) * 1e3)
    return StepCosts(packed=dict(zip(SIZES, times)))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kv_shape(model: Model, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """The KV cache of a model: [layers, 2, Hkv, num_blocks, block_size, D]."""
    c = model.config
    return (c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim)
