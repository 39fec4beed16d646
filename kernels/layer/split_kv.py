"""How attention divides queries and cache among programs, and the launch of its kernels.

Weighed for D = 128 in bf16 on an H200 (132 multiprocessors of 2 programs each, or 1 of 64 columns); none of
it has been measured:

* One row is bound by latency: the 16 tiles of 8 KV heads at 1,024 positions are 128 programs, one each. A
  tile is 32 KB of K/V and its partial results are columns / 32 of that; from 32 tiles of one row on (256
  programs) spans should be as fast.
* A span is 256 KB of K/V, and its partial results, written and read through L2, are columns / 256 of that: 4
  % for 5 queries of 2 heads. 64 rows of 8 KV heads have 1,024 spans at 1,024 positions, 3.9 waves of 264
  programs; at 4k and 16k, 1,024 or 2,048 programs take several spans each.
* Graphs are captured for the longest context. Programs without a unit end at once but cost perhaps a
  microsecond of a place: never more than 32768 / columns of them.
* Many wide tiles of queries, as of a prompt, fill the machine by themselves and store no partial results.

Partial results take `units` * T * Hq * (D + 5) * 4 bytes, 349 MB for 64 rows of 5 queries, 32 heads of 128
and a context of 32k. Calls on one device must not overlap on several streams: they share tickets.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..batch import MAX_QUERIES, Batch
from ..launch import LOG2_E, ONE_SHAPE, arch, next_power_of_2, options, tickets, wrapped
from .paged import Constants, Operands, Partials, Sizes, _attend
from .paged_tree import _attend_tree
from .rope_cache import check_cache

SPAN = 512  # positions

# (most columns, cache positions per tile, warps, stages) by architecture, then by padded head dimension:
# enough loads in flight to hide the memory's latency, no spilled registers. The most columns, which are
# prompts and long drafts, take 8 warps. The tile fixes the order of sums.
CONFIGS = {
    "sm_80": {64: (32, 64, 4, 4), 128: (32, 64, 4, 3), 256: (32, 64, 8, 3)},
    "sm_90": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 64, 8, 3)},
    "sm_100": {64: (64, 64, 4, 2), 128: (32, 64, 4, 3), 256: (32, 32, 4, 2)},
    "gfx942": {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 4, 1)},
}


class Split(NamedTuple):
    """How attention is divided among programs.

    Attributes:
        columns: of a program's tile of queries: queries times query heads to a KV head, padded.
        pairs: tiles of queries of a row times KV heads.
        programs: that share the cache for such a pair. One alone adds up the spans as it goes.
        fine: rows that see at most so many tiles are divided into tiles, others into spans.
        units: partial results that each query has room for.
    """

    columns: int
    pairs: int
    programs: int
    fine: int
    units: int


def split_kv(
    rows: int, q_len: int, kv_len: int, heads: tuple[int, int, int], target: str, tree: bool = False
) -> Split:
    """Divide rows of up to `q_len` queries on up to `kv_len` positions; `heads` are (Hq, Hkv, D).

    Nodes of trees take turns with their own tiles, so fewer share a program; the cache is divided as for
    chains, and so are the partial results."""
    num_heads, num_kv_heads, head_dim = heads
    group = num_heads // num_kv_heads
    widest, tile, _, _ = CONFIGS[target][_padded(head_dim)]
    least = max(next_power_of_2(group), 16)
    columns = max(min(next_power_of_2(group * q_len), widest), least)
    pairs = num_kv_heads * triton.cdiv(q_len, columns // group)
    tiles = triton.cdiv(kv_len, tile)
    spans = triton.cdiv(tiles, SPAN // tile)
    fine = min(256 // max(pairs * rows, 1), tiles)
    programs = max(min(32768 // max(columns * pairs * rows, 1), spans), fine, 1)
    if tree:
        columns = max(min(columns, widest // 2), least)
        pairs = num_kv_heads * triton.cdiv(q_len, columns // group)
    return Split(columns, pairs, programs, fine, max(spans, fine) if programs > 1 else 0)


def _padded(head_dim: int) -> int:
    return max(next_power_of_2(head_dim), 64)


def launch(
    q: Tensor, cache: Tensor, batch: Batch, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """See `attention.py`."""
    is_tree = batch.ancestors is not None
    if is_tree and batch.max_q_len > MAX_QUERIES:
        raise ValueError(f"A tree of {batch.max_q_len} nodes exceeds the limit of {MAX_QUERIES}.")
    check_cache(cache)
    (T, num_heads, head_dim), (k, v) = q.shape, cache
    num_kv_heads, _, block_size, _ = k.shape
    padded, target = _padded(head_dim), arch(q)
    widest, tile, warps, stages = CONFIGS[target][padded]
    heads = num_heads, num_kv_heads, head_dim
    split = split_kv(batch.num_rows, batch.max_q_len, batch.max_kv_len, heads, target, is_tree)
    sizes = Sizes(
        num_kv_heads, k.stride(0), batch.block_table.stride(0), window or 0, LOG2_E * (softcap or scale)
    )
    parts = 1 if padded < 128 else 2
    launch_options = options(q)
    constants = Constants(
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        WINDOW=window is not None, SOFTCAP=scale / softcap if softcap else 0.0, SPLIT=split.programs > 1,
        TILE=tile, SPAN_TILES=SPAN // tile, COLUMNS=split.columns, PARTS=parts, PART=padded // parts,
        PDL=launch_options.pop("PDL"),
    )  # fmt: skip
    out = torch.empty_like(q)
    (_attend_tree if is_tree else _attend)[split.pairs, batch.num_rows, split.programs](
        Operands(q, k, v, out), batch.tensors, _partials(q, split, tile), T, split.fine, sizes,
        wrapped(constants), num_warps=8 if split.columns >= widest else warps,
        num_stages=1 if q.dtype == torch.float32 else stages,  # float32, of tests, would not fit
        **ONE_SHAPE.get(target, {}), **launch_options,
    )  # fmt: skip
    return out


def _partials(q: Tensor, split: Split, tile: int) -> Partials:
    """Return room for the partial results, none if one program has the whole cache."""
    if split.programs == 1:
        return Partials(None, None, None, None)
    size = split.units, *q.shape[:2]
    shapes = size, (*size, tile // 16), (*size, q.shape[2])
    m, z, acc = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return Partials(m, z, acc, tickets(q.device, "attention"))
