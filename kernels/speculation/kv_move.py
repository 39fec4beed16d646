"""Move the keys and values of accepted tree nodes into place, in all layers at once.

    kv_cache  [num_layers, 2, Hkv, num_blocks, block_size, D], or in tiles   updated in place

A tree's node i wrote its key and value to cache index base_len + i. When the path of accepted nodes (see
`verify.py`) is 0, 3, 7, the committed text needs node 3 at base_len + 1 and node 7 at base_len + 2. A
chain needs no moves: its path is 0, 1, 2.

Nodes come after their parents, so path[e] >= e and paths ascend: moving in order overwrites nothing
that is still to be moved. Kernel: one program per (row, layer, key or value, head) moves one node
after the other; each thread owns the same channels of all of them, so it needs no barriers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch, slots_of
from ..dispatch import use_triton
from ..launch import next_power_of_2
from ..native import tiles
from .verify import Verdict


def kv_move(kv_cache: Tensor, verdict: Verdict, batch: Batch) -> None:
    """Move the entries of each row's path to consecutive cache indices from base_len on."""
    if tiles.is_tiled(kv_cache):
        tiles.kv_move(kv_cache, verdict, batch)
    else:
        (launch if use_triton(kv_cache) else naive)(kv_cache, verdict, batch)


def naive(kv_cache: Tensor, verdict: Verdict, batch: Batch) -> None:
    path, block_size = verdict.path, kv_cache.shape[4]
    place = torch.arange(path.shape[1], device=path.device)
    moves = (place < verdict.num_emitted[:, None]) & (path != place)
    b, to = moves.nonzero(as_tuple=True)
    if len(b):
        base, pages = batch.base_len[b], batch.block_table
        source = slots_of(pages, b, base + path[b, to], block_size)
        target = slots_of(pages, b, base + to, block_size)
        flat = kv_cache.flatten(3, 4)  # [num_layers, 2, Hkv, slots, D]
        flat[:, :, :, target] = flat[:, :, :, source]  # all are read before any is written


@triton.jit(do_not_specialize=["table_stride", "path_stride"])
def _kv_move(
    kv_cache, verdict, batch, table_stride, path_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    cache = kv_cache + tl.program_id(0).to(tl.int64) * head_stride
    pages = batch.block_table + b * table_stride
    base = tl.load(batch.base_len + b)
    d = tl.arange(0, BLOCK)
    inside = d < HEAD_DIM
    for to in range(1, tl.load(verdict.num_emitted + b)):
        node = tl.load(verdict.path + b * path_stride + to)
        if node != to:
            source, target = base + node, base + to
            page = tl.load(pages + source // BLOCK_SIZE).to(tl.int64)
            source_slot = page * BLOCK_SIZE + source % BLOCK_SIZE
            page = tl.load(pages + target // BLOCK_SIZE).to(tl.int64)
            target_slot = page * BLOCK_SIZE + target % BLOCK_SIZE
            value = tl.load(cache + source_slot * HEAD_DIM + d, inside)
            tl.store(cache + target_slot * HEAD_DIM + d, value, inside)


def launch(kv_cache: Tensor, verdict: Verdict, batch: Batch) -> None:
    if kv_cache.dim() != 6 or not kv_cache.is_contiguous():
        raise ValueError(
            "The cache must be contiguous [num_layers, 2, Hkv, num_blocks, block_size, D], not "
            f"{list(kv_cache.shape)}."
        )
    layers, two, heads, _, block_size, head_dim = kv_cache.shape
    _kv_move[(layers * two * heads, batch.num_rows)](
        kv_cache, verdict, batch.tensors, batch.block_table.stride(0), verdict.path.stride(0),
        kv_cache.stride(2),
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, BLOCK=next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
