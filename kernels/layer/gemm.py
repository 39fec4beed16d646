"""The matrix product of few rows, bound by reading the weight; `linear.py` is its public face.

    out [T, N] = epilogue(x [T, K] @ weight [N, K].T)

One program reads a block of weight rows once for all tokens of a tile; where the blocks are fewer than
the machine has room for, several programs share a block, each with its part of K. A row's bits must
not depend on the number of rows beside it, so everything that fixes a sum's order depends on the
weight's shape only:

* K is split into parts of a fixed size. Every part is summed by one program in ascending order, the
  parts are added in ascending order by the program that happens to finish last: no floating-point
  atomics, no second launch.
* The weight is the left operand: its rows are the rows of the matrix instruction, tokens the columns.
  So the instruction is the same family for 1 token and for 128 (only its width differs), and few
  tokens waste little of it.
* RMSNorm costs no launch either: norm(x) @ W.T = (x * norm_weight) @ W.T * 1/rms(x), and the program
  sums x^2 while it reads x. That sum, too, has an order stated in the code (`_tree_sum`).

Rounding: x * norm_weight is rounded once to x's dtype, where the separate norm rounds x / rms(x) and
its product; everything after is float32 up to the output. In fp16, |x * norm_weight| must stay below
65504. Calls on one device must not overlap on several streams: they share the tickets by which the
last program knows itself.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import arch
from .norm import Norm

PROGRAMS = 512  # aimed at by splitting K
MIN_SPLIT = 256  # of K; shorter parts write more partial results than they save time

# (most tokens, weight rows, columns per step, warps, stages) by architecture; the last serves all
# longer inputs. With a norm or SwiGLU at most 64 rows and 64 columns. 64 rows are the least that
# Hopper's wgmma takes; few rows make many programs, many rows read x less often.
CONFIGS = {
    "sm_80": ((16, 64, 128, 4, 4), (32, 64, 128, 4, 4), (64, 64, 64, 4, 3), (128, 128, 64, 8, 3)),
    "sm_90": ((16, 64, 128, 4, 5), (32, 64, 128, 4, 4), (64, 128, 64, 4, 4), (128, 128, 64, 8, 4)),
    "sm_100": ((16, 64, 128, 4, 5), (32, 64, 128, 4, 4), (64, 64, 64, 4, 4), (128, 64, 64, 8, 4)),
    "gfx942": ((16, 64, 128, 4, 2), (32, 64, 128, 4, 2), (64, 64, 64, 4, 2), (128, 128, 64, 8, 1)),
}
# AMD has two shapes of matrix instruction and would choose by tile; one sum order needs one shape.
OPTIONS = {"gfx942": {"matrix_instr_nonkdim": 16}}


@triton.jit
def _tree_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum of x [ROWS, WIDTH] over WIDTH by adjacent pairs, in the same order for any layout."""
    for step in tl.static_range(0, 16):
        if WIDTH >> step > 1:
            left, right = tl.split(tl.reshape(x, [ROWS, WIDTH >> (step + 1), 2]))
            x = left + right
    return tl.reshape(x, [ROWS])


