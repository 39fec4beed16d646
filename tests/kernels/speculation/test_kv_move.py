"""Moving accepted tree nodes into place."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import forced
from nanospec.kernels.native import library
from nanospec.kernels.native.packed import tiled_shape
from nanospec.kernels.speculation import kv_move
from nanospec.kernels.speculation.verify import Verdict
from tests.kernels.batches import make_batch

LAYERS, HEADS, BLOCK_SIZE, WIDTH = 2, 3, 16, 9


def make(seed: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Verdict, Batch]:
    rng = random.Random(seed)
    bases = [0, 14, 15, 40, 7]
    counts = [WIDTH, rng.randint(1, WIDTH), 1, 0, rng.randint(1, WIDTH)]
    table = torch.randperm(5 * 4, generator=torch.Generator().manual_seed(seed)).int().view(5, 4)
    path = torch.full((5, WIDTH), 99, dtype=torch.int32)  # entries beyond num_emitted must have no effect
    for b, n in enumerate(counts):
        nodes = [0, *sorted(rng.sample(range(1, 2 * WIDTH), max(n - 1, 0)))][:n]
        path[b, :n] = torch.tensor(nodes, dtype=torch.int32)
    num_emitted = torch.tensor(counts, dtype=torch.int32)
    batch = replace(make_batch(counts, bases), block_table=table)
    cache = torch.randn(LAYERS, 2, HEADS, 20, BLOCK_SIZE, head_dim).to(dtype)
    return cache, Verdict(path, num_emitted, path), batch


def moved(cache: Tensor, verdict: Verdict, batch: Batch) -> Tensor:
    """Return the expected cache, moved entry by entry."""
    out = cache.clone()
    for b, n in enumerate(verdict.num_emitted.tolist()):
        pages, base = batch.block_table[b], int(batch.base_len[b])
        for to in range(n):
            source, target = base + int(verdict.path[b, to]), base + to
            out[:, :, :, pages[target // BLOCK_SIZE], target % BLOCK_SIZE] = cache[
                :, :, :, pages[source // BLOCK_SIZE], source % BLOCK_SIZE
            ]
    return out


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(80, torch.float16), (64, torch.float32)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_kv_move(seed: int, head_dim: int, dtype: torch.dtype, backend: str) -> None:
    cache, verdict, batch = make(seed, head_dim, dtype)
    expected = moved(cache, verdict, batch)
    with forced(backend):  # type: ignore[arg-type]
        kv_move.kv_move(cache, verdict, batch)
    assert torch.equal(cache, expected)


def in_tiles(cache: Tensor) -> Tensor:
    """Return a cache [layers, 2, heads, blocks, block_size, D] in the layout of `native/packed.py`."""
    keys, values = cache.permute(1, 3, 0, 2, 4, 5).unflatten(
        4, (-1, 16)
    )  # [blocks, layers, heads, tiles, 16, D]
    keys = keys.unflatten(5, (-1, 2)).transpose(4, 5)
    values = values.unflatten(4, (8, 2)).transpose(5, 6)
    shape = tiled_shape(cache.shape[3], cache.shape[0], cache.shape[2], *cache.shape[4:])
    return torch.stack([keys.flatten(4), values.flatten(4)], 3).view(shape)


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("head_dim", [34, 64])
@pytest.mark.parametrize("block_size", [16, 32])
def test_kv_move_in_tiles(head_dim: int, block_size: int) -> None:
    cache, verdict, batch = make(1, head_dim, torch.bfloat16)
    cache = cache.unflatten(3, (-1, block_size // 16)).flatten(4, 5)
    pages = torch.randperm(cache.shape[3], generator=torch.Generator().manual_seed(2))
    batch = replace(batch, block_table=pages.int().view(5, -1))
    tiles = in_tiles(cache)
    kv_move.kv_move(tiles, verdict, batch)
    with forced("naive"):
        kv_move.kv_move(cache, verdict, batch)
    assert torch.equal(tiles, in_tiles(cache))
