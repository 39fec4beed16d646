"""Move the keys and values of accepted tree nodes into place, in all layers at once.

    kv_cache     [num_layers, 2, Hkv, num_blocks, block_size, D]   updated in place
    path         [B, max_q_len] int32   from `verify`: place in its row of the query that drew each
                                        emitted token
    num_emitted  [B] int32

A tree's node i wrote its key and value to cache index base_len + i. When the path of accepted nodes is
0, 3, 7, the committed text needs node 3 at base_len + 1 and node 7 at base_len + 2. A chain needs no
moves: its path is 0, 1, 2.

Nodes come after their parents, so path[e] >= e and paths ascend: moving in order overwrites nothing
that is still to be moved. Kernel: one program per (row, layer, key or value, head) moves one node
after the other; each thread owns the same channels of all of them, so it needs no barriers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..dispatch import use_triton
from ..launch import next_power_of_2


def kv_move(kv_cache: Tensor, path: Tensor, num_emitted: Tensor, rows: Batch) -> None:
    """Move the entries of each row's path to consecutive cache indices from base_len on."""
    run = launch if use_triton(kv_cache) else naive
    run(kv_cache, path, num_emitted, rows)


def naive(kv_cache: Tensor, path: Tensor, num_emitted: Tensor, rows: Batch) -> None:
    block_size = kv_cache.shape[4]
    place = torch.arange(path.shape[1], device=path.device)
    moves = (place < num_emitted[:, None]) & (path != place)
    b, to = moves.nonzero(as_tuple=True)
    if len(b):
        base = rows.base_len[b].long()
        source, target = base + path[b, to], base + to
        pages = rows.block_table[b].long()
        source = pages.gather(1, source[:, None] // block_size)[:, 0] * block_size + source % block_size
        target = pages.gather(1, target[:, None] // block_size)[:, 0] * block_size + target % block_size
        flat = kv_cache.flatten(3, 4)  # [num_layers, 2, Hkv, slots, D]
        flat[:, :, :, target] = flat[:, :, :, source]  # all are read before any is written


@triton.jit(do_not_specialize=["table_stride", "path_stride"])
def _kv_move(
    kv_cache, path, num_emitted, block_table, base_len, table_stride, path_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    cache = kv_cache + tl.program_id(0).to(tl.int64) * head_stride
    table = block_table + b * table_stride
    base = tl.load(base_len + b)
    d = tl.arange(0, BLOCK)
    inside = d < HEAD_DIM
    for to in range(1, tl.load(num_emitted + b)):
        node = tl.load(path + b * path_stride + to)
        if node != to:
            source, target = base + node, base + to
            page = tl.load(table + source // BLOCK_SIZE).to(tl.int64)
            source_slot = page * BLOCK_SIZE + source % BLOCK_SIZE
            page = tl.load(table + target // BLOCK_SIZE).to(tl.int64)
            target_slot = page * BLOCK_SIZE + target % BLOCK_SIZE
            value = tl.load(cache + source_slot * HEAD_DIM + d, inside)
            tl.store(cache + target_slot * HEAD_DIM + d, value, inside)


def launch(kv_cache: Tensor, path: Tensor, num_emitted: Tensor, rows: Batch) -> None:
    if kv_cache.dim() != 6 or not kv_cache.is_contiguous():
        raise ValueError(
            "The cache must be contiguous [num_layers, 2, Hkv, num_blocks, block_size, D], not "
            f"{list(kv_cache.shape)}."
        )
    if path.stride(1) != 1 or path.shape[0] != rows.num_rows:
        raise ValueError(f"path {list(path.shape)} does not fit {rows.num_rows} rows.")
    layers, two, heads, _, block_size, head_dim = kv_cache.shape
    _kv_move[(layers * two * heads, rows.num_rows)](
        kv_cache, path, num_emitted, rows.block_table, rows.base_len,
        rows.block_table.stride(0), path.stride(0), kv_cache.stride(2),
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, BLOCK=next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
