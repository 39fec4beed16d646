"""Tables, batches and logits for tests of sampling and speculation, here and in tests/gpu."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanospec.kernels import GENERATED
from nanospec.kernels.batch import Batch
from nanospec.kernels.native import library
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.verify import COUNTS, Verdict
from nanospec.kernels.table import Table

S = 4  # default number of request rows
NEUTRAL = {"top_p": 1, "repetition": 1, "max_len": 1000, "max_k": 63, "min_n": 1, "max_n": 3, "tree_width": 1}


def compiled(**functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions if a C++ compiler is available, else nothing."""
    return functions if library() is not None else {}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_table(V: int, num_rows: int = S, block_size: int = 16, **columns: Any) -> Table:
    """Return a table of requests with default parameters, and the given columns: one value or one per row.

    `tokens` determine its size; `stop_ids` may be fewer than the maximum."""
    tokens = torch.as_tensor(columns.get("tokens", [[0]] * num_rows))
    table = Table.empty(len(tokens), tokens.shape[1], block_size, V, "cpu")
    table.seed[:], table.stop_ids[:] = torch.arange(len(tokens)), -1
    for name, value in {**NEUTRAL, **columns}.items():
        value, column = torch.as_tensor(value), getattr(table, name)
        if name == "stop_ids":
            column = column[:, : value.shape[-1]]
        column[:] = value
    return table


def make_batch(
    q_len: Sequence[int], base_len: Sequence[int] | None = None, uniform: bool = True, tree: bool = False,
    parents: Sequence[int] | None = None, **tensors: Tensor,
) -> Batch:  # fmt: skip
    """Return a batch of chains, random trees or trees with the given `parents` (by flat index), without
    blocks. Batch row b belongs to request row b, and all tokens are 0, unless `tensors` override them."""
    B, widest = len(q_len), max([1, *q_len])
    lengths, base = torch.tensor(q_len, dtype=torch.int32), base_len or [0] * B
    starts = torch.arange(B, dtype=torch.int32) * widest if uniform else (lengths.cumsum(0) - lengths).int()
    total = B * widest if uniform else max(sum(q_len), 1)
    positions = torch.zeros(total, dtype=torch.int32)
    ancestors, above = torch.zeros(total, dtype=torch.int64), list(parents or [0] * total)
    rng = random.Random(sum(q_len))
    for start, n, first in zip(starts.tolist(), q_len, base):
        for i in range(n):
            if parents is None and i:
                above[start + i] = rng.randrange(i) if tree else i - 1
            parent = start + above[start + i]
            positions[start + i] = positions[parent] + 1 if i else first
            own = 1 << i if i < 63 else -1 << 63
            ancestors[start + i] = int(ancestors[parent]) | own if i else own
    trees = tree or parents is not None
    batch = Batch(
        rows=torch.arange(B, dtype=torch.int32), input_ids=torch.zeros(total, dtype=torch.int32),
        positions=positions, slots=positions, block_table=torch.zeros(B, 1, dtype=torch.int32),
        q_start=starts, q_len=lengths, base_len=torch.tensor(base, dtype=torch.int32),
        max_q_len=widest, max_kv_len=1000, ancestors=ancestors if trees else None,
        parents=torch.tensor(above, dtype=torch.int32) if trees else None,
    )  # fmt: skip
    return replace(batch, **tensors)  # type: ignore[arg-type]


def proposal_of(batch: Batch) -> Proposal:
    """Return a proposal of a batch's drafts, as from a draft model."""
    B, k = batch.num_rows, batch.max_q_len - 1
    drafts, zeros = torch.full((B, k), GENERATED, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    return Proposal(drafts, (batch.q_len - 1).clamp(min=0), drafts, zeros, zeros)


def emitted(verdict: Verdict) -> Tensor:
    """Return the tokens [B, Q] a step emitted, kept or not, padded with -1."""
    return verdict.report[:, COUNTS.value :][:, : verdict.path.shape[1]]


def real(batch: Batch, b: int | None = None) -> Tensor:
    """Return the flat indices of non-padding tokens, of batch row b or all rows."""
    spans = list(zip(batch.q_start.tolist(), batch.q_len.tolist()))
    return torch.cat([torch.arange(a, a + n) for a, n in (spans if b is None else [spans[b]])])


def random_table(rng: random.Random, V: int) -> Table:
    """Return a table with random sampling parameters per row, including extremes."""
    table = make_table(V)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for s in range(S):
        table.temperature[s] = rng.choice([0.0, 0.3, 1.0, 1.0, 2.5])
        table.top_k[s] = rng.choice([0, 0, 1, 2, V // 2, V, V + 5])
        table.top_p[s] = rng.choice([1.0, 1.0, 0.9, 0.5, 1e-4])
        table.min_p[s] = rng.choice([0.0, 0.0, 0.05, 0.7, 1.0])
        table.seed[s] = rng.randrange(-(1 << 63), 1 << 63)
        table.min_len[s] = rng.choice([0, 0, 8, 1000])
        table.stop_ids[s, :3] = torch.tensor([rng.choice([-1, 0, V // 2, V - 1]) for _ in range(3)])
        table.repetition[s] = rng.choice([1.0, 1.3, 0.7])
        table.presence[s] = rng.choice([0.0, 0.6, -0.4])
        table.frequency[s] = rng.choice([0.0, 0.3, -0.2])
        table.penalized[s] = rng.random() < 0.6
    table.bias[:] = torch.randn(S, V, generator=generator) * (torch.rand(S, V, generator=generator) < 0.2)
    table.in_prompt[:] = torch.rand(S, V, generator=generator) < 0.2
    table.output_counts[:] = torch.randint(0, 3, (S, V), generator=generator)
    return table


def random_logits(rng: random.Random, T: int, V: int, dtype: torch.dtype) -> Tensor:
    """Return logits with a random distribution per row: flat, peaked, with ties or with -inf."""
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
