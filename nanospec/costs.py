"""What a forward pass costs by the number of tokens it scores, measured."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.batch import Batch
from .models.decoder import Model

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens per pass at which the cost is measured
REPEATS = 3


@dataclass
class CostTable:
    """Milliseconds of a step by the number of tokens it scores, in ascending order of tokens."""

    tokens: list[int]
    ms: list[float]

    def __post_init__(self) -> None:
        for i in range(1, len(self.ms)):  # more tokens never cost less: smooth measurement noise away
            self.ms[i] = max(self.ms[i], self.ms[i - 1])

    def step(self, tokens: int) -> float:
        """ms of a step of `tokens` tokens, interpolated."""
        i = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        slope = (self.ms[i] - self.ms[i - 1]) / (self.tokens[i] - self.tokens[i - 1])
        return self.ms[i - 1] + (tokens - self.tokens[i - 1]) * slope


@torch.inference_mode()
def forward_cost(model: Model, kv_cache: Tensor, block_table: Tensor, block_size: int) -> CostTable:
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
    return CostTable(list(SIZES), times)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kv_shape(model: Model, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """The KV cache of a model: [layers, 2, Hkv, num_blocks, block_size, D]."""
    c = model.config
    return (c.num_layers, 2, c.num_kv_heads, num_blocks, block_size, c.head_dim)
