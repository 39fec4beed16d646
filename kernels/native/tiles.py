"""A KV cache in the layout that `attention.h` multiplies with.

    [num_blocks, num_layers, Hkv, 2, block_size / 16, 16, D]      2: keys, values

The last two dimensions are a tile, the numbers of 16 positions in an order of their own: keys [D / 2, 16, 2],
values [8, D, 2], so that what one instruction multiplies with lies together. So do a block, and in it what is
read one after the other, keys and values of a head.
"""

from __future__ import annotations

from torch import Tensor

from ..batch import Batch
from ..speculation.verify import Verdict
from .call import Word, batch_words, call

TILE = 16  # positions


def tiled_shape(num_blocks: int, layers: int, heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    return (num_blocks, layers, heads, 2, block_size // TILE, TILE, head_dim)


def is_tiled(kv_cache: Tensor) -> bool:
    return kv_cache.dim() == 7


def cache_words(kv_cache: Tensor) -> tuple[Word, ...]:
    """Return `Cache` of cache.h."""
    _, layers, heads, _, tiles, _, head_dim = kv_cache.shape
    return kv_cache, layers, heads, tiles * TILE, head_dim


def kv_move(kv_cache: Tensor, verdict: Verdict, batch: Batch) -> None:
    """See `kernels/speculation/kv_move.py`."""
    path = verdict.path
    words = *batch_words(batch), *cache_words(kv_cache), verdict.num_emitted, path, path.shape[1]
    call("nanospec_kv_move", *words)
