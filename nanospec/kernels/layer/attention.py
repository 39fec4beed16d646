"""Attention over the paged KV cache.

    q      [T, Hq, D]                              T tokens of a batch
    cache  [2, Hkv, num_blocks, block_size, D]     keys, values of one layer; Hq is a multiple of Hkv
    out    [T, Hq, D]

One operation covers decoding (one query per row), verification (K + 1 queries per row, chain or tree) and
chunked prefill. A query attends to the cache entries that the batch gives it (see `batch.py`) and, with a
`window`, only to those less than `window` positions before it.

`naive` is the specification, and also runs models in fp32 or fp16 on a CPU. In it, a tree is a mask, and its
nodes equal chains up to rounding. The Triton kernels (`paged.py`, `paged_tree.py`) support head dimensions up
to 256 in bf16, fp16 or fp32. In them, the output of a query is bitwise independent of the batch, the number
of drafts and the chunk size, and the same for a tree node as for a chain.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import Batch
from ..launch import use_triton
from . import paged, paged_tree

TILE = 128  # queries at once, at least those of a tree: bounds the size of the scores


def attention(
    q: Tensor, cache: Tensor, batch: Batch, window: int | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Return softmax(q k^T * scale) v for each query over the cache entries it attends to. With a `softcap`
    c, the scores are c * tanh(q k^T * scale / c).

    The cache must already contain the keys and values of this step. The output of unused tokens is
    unspecified.
    """
    if not use_triton(q):
        return naive(q, cache, batch, window, scale, softcap)
    kernel = paged._attend if batch.ancestors is None else paged_tree._attend_tree
    return paged.launch(kernel, q, cache, batch, window, scale, softcap)


def naive(
    q: Tensor, cache: Tensor, batch: Batch, window: int | None, scale: float, softcap: float | None = None
) -> Tensor:
    out, num_kv_heads, block_size = torch.empty_like(q), cache.shape[1], cache.shape[3]
    for b, start, n, base in tiles(batch):
        tile = slice(start, start + n)
        first = max(base - window + 1, 0) if window else 0  # blocks before the window may have been freed
        index = torch.arange(first, base + n, device=q.device)  # of the L entries to read
        slots = batch.block_table[b, index // block_size] * block_size + index % block_size
        k, v = cache.flatten(2, 3).index_select(2, slots)  # [Hkv, L, D]
        query = q[tile].unflatten(1, (num_kv_heads, -1))  # [n, Hkv, G, D]: the G query heads of a KV head
        scores = torch.einsum("qhgd,hkd->hgqk", query, k) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        mask = visible(batch, tile, index[: base - first], window)  # [n, L]
        weights = scores.masked_fill_(~mask, float("-inf")).softmax(-1)
        out[tile] = torch.einsum("hgqk,hkd->qhgd", weights, v).flatten(1, 2)
    return out


def tiles(batch: Batch) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, first flat token, number of queries, cached entries) of each row; several times for a chain
    of more than TILE queries, which equals several shorter ones."""
    rows = zip(batch.q_start.tolist(), batch.q_len.tolist(), batch.base_len.tolist(), strict=True)
    for b, (start, n, base) in enumerate(rows):
        for i in range(0, n, TILE):
            yield b, start + i, min(n - i, TILE), base + i


def visible(batch: Batch, row: slice, cached: Tensor, window: int | None) -> Tensor:
    """Return a mask [n, c + n] bool of the entries that each of the n queries of a row attends to: c cached
    ones at positions `cached`, then the queries."""
    position = torch.cat((cached, batch.positions[row]))
    back = position[len(cached) :, None] - position  # how far before the query
    if batch.ancestors is None:
        mask = back >= 0
    else:
        queries = torch.arange(row.stop - row.start, device=cached.device)
        mask = F.pad(batch.ancestors[row, None] >> queries & 1, (len(cached), 0), value=1).bool()
    return mask if window is None else mask & (back < window)
