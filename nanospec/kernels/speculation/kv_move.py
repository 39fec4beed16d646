"""Move the keys and values of accepted tree nodes into place, in all layers at once.

    kv_cache  [num_layers, 2, Hkv, num_blocks, block_size, D], or tiled (`native/packed.py`); updated in place

Node i of a tree wrote its key and value to cache index base_len + i. If the path of accepted nodes (see
`verify.py`) is 0, 3, 7, node 3 must move to base_len + 1 and node 7 to base_len + 2. A chain needs no
moves: its path is 0, 1, 2.

Nodes come after their parents, so paths ascend and path[i] >= i: moving in order never overwrites an entry
that is still to be moved. Kernel: one program per (layer, key or value, head) and row moves one node after
the other. Each thread handles the same channels of all nodes, so no barriers are needed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch, slots_of
from ..launch import next_power_of_2, use_triton
from ..native import call
from ..native.packed import cache_words
from .verify import Verdict


def kv_move(kv_cache: Tensor, verdict: Verdict, batch: Batch) -> None:
    """Move the cache entries on the path of each row to consecutive indices from base_len on."""
    if kv_cache.dim() == 7:  # tiled
        path = verdict.path
        words = *batch.native_args, *cache_words(kv_cache), verdict.num_emitted, path, path.shape[1]
        call("nanospec_kv_move", *words)
    else:
        (launch if use_triton(kv_cache) else naive)(kv_cache, verdict, batch)


def naive(kv_cache: Tensor, verdict: Verdict, batch: Batch) -> None:
    path, i = verdict.path, torch.arange(verdict.path.shape[1], device=verdict.path.device)
    moves = (i < verdict.num_emitted[:, None]) & (path != i)
    b, to = moves.nonzero(as_tuple=True)
    base, blocks, block_size = batch.base_len[b], batch.block_table, kv_cache.shape[4]
    source = slots_of(blocks, b, base + path[b, to], block_size)
    target = slots_of(blocks, b, base + to, block_size)
    flat = kv_cache.flatten(3, 4)  # [num_layers, 2, Hkv, slots, D]
    flat[:, :, :, target] = flat[:, :, :, source]  # indexing copies, so all are read before any is written


@triton.jit
def _kv_move(
    kv_cache, verdict, batch, strides, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    b, d = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    table_stride, path_stride, head_stride = strides
    cache = kv_cache + tl.program_id(0).to(tl.int64) * head_stride
    blocks = batch.block_table + b * table_stride
    base = tl.load(batch.base_len + b)
    for to in range(1, tl.load(verdict.num_emitted + b)):
        node = tl.load(verdict.path + b * path_stride + to)
        if node != to:
            source = _slot(blocks, base + node, BLOCK_SIZE)
            target = _slot(blocks, base + to, BLOCK_SIZE)
            value = tl.load(cache + source * DIM + d, d < DIM)
            tl.store(cache + target * DIM + d, value, d < DIM)


@triton.jit
def _slot(blocks, index, BLOCK_SIZE: tl.constexpr):
    return tl.load(blocks + index // BLOCK_SIZE).to(tl.int64) * BLOCK_SIZE + index % BLOCK_SIZE


def launch(kv_cache: Tensor, verdict: Verdict, batch: Batch) -> None:
    layers, two, heads, _, block_size, dim = kv_cache.shape
    strides = batch.block_table.stride(0), verdict.path.stride(0), kv_cache.stride(2)
    grid = layers * two * heads, batch.num_rows
    _kv_move[grid](
        kv_cache, verdict, batch.tensors, strides,
        BLOCK_SIZE=block_size, DIM=dim, BLOCK=next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
