"""The first product of a layer with all that comes before attention: norm, qkv, q/k norm, RoPE, cache write.

    stream x [T, H], weight [(Hq + 2 Hkv) * D, H], bias  ->  q [T, Hq, D]; k and v to the cache

`rope_cache.py` says what happens to q, k and v, `product.py` how the product is computed. For the widths in
`HEAD_DIMS` the kernel holds whole heads of many tokens and finishes them in registers, from sums that were
never rounded; other widths take the two kernels one after the other, as `naive` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..dependent_launch import release_next, wait_for_previous
from ..dispatch import use_triton
from ..launch import arch
from .linear import Weight, norm_linear, plain
from .product import (
    check_product,
    last_of_parts,
    operand,
    paired_rows,
    prefetch_weight,
    prepare,
    products,
    split_pairs,
    sum_of_parts,
    token_slice,
)
from .rope_cache import Angles, Norms, check, rope_cache, rotate_and_write
from .stream import Stream, inverse_rms, inverse_rms_of_many, load_squares

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
def _qkv_rope(
    x, weight, bias, squares, partial, tickets, cos_sin, positions, slots, q, k_cache, v_cache, q_norm,
    k_norm, T, N, K, x_stride, steps, eps, head_stride, num_heads, num_kv_heads, head_eps,
    HEAD_NORM: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr,
    APART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = BLOCK_N // HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    rows, _ = paired_rows(block, HALF, BLOCK_N)
    rows_in = rows < N
    prefetch_weight(weight, tl.where(rows_in, rows, 0), split * steps * BLOCK_K, K, LINES, PDL)
    wait_for_previous(PDL)
    release_next(PDL)  # only now, since attention reads before its wait
    FEW: tl.constexpr = BLOCK_T <= 32  # so few sums of squares wait in registers for the product's end
    if FEW:
        sums = load_squares(squares, t, t < T, T, GROUPS)
    elif not APART:
        scale = inverse_rms_of_many(squares, t, t < T, T, K, eps, BLOCK_T, GROUPS)
    acc = products(
        x, weight, rows, rows_in, t, t < T, K, x_stride, split, steps, SPLITS, APART, BLOCK_T, BLOCK_N,
        BLOCK_K, EVEN, PRECISION,
    )  # fmt: skip
    if APART:
        if not last_of_parts(acc, partial, tickets, T, tile, block, split, SPLITS, BLOCK_T, BLOCK_N):
            return
        if not FEW:
            scale = inverse_rms_of_many(squares, t, t < T, T, K, eps, BLOCK_T, GROUPS)
        acc = sum_of_parts(partial, T, tile, block, SPLITS, BLOCK_T, BLOCK_N)
    if FEW:
        scale = inverse_rms(sums, K, eps, BLOCK_T, GROUPS)
    head = block * HEADS + tl.arange(0, HEADS)
    for i in tl.static_range(BLOCK_T // SLICE):  # one after the other, because registers are dear here
        part = token_slice(acc, i, SLICE, BLOCK_N, BLOCK_T) * token_slice(scale, i, SLICE, 1, BLOCK_T)
        if bias is not None:
            part += tl.load(bias + rows, rows_in, other=0.0).to(tl.float32)[:, None]
        first, second = split_pairs(part, BLOCK_N, SLICE)
        t = tile * BLOCK_T + i * SLICE + tl.arange(0, SLICE)
        rotate_and_write(
            tl.reshape(first, [HEADS, HALF, SLICE]), tl.reshape(second, [HEADS, HALF, SLICE]), head,
            tl.arange(0, HALF), t, t < T, cos_sin, positions, slots, q, k_cache, v_cache, q_norm, k_norm,
            head_stride, num_heads, num_kv_heads, head_eps, HEAD_NORM, HEAD_DIM, HEADS, HALF, SLICE,
        )  # fmt: skip


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
    x, squares, groups, eps = operand(stream)
    (T, K), N = x.shape, weight.shape[0]
    _, num_kv_heads, _, _, head_dim = cache.shape
    check_product(x, weight, bias=(bias, weight.shape[:1]))
    num_heads, norm_weights, head_eps = check(N, x.dtype, cache, angles, norms)
    q = torch.empty(T, num_heads, head_dim, dtype=x.dtype, device=x.device)
    if T:
        setup = prepare(x, weight, unit=head_dim)
        k_cache, v_cache = cache
        _qkv_rope[setup.grid](
            x, weight, bias, squares, setup.partial, setup.tickets, angles.table, angles.positions,
            batch.slots, q, k_cache, v_cache, *norm_weights, T, N, K, x.stride(0), setup.steps, eps,
            k_cache.stride(0), num_heads, num_kv_heads, head_eps, HEAD_NORM=norms is not None,
            HEAD_DIM=head_dim, GROUPS=groups, **setup.constants,
        )  # fmt: skip
    return q
