"""Batches, parameters and logits for the tests of sampling and verification, here and in tests/gpu."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling.sample import Params

S, M = 4, 3  # request rows, stop ids per row


def make_rows(q_len: list[int], base_len: list[int], uniform: bool, tree: bool = False) -> Batch:
    """Chains, or random trees, of the given lengths; no row has any pages."""
    widest = max([1, *q_len])
    lengths = torch.tensor(q_len, dtype=torch.int32)
    b = torch.arange(len(q_len), dtype=torch.int32)
    starts = b * widest if uniform else (lengths.cumsum(0) - lengths).int()
    total = len(q_len) * widest if uniform else max(sum(q_len), 1)
    positions = torch.zeros(total, dtype=torch.int32)
    ancestors = torch.zeros(total, dtype=torch.int64) if tree else None
    parents = torch.zeros(total, dtype=torch.int32) if tree else None
    rng = random.Random(sum(q_len))
    for start, n, base in zip(starts.tolist(), q_len, base_len):
        for i in range(n):
            parent = rng.randrange(i) if i and tree else i - 1
            positions[start + i] = base if i == 0 else positions[start + parent] + 1
            if ancestors is not None:
                above = int(ancestors[start + parent]) if i else 0
                ancestors[start + i] = above | 1 << i
            if parents is not None:
                parents[start + i] = max(parent, 0)
    return Batch(positions, positions, torch.zeros(len(q_len), 1, dtype=torch.int32), starts, lengths,
                torch.tensor(base_len, dtype=torch.int32), widest, 1000, ancestors, parents)  # fmt: skip


def make_params(V: int, **rows: object) -> Params:
    """Parameters of S request rows that change nothing, but for the given ones."""
    f32, i32 = torch.float32, torch.int32
    params = Params(
        temperature=torch.zeros(S, dtype=f32),
        top_k=torch.zeros(S, dtype=i32),
        top_p=torch.ones(S, dtype=f32),
        min_p=torch.zeros(S, dtype=f32),
        seed=torch.arange(S, dtype=torch.int64),
        min_len=torch.zeros(S, dtype=i32),
        stop_ids=torch.full((S, M), -1, dtype=i32),
        repetition=torch.ones(S, dtype=f32),
        presence=torch.zeros(S, dtype=f32),
        frequency=torch.zeros(S, dtype=f32),
        shaped=torch.zeros(S, dtype=torch.bool),
        bias=torch.zeros(S, V, dtype=f32),
        in_prompt=torch.zeros(S, V, dtype=torch.bool),
        output_counts=torch.zeros(S, V, dtype=i32),
    )
    for name, value in rows.items():
        getattr(params, name)[:] = torch.as_tensor(value)
    return params


def random_params(rng: random.Random, V: int) -> Params:
    """Different parameters in every row, extremes among them."""
    params = make_params(V)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for s in range(S):
        params.temperature[s] = rng.choice([0.0, 0.3, 1.0, 1.0, 2.5])
        params.top_k[s] = rng.choice([0, 0, 1, 2, V // 2, V, V + 5])
        params.top_p[s] = rng.choice([1.0, 1.0, 0.9, 0.5, 1e-4])
        params.min_p[s] = rng.choice([0.0, 0.0, 0.05, 0.7, 1.0])
        params.seed[s] = rng.randrange(-(1 << 63), 1 << 63)
        params.min_len[s] = rng.choice([0, 0, 8, 1000])
        params.stop_ids[s] = torch.tensor([rng.choice([-1, 0, V // 2, V - 1]) for _ in range(M)])
        params.repetition[s] = rng.choice([1.0, 1.3, 0.7])
        params.presence[s] = rng.choice([0.0, 0.6, -0.4])
        params.frequency[s] = rng.choice([0.0, 0.3, -0.2])
        params.shaped[s] = rng.random() < 0.6
    params.bias[:] = torch.randn(S, V, generator=generator) * (torch.rand(S, V, generator=generator) < 0.2)
    params.in_prompt[:] = torch.rand(S, V, generator=generator) < 0.2
    params.output_counts[:] = torch.randint(0, 3, (S, V), generator=generator)
    return params


def random_logits(rng: random.Random, T: int, V: int, dtype: torch.dtype) -> Tensor:
    """A different distribution per row: flat, peaked, full of ties, with -inf."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    logits = torch.randn(T, V, generator=generator)
    for t in range(T):
        kind = rng.randrange(5)
        if kind == 0:
            logits[t] *= 6
        elif kind == 1:
            logits[t] = (logits[t] * 2).round()  # ties
        elif kind == 2:
            logits[t, torch.rand(V, generator=generator) < 0.5] = -math.inf
            logits[t, rng.randrange(V)] = 1.0
        elif kind == 3:
            logits[t] = 0.0
    return logits.to(dtype)
