"""Requests with known keys, values and queries at every position, for tests of attention.

A request can be computed alone or in a batch, with any numbers of cached tokens and queries; the result at a
position must be the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import MAX_QUERIES, Batch
from nanospec.kernels.launch import forced
from nanospec.kernels.layer import paged, split_kv
from nanospec.kernels.layer.attention import attention
from tests.kernels.batches import ints, make_batch

SCALE = 0.1  # of the scores
Part = tuple[int, int, int]  # request, cached tokens, queries


@dataclass
class Texts:
    """R requests of up to L tokens. q [R, L, Hq, D]; cache [2, Hkv, num_blocks, block_size, D]; the blocks
    of a request are scattered, and entries of no request are NaN."""

    q: Tensor
    cache: Tensor
    block_table: Tensor
    softcap: float | None = None

    @classmethod
    def random(
        cls, lengths: Sequence[int], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
    ) -> Texts:
        """Return requests of the given lengths, with `heads` = (Hq, Hkv, D)."""
        num_heads, num_kv_heads, head_dim = heads
        g = torch.Generator().manual_seed(0)
        blocks = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(blocks) + 2, generator=g).int()
        size = (2, num_kv_heads, len(order), block_size, head_dim)
        cache = torch.full(size, float("nan"), dtype=dtype)
        table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
        start = 0
        for r, count in enumerate(blocks):
            table[r, :count] = order[start : start + count]
            start += count
            for side in cache:
                scale = 1.0 + r  # each request has its own distribution
                text = torch.randn(num_kv_heads, lengths[r], head_dim, generator=g) * scale + r
                for j in range(0, lengths[r], block_size):
                    page = text[:, j : j + block_size].to(dtype)
                    side[:, table[r, j // block_size], : page.shape[1]] = page
        q = torch.randn(len(lengths), max(lengths), num_heads, head_dim, generator=g).to(dtype)
        return cls(q, cache, table)

    def batch(
        self, parts: Sequence[Part], padded: bool = True, trees: list[list[int]] | None = None
    ) -> tuple[Batch, Tensor]:
        """Return a batch of the `parts`, and their queries [T, Hq, D], which are NaN for padding. `trees` has
        the parent of each query of each row."""
        requests, base_len, q_len = map(list, zip(*parts))
        widest, block_size, parents = max(q_len), self.cache.shape[3], None
        if trees:
            parents = [max(p, 0) for tree in trees for p in tree + [0] * (widest - len(tree)) * padded]
        batch = make_batch(q_len, base_len, padded, parents=parents)
        slots = torch.full((batch.num_tokens,), -1, dtype=torch.int32)
        q = torch.full((batch.num_tokens, *self.q.shape[2:]), float("nan"), dtype=self.q.dtype)
        for start, (r, base, n) in zip(batch.q_start.tolist(), parts, strict=True):
            j = base + torch.arange(n)
            q[start : start + n] = self.q[r, j]
            slots[start : start + n] = self.block_table[r, j // block_size] * block_size + j % block_size
        batch = replace(
            batch, rows=torch.where(batch.q_len > 0, ints(*requests), -1), slots=slots,
            block_table=self.block_table[requests], max_kv_len=max(base + n for _, base, n in parts),
            prefill=widest > MAX_QUERIES,
        )  # fmt: skip
        return batch, q

    def attend(
        self, parts: Sequence[Part], window: int | None = None, device: str | torch.device = "cpu",
        **layout: object,
    ) -> Tensor:  # fmt: skip
        """Return the kernel's output without padding, on the CPU."""
        batch, q = self.batch(parts, **layout)  # type: ignore[arg-type]
        q, cache = q.to(device), self.cache.to(device)
        with forced("triton"):
            out = attention(q, cache, on(batch, device), window, SCALE, self.softcap)
        return scored(batch, out.cpu())

    def expected(self, parts: Sequence[Part], window: int | None = None, **layout: object) -> Tensor:
        """Return the output of `naive` in float64."""
        wide = Texts(self.q.double(), self.cache.double(), self.block_table)
        batch, q = wide.batch(parts, **layout)  # type: ignore[arg-type]
        with forced("naive"):
            out = attention(q, wide.cache, batch, window, SCALE, self.softcap)
        return scored(batch, out)


def divide(monkeypatch: pytest.MonkeyPatch, programs: int, max_tiles: int = 0) -> None:
    """Split the cache among `programs` programs, by tiles for rows of up to `max_tiles` tiles."""
    split, units = split_kv.split_kv, max(64, max_tiles) if programs > 1 else 0

    def chosen(*shape: Any) -> split_kv.Split:
        return split(*shape)._replace(programs=programs, max_tiles=max_tiles, units=units)

    monkeypatch.setattr(paged, "split_kv", chosen)


def on(batch: Batch, device: str | torch.device) -> Batch:
    """Return a copy with all tensors on `device`."""
    tensors = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **tensors)  # type: ignore[arg-type]


def scored(batch: Batch, flat: Tensor) -> Tensor:
    """Return the entries of a flat tensor that are not padding."""
    return flat[batch.slots >= 0]


def tokens_at(positions: Tensor, slots: Tensor) -> Batch:
    """Return a batch of one row of tokens without blocks."""
    T, none = len(slots), torch.zeros(1, dtype=torch.int32, device=slots.device)
    return Batch(none, positions, positions, slots, none[None], none, none + T, none, T, T)


def random_trees(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return the parents of random trees with `lengths` nodes."""
    rng = random.Random(seed)
    return [[-1, *(rng.randrange(i) for i in range(1, n))][:n] for n in lengths]
