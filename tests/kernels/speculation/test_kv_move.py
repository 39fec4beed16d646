"""Moving accepted tree nodes into place."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import Backend, forced
from nanospec.kernels.native import library
from nanospec.kernels.native.packed import tiled_shape
from nanospec.kernels.speculation import kv_move
from nanospec.kernels.speculation.verify import Verdict
from tests.kernels.batches import ints, make_batch

LAYERS, HEADS, WIDTH = 2, 3, 9


def make(seed: int, head_dim: int, dtype: torch.dtype, block_size: int = 16) -> tuple[Tensor, Verdict, Batch]:
    """Return a cache of 320 tokens, and rows of 0 to 9 accepted nodes around the ends of blocks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    bases, counts = [0, 14, 15, 40, 7], [WIDTH, rng.randint(1, WIDTH), 1, 0, rng.randint(1, WIDTH)]
    path = ints(99).repeat(5, WIDTH)  # entries beyond num_emitted must have no effect
    for b, n in enumerate(counts):
        path[b, :n] = ints(0, *sorted(rng.sample(range(1, 2 * WIDTH), max(n - 1, 0))))[:n]
    pages = torch.randperm(320 // block_size, generator=generator).int().view(5, -1)
    cache = torch.randn(LAYERS, 2, HEADS, pages.numel(), block_size, head_dim, generator=generator).to(dtype)
    batch = replace(make_batch(counts, bases), block_table=pages)
    return cache, Verdict(path, ints(*counts), path), batch


def moved(cache: Tensor, verdict: Verdict, batch: Batch) -> Tensor:
    """Return the expected cache, moved entry by entry."""
    out, block_size = cache.clone(), cache.shape[4]
    for b, n in enumerate(verdict.num_emitted.tolist()):
        pages, base = batch.block_table[b], int(batch.base_len[b])
        for to, node in enumerate(verdict.path[b, :n].tolist()):
            (block, at), (to_block, to_at) = (divmod(base + i, block_size) for i in (node, to))
            out[:, :, :, pages[to_block], to_at] = cache[:, :, :, pages[block], at]
    return out


@pytest.mark.parametrize("backend", ["naive", "triton"])
def test_kv_move_matches_loop(backend: Backend) -> None:
    for seed, (head_dim, dtype) in enumerate([(80, torch.float16), (64, torch.float32)]):
        cache, verdict, batch = make(seed, head_dim, dtype)
        expected = moved(cache, verdict, batch)
        with forced(backend):
            kv_move.kv_move(cache, verdict, batch)
        assert torch.equal(cache, expected)


def in_tiles(cache: Tensor) -> Tensor:
    """Return a cache [layers, 2, heads, blocks, block_size, D] in the layout of `native/packed.py`."""
    keys, values = cache.permute(1, 3, 0, 2, 4, 5).unflatten(4, (-1, 16))
    keys = keys.unflatten(5, (-1, 2)).transpose(4, 5)  # from [blocks, layers, heads, tiles, 16, D]
    values = values.unflatten(4, (8, 2)).transpose(5, 6)
    shape = tiled_shape(cache.shape[3], cache.shape[0], cache.shape[2], *cache.shape[4:])
    return torch.stack([keys.flatten(4), values.flatten(4)], 3).view(shape)


@pytest.mark.skipif(library() is None, reason="needs a C++ compiler: install g++")
@pytest.mark.parametrize(("head_dim", "block_size"), [(34, 16), (64, 32)])
def test_kv_move_in_tiles_matches_loop(head_dim: int, block_size: int) -> None:
    cache, verdict, batch = make(1, head_dim, torch.bfloat16, block_size)
    tiles = in_tiles(cache)
    kv_move.kv_move(tiles, verdict, batch)
    assert torch.equal(tiles, in_tiles(moved(cache, verdict, batch)))