@triton.jit(do_not_specialize=["T", "steps", "splits"])
def _gemm(
    x, weight, bias, residual, norm_weight, out, partial, partial_squares, tickets,
    T, N, K, x_stride, steps, splits, eps, NORM: tl.constexpr, SWIGLU: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t_in, n_in = t < T, n < N
    x_row = x + t.to(tl.int64)[:, None] * x_stride
    w_row = weight + n.to(tl.int64)[:, None] * K
    up_row = w_row + N.to(tl.int64) * K  # SWIGLU: N outputs from 2N weight rows
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for step in range(split * steps, tl.minimum((split + 1) * steps, tl.cdiv(K, BLOCK_K))):
        column = step * BLOCK_K + k  # known to be aligned, unlike a running sum
        k_in = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
        value = tl.load(x_row + column[None, :], t_in[:, None] & k_in[None, :], other=0.0)
        w = tl.load(w_row + column[None, :], n_in[:, None] & k_in[None, :], other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_weight + column, k_in, other=0.0).to(tl.float32)
            value = (wide * scale[None, :]).to(value.dtype)
        value = tl.trans(value)  # [BLOCK_K, BLOCK_T]
        acc = tl.dot(w, value, acc, input_precision=PRECISION)
        if SWIGLU:
            w = tl.load(up_row + column[None, :], n_in[:, None] & k_in[None, :], other=0.0)
            up = tl.dot(w, value, up, input_precision=PRECISION)
    square = tl.zeros([BLOCK_T], tl.float32)
    if NORM:
        square = _tree_sum(squares, BLOCK_T, BLOCK_K)

    inside = n_in[:, None] & t_in[None, :]
    if SPLIT:
        # Leave the sums of this part; whoever takes the last ticket adds all parts, in order.
        ticket = block * tl.num_programs(0) + tile
        at = t.to(tl.int64)[None, :] * N + n[:, None]
        stride = T.to(tl.int64) * N
        tl.store(partial + split * stride + at, acc, inside)
        if SWIGLU:
            tl.store(partial + (splits + split) * stride + at, up, inside)
        if NORM:
            tl.store(partial_squares + (block * splits + split) * T + t, square, t_in)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(tickets + ticket, 1, sem="acq_rel") != splits - 1:
            return
        tl.store(tickets + ticket, 0)  # ready for the next launch
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        square = tl.zeros([BLOCK_T], tl.float32)
        for other in range(splits):
            acc += tl.load(partial + other * stride + at, inside, other=0.0, cache_modifier=".cg")
            if SWIGLU:
                up += tl.load(
                    partial + (splits + other) * stride + at, inside, other=0.0, cache_modifier=".cg"
                )
            if NORM:
                square += tl.load(
                    partial_squares + (block * splits + other) * T + t, t_in, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip

    if NORM:
        scale = tl.rsqrt(square / K + eps)
        acc = acc * scale[None, :]
        up = up * scale[None, :]
    if bias is not None:
        acc += tl.load(bias + n, n_in, other=0.0).to(tl.float32)[:, None]
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = t.to(tl.int64)[None, :] * N + n[:, None]
    if residual is not None:
        acc += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), inside)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    swiglu: bool = False,
) -> Tensor:
    """See `linear.py` for what each combination means."""
    T, K = x.shape
    N = weight.shape[0] // 2 if swiglu else weight.shape[0]
    out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    norm_weight, eps = norm or (None, 0.0)
    extras = (bias, weight.shape[:1]), (residual, out.shape), (norm_weight, x.shape[1:])
    _check(x, weight, dict(zip(("bias", "residual", "norm weight"), extras)))
    if T == 0:
        return out
    configs = CONFIGS[arch(x)]
    width, rows, block_k, warps, stages = next((c for c in configs if c[0] >= T), configs[-1])
    if norm_weight is not None:
        rows, block_k = 64, 64
    if K % block_k:
        block_k = 64
    splits, part = split_k(N, K)
    tiles, blocks = triton.cdiv(T, width), triton.cdiv(N, rows)
    partial = squares = counters = None
    if splits > 1:
        partial = torch.empty(splits * (1 + swiglu), T, N, dtype=torch.float32, device=x.device)
        counters = tickets(x.device)
        if blocks * tiles > counters.numel():
            raise ValueError(f"{blocks * tiles} output tiles exceed the {counters.numel()} tickets.")
        if norm_weight is not None:
            squares = torch.empty(blocks, splits, T, dtype=torch.float32, device=x.device)
    _gemm[(tiles, blocks, splits)](
        x, weight, bias, residual, norm_weight, out, partial, squares, counters,
        T, N, K, x.stride(0), part // block_k, splits, eps, NORM=norm_weight is not None, SWIGLU=swiglu,
        SPLIT=splits > 1, BLOCK_T=width, BLOCK_N=rows, BLOCK_K=block_k, EVEN=K % block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps,
        num_stages=1 if x.dtype == torch.float32 else stages, **OPTIONS.get(arch(x), {}),
    )  # fmt: skip
    return out


def split_k(N: int, K: int) -> tuple[int, int]:
    """(number of parts of K, size of each but the last), from the weight's shape alone."""
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(N, 64))
    splits = max(min(wanted, K // MIN_SPLIT), 1)
    step = 128 if K % 128 == 0 else 64  # whole steps of the kernel's loop
    part = triton.cdiv(K, splits * step) * step
    return triton.cdiv(K, part), part


@cache
def tickets(device: torch.device) -> Tensor:
    """Counters that are zero between launches. Made outside of graph capture, at the first call."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def _check(x: Tensor, weight: Tensor, extras: dict[str, tuple[Tensor | None, torch.Size]]) -> None:
    """Refuse what the kernel would read wrongly."""
    if weight.is_mkldnn:
        raise ValueError("This weight was packed for `naive`; pack it with the kernels switched on.")
    if x.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError("x must be contiguous in its last dimension, the weight in all.")
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {list(weight.shape)}.")
    for name, (tensor, shape) in extras.items():
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(f"The {name} must be contiguous {list(shape)}, not {list(tensor.shape)}.")
