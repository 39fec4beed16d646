"""The first product of a layer with all that comes before attention: norm, qkv, q/k norm, RoPE, cache write.

    stream x [T, H], weight [(Hq + 2 Hkv) * D, H], bias  ->  q [T, Hq, D]; k and v to the cache

`rope_cache.py` says what happens to q, k and v, `product.py` how the product is computed. For the widths in
`HEAD_DIMS` the kernel holds whole heads of many tokens and finishes them in registers, from sums that were
never rounded; other widths take the two kernels one after the other, as `naive` does.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..launch import arch, release_next, use_triton, wait_for_previous
from .linear import Weight, norm_linear, plain
from .product import (
    Tile,
    early_scale,
    finished_slice,
    last_of_parts,
    late_scale,
    paired_rows,
    prefetch_weight,
    prepare,
    products,
    split_pairs,
    sum_of_parts,
)
from .rope_cache import Angles, Norms, Part, operands, rope_cache, rotate_and_write
from .stream import Stream

# Widths of heads by architecture, as far as they fit the registers. (sm_100 keeps sums by rows.)
HEAD_DIMS = {"sm_80": (64,), "sm_90": (64, 128, 256), "sm_100": (), "gfx942": (64, 128)}
WIDEST_NORMED = 128  # of heads with norms of their own


def holds_heads(head_dim: int, normed: bool, target: str) -> bool:
    """Whether the product finishes heads itself."""
    return head_dim in HEAD_DIMS[target] and not (normed and head_dim > WIDEST_NORMED)


def qkv_rope(
    stream: Stream,
    weight: Weight,
    bias: Tensor | None,
    cache: Tensor,
    batch: Batch,
    angles: Angles,
    norms: Norms,
) -> Tensor:
    """Write k and v of the stream's norm to the `cache` [2, Hkv, num_blocks, block_size, D], return q."""
    if use_triton(stream.x) and holds_heads(cache.shape[-1], norms is not None, arch(stream.x)):
        return launch(stream, plain(weight), bias, cache, batch, angles, norms)
    return rope_cache(norm_linear(stream, weight, bias), cache, batch, angles, norms)


@triton.jit(do_not_specialize=["T", "steps"])
def _qkv_rope(operands, apart, rope, T, sizes, steps, eps, head_sizes, C: tl.constexpr):
    """Grid: tiles of tokens, blocks of whole heads, parts of K that run apart."""
    HEADS: tl.constexpr = C.BLOCK_N // C.HEAD_DIM
    HALF: tl.constexpr = C.HEAD_DIM // 2
    index, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = index * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    rows, _ = paired_rows(block, HALF, C.BLOCK_N)
    rows_in = rows < sizes.N
    prefetch_weight(operands.weight, tl.where(rows_in, rows, 0), split * steps * C.BLOCK_K, sizes.K, C)
    wait_for_previous(C.PDL)
    release_next(C.PDL)  # only now, since attention reads before its wait
    tile = Tile(index, block, split, t, t < T, rows, rows_in)
    scale = early_scale(operands, tile, T, sizes.K, eps, C)
    acc = products(operands, tile, sizes, steps, C)
    if C.APART:
        if not last_of_parts(acc, apart, tile, T, C):
            return
        acc = sum_of_parts(apart, tile, T, C)
    scale = late_scale(scale, operands, tile, T, sizes.K, eps, C)
    head = block * HEADS + tl.arange(0, HEADS)
    for i in tl.static_range(C.BLOCK_T // C.SLICE):  # one after the other, because registers are dear here
        first, second = split_pairs(finished_slice(acc, scale, operands, tile, i, C))
        first, second = tl.reshape(first, [HEADS, HALF, C.SLICE]), tl.reshape(second, [HEADS, HALF, C.SLICE])
        t = index * C.BLOCK_T + i * C.SLICE + tl.arange(0, C.SLICE)
        part = Part(head, tl.arange(0, HALF), t, t < T)
        rotate_and_write(first, second, part, rope, head_sizes, C.NORM, C.HEAD_DIM)


def launch(
    stream: Stream,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    batch: Batch,
    angles: Angles,
    norms: Norms,
) -> Tensor:
    """See `qkv_rope`."""
    head_dim = cache.shape[-1]
    setup = prepare(stream, weight, bias, unit=head_dim, HEAD_DIM=head_dim, NORM=norms is not None)
    T = len(stream.x)
    rope, head_sizes = operands(T, len(weight), stream.x, cache, batch, angles, norms)
    if T:
        _qkv_rope[setup.grid](
            setup.operands, setup.apart, rope, T, setup.sizes, setup.steps, setup.eps, head_sizes,
            setup.constants, **setup.options,
        )  # fmt: skip
    return rope.q
