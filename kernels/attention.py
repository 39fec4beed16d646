"""Attention over the paged KV cache.

    q                 [T, Hq, D]
    k_cache, v_cache  [Hkv, num_blocks, block_size, D]     one layer; Hq is a multiple of Hkv
    out               [T, Hq, D]

One operation serves decoding (one query per row), verification (K+1 queries per row, chain or tree)
and chunked prefill: what a query sees is stated by `Rows` alone. The queries of all heads that share
a KV head are treated together, so K/V are read once for all of them. A sliding window of w lets a
query see itself and the w - 1 positions before it; in a tree, the step's own tokens are taken to lie
inside the window. Head dimensions up to 256; bf16, fp16 or fp32.

Decoding and verification (`split_kv.py`) split the cache over programs at fixed absolute places;
pieces of prompts (`prefill.py`) are walked tile by tile. Either way a query's bits depend neither on
the batch nor on the number of drafts or the size of the chunk.
"""

from __future__ import annotations

from torch import Tensor

from . import prefill, split_kv
from .dispatch import use_triton
from .rows import Rows


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    """Softmax(q k^T * scale) v for every query over the cache positions it may see.

    The keys and values of the step's own tokens must already be in the cache. Padding tokens get
    unspecified output.
    """
    if not use_triton(q):
        return naive(q, k_cache, v_cache, rows, scale, window)
    launch = prefill.launch if rows.prefill else split_kv.launch
    return launch(q, k_cache, v_cache, rows, scale, window)


def naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, scale: float, window: int | None = None
) -> Tensor:
    """The specification in plain PyTorch; also the CPU path."""
    implementation = prefill.naive if rows.prefill else split_kv.naive
    return implementation(q, k_cache, v_cache, rows, scale, window)
