"""The matrix product of a layer, for any number of rows; `linear.py` is its public face.

    out [T, N] = epilogue(x [T, K] @ weight [N, K].T)

How the product is computed, and why the bits of a token do not depend on the tokens beside it, says
`product.py`. Here
are the epilogues: bias, SwiGLU, residual, and what the next norm needs.

RMSNorm costs no launch and nothing in the loop: norm(x) @ W.T = (x * norm_weight) @ W.T / rms(x).
Whoever writes x also writes x * norm_weight and sums of its squares (`stream.py`); the product of the first
is divided by the root of the second at its end. These sums have an order stated in the code.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import release_next, wait_for_previous
from .norm import Norm
from .product import (
    Setup,
    Tile,
    check_shapes,
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
from .stream import Stream, Written, next_norm

# Values of GATE, which is 0 without one.
SILU, GELU = tl.constexpr(1), tl.constexpr(2)

# Outputs n [columns] of tokens t [SLICE]: offsets `at` [columns, SLICE] from `corner`, which fit 32 bits.
Area = namedtuple("Area", "n t corner at")


@triton.jit(do_not_specialize=["T", "steps"])
def _gemm(operands, new, apart, T, sizes, steps, eps, C: tl.constexpr):
    """Grid: tiles of tokens, blocks of weight rows, parts of K that run apart."""
    release_next(C.PDL)
    index, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = index * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    t_in = t < T
    if C.GATE:
        rows, column = paired_rows(block, sizes.N, C.BLOCK_N)
    else:
        rows = block * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        column = rows
    rows_in = column < sizes.N
    prefetch_weight(operands.weight, tl.where(rows_in, rows, 0), split * steps * C.BLOCK_K, sizes.K, C)
    wait_for_previous(C.PDL)
    tile = Tile(index, block, split, t, t_in, rows, rows_in)
    scale = early_scale(operands, tile, T, sizes.K, eps, C)
    acc = products(operands, tile, sizes, steps, C)
    if C.APART:
        if not last_of_parts(acc, apart, tile, T, C):
            return
        acc = sum_of_parts(apart, tile, T, C)
    scale = late_scale(scale, operands, tile, T, sizes.K, eps, C)
    for i in tl.static_range(C.BLOCK_T // C.SLICE):  # one after the other, because registers are dear here
        acc_slice = finished_slice(acc, scale, operands, tile, i, C)
        _write(acc_slice, new, tile, i, T, sizes.N, C)


@triton.jit
def _write(value, new, tile, i, T, N, C: tl.constexpr):
    """Write the outputs of a slice of sums `value` [BLOCK_N, SLICE]."""
    first = tile.index * C.BLOCK_T + i * C.SLICE
    if C.GATE:
        gate, up = split_pairs(value)
        turn = gate  # silu(x) = x / (1 + e^-x)
        if C.GATE == GELU:  # and gelu, by tanh: x / (1 + e^-y) with this y
            turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = gate / (1.0 + tl.exp(-turn)) * up
    COLUMNS: tl.constexpr = value.shape[0]
    n = tile.block * COLUMNS + tl.arange(0, COLUMNS)
    t = first + tl.arange(0, C.SLICE)
    inside = (n < N)[:, None] & (t < T)[None, :]
    corner = first.to(tl.int64) * N + tile.block * COLUMNS
    at = tl.arange(0, C.SLICE)[None, :] * N + tl.arange(0, COLUMNS)[:, None]
    if C.ADD:
        value += tl.load(new.residual + corner + at, inside, other=0.0).to(tl.float32)
    value = value.to(new.x.dtype.element_ty)
    tl.store(new.x + corner + at, value, inside)
    if C.ADD:
        next_norm(value, new, Area(n, t, corner, at), T, N)


def launch(
    source: Tensor | Stream,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return `source`, a tensor or a stream's norm, @ weight.T + bias; with a gate if it is SILU or GELU."""
    setup = prepare(source, weight, bias, unit=16 if gate else 1, GATE=gate)
    x = setup.operands.x
    size = torch.Size((len(x), setup.sizes.N))
    out = x.new_empty(size) if out is None else out
    check_shapes(out=(out, size))
    _run(setup, Written(None, None, out, None, None))
    return out


def launch_add(x: Tensor, weight: Tensor, bias: Tensor | None, stream: Stream, norm: Norm) -> Stream:
    """Return the stream plus x @ weight.T + bias, for the `norm` that comes next."""
    setup = prepare(x, weight, bias, ADD=True)
    size = torch.Size((len(x), setup.sizes.N))
    check_shapes(residual=(stream.x, size), norm_weight=(norm.weight, size[1:]))
    new = Stream.empty(len(x), norm, x)
    _run(setup, new.written(stream.x))
    return new


def _run(setup: Setup, new: Written) -> None:
    if T := len(setup.operands.x):
        _gemm[setup.grid](
            setup.operands, new, setup.apart, T, setup.sizes, setup.steps, setup.eps, setup.constants,
            **setup.options,
        )  # fmt: skip
