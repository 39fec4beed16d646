"""The matrix product of a layer, for any number of rows; `linear.py` is its public face.

    out [T, N] = epilogue(x [T, K] @ weight [N, K].T)

How the product is computed, and why the bits of a token do not depend on the tokens beside it, says
`product.py`. Here
are the epilogues: bias, SwiGLU, residual, and what the next norm needs.

RMSNorm costs no launch and nothing in the loop: norm(x) @ W.T = (x * norm_weight) @ W.T / rms(x).
Whoever writes x also writes x * norm_weight and sums of its squares (`stream.py`); the product of the first
is divided by the root of the second at its end. These sums have an order stated in the code.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import release_next, wait_for_previous
from .norm import Norm
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
from .stream import Stream, inverse_rms, inverse_rms_of_many, load_squares, next_norm

GELU = tl.constexpr(2)  # where SWIGLU may stand


@triton.jit
def _finish(
    acc, bias, residual, norm_weight, out, scaled, out_squares, rows, rows_in, block, first_t, T, N,
    SWIGLU: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Write the outputs of `acc` [ROWS, SLICE], tokens from `first_t` on."""
    COLUMNS: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    if bias is not None:
        acc += tl.load(bias + rows, rows_in, other=0.0).to(tl.float32)[:, None]
    if SWIGLU:
        gate, up = split_pairs(acc, ROWS, SLICE)
        turn = gate  # silu(x) = x / (1 + e^-x)
        if SWIGLU == GELU:  # and gelu, by tanh: x / (1 + e^-y) with this y
            turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        acc = gate / (1.0 + tl.exp(-turn)) * up
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    t = first_t + tl.arange(0, SLICE)
    inside = (n < N)[:, None] & (t < T)[None, :]
    corner = first_t.to(tl.int64) * N + block * COLUMNS  # offsets from here fit 32 bits
    at = tl.arange(0, SLICE)[None, :] * N + tl.arange(0, COLUMNS)[:, None]
    if residual is not None:
        acc += tl.load(residual + corner + at, inside, other=0.0).to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(out + corner + at, value, inside)
    if norm_weight is not None:
        next_norm(value, norm_weight, scaled + corner, out_squares, at, n, n < N, t, T, COLUMNS, SLICE)


@triton.jit(do_not_specialize=["T", "steps"])
def _gemm(
    x, weight, bias, residual, squares, norm_weight, out, scaled, out_squares, partial, tickets,
    T, N, K, x_stride, steps, eps, GROUPS: tl.constexpr, SWIGLU: tl.constexpr, SPLITS: tl.constexpr,
    APART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < T
    if SWIGLU:
        rows, column = paired_rows(block, N, BLOCK_N)
    else:
        rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        column = rows
    rows_in = column < N
    prefetch_weight(weight, tl.where(rows_in, rows, 0), split * steps * BLOCK_K, K, LINES, PDL)
    wait_for_previous(PDL)
    FEW: tl.constexpr = BLOCK_T <= 32  # so few sums of squares wait in registers for the product's end
    scale = tl.full([1, BLOCK_T], 1.0, tl.float32)
    if GROUPS > 0 and FEW:
        sums = load_squares(squares, t, t_in, T, GROUPS)
    elif GROUPS > 0 and not APART:
        scale = inverse_rms_of_many(squares, t, t_in, T, K, eps, BLOCK_T, GROUPS)
    acc = products(
        x, weight, rows, rows_in, t, t_in, K, x_stride, split, steps, SPLITS, APART, BLOCK_T, BLOCK_N,
        BLOCK_K, EVEN, PRECISION,
    )  # fmt: skip
    if APART:
        if not last_of_parts(acc, partial, tickets, T, tile, block, split, SPLITS, BLOCK_T, BLOCK_N):
            return
        if GROUPS > 0 and not FEW:
            scale = inverse_rms_of_many(squares, t, t_in, T, K, eps, BLOCK_T, GROUPS)
        acc = sum_of_parts(partial, T, tile, block, SPLITS, BLOCK_T, BLOCK_N)
    if GROUPS > 0 and FEW:
        scale = inverse_rms(sums, K, eps, BLOCK_T, GROUPS)
    for i in tl.static_range(BLOCK_T // SLICE):  # one after the other, because registers are dear here
        part = token_slice(acc, i, SLICE, BLOCK_N, BLOCK_T) * token_slice(scale, i, SLICE, 1, BLOCK_T)
        _finish(
            part, bias, residual, norm_weight, out, scaled, out_squares,
            rows, rows_in, block, tile * BLOCK_T + i * SLICE, T, N, SWIGLU, BLOCK_N, SLICE,
        )  # fmt: skip


def launch(
    source: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None = None,
    swiglu: int = False,
    out: Tensor | None = None,
) -> Tensor:
    """`source` @ weight.T + bias, with SwiGLU, or GeGLU if that is GELU, of a tensor or a stream's
    norm. See `linear.py`."""
    x, squares, groups, eps = operand(source)
    T, K = x.shape
    N = weight.shape[0] // 2 if swiglu else weight.shape[0]
    if out is None:
        out = x.new_empty(T, N)
    check_product(x, weight, bias=(bias, weight.shape[:1]), out=(out, torch.Size((T, N))))
    if T:
        setup = prepare(x, weight, unit=16 if swiglu else 1)
        _gemm[setup.grid](
            x, weight, bias, None, squares, None, out, None, None, setup.partial, setup.tickets,
            T, N, K, x.stride(0), setup.steps, eps, GROUPS=groups, SWIGLU=swiglu, **setup.constants,
        )  # fmt: skip
    return out


def launch_add(x: Tensor, weight: Tensor, bias: Tensor | None, stream: Stream, norm: Norm) -> Stream:
    """The stream plus x @ weight.T + bias, for the `norm` that comes next."""
    T, K = x.shape
    N = weight.shape[0]
    size = torch.Size((T, N))
    extras = {"bias": (bias, size[1:]), "residual": (stream.x, size), "norm_weight": (norm.weight, size[1:])}
    check_product(x, weight, **extras)
    new = Stream.empty(T, norm, x)
    if T:
        setup = prepare(x, weight)
        _gemm[setup.grid](
            x, weight, bias, stream.x, None, norm.weight, new.x, new.scaled, new.squares, setup.partial,
            setup.tickets, T, N, K, x.stride(0), setup.steps, 0.0, GROUPS=0, SWIGLU=False, **setup.constants,
        )  # fmt: skip
    return new
