"""The residual stream x [T, H] and the RMSNorm that is applied to it.

    RMSNorm(x) = x / rms(x) * weight,  rms(x) = sqrt(mean(x^2) + eps)         (Zhang & Sennrich, 2019)

The weight [H] has x's dtype, or float32 (1 + w of Gemma).

RMSNorm(x) @ W.T = (x * weight) @ W.T / rms(x). So a kernel that writes x also writes `scaled`, x * weight,
and `squares`; the next product has `scaled` as a plain operand and one factor per token in its epilogue.

Rounding: x * weight is rounded once to x's dtype, whereas `rms_norm` rounds both x / rms(x) and the product.
Everything after is float32 up to the output. In fp16, |x * weight| must stay below 65504. The squares are
those of the rounded x, summed by a tree over each group of 64 columns, then by a tree over the groups, so
that the sum does not depend on the tiling. (Squares of bf16 and fp16 are exact in float32, fused or not.)

`residual_add` is for additions that a product cannot fuse: x + h with h from several ranks, and
x + RMSNorm(h), which needs whole rows (Gemma). h [T, H] is the sum of `parts` [N, T, H], the partial products
of N ranks, in this order in float32, rounded once; it depends neither on the rank nor on T. Without x, the
same kernel serves `embed`, which creates the first residual, and `rms_norm`, the final norm of the model.

Kernel: one program per token holds the whole row, in float32 except for h. Launch and code depend on N and H
only, so the result of a token does not depend on other tokens.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2, options, release_next, use_triton, wait_for_previous

GROUP = tl.constexpr(64)  # columns per sum of squares

# The output of a kernel: x and, for the next norm with `weight`, `scaled` and `squares` as in `Residual`;
# `residual` is the x that it adds to. `num_used`: see `Batch`.
Outputs = namedtuple(
    "Outputs", "x residual weight scaled squares num_used", defaults=[None, None, None, None, None]
)


class Norm(NamedTuple):
    weight: Tensor  # [H]
    eps: float


class Residual(NamedTuple):
    """The residual stream ahead of a norm."""

    x: Tensor  # [T, H]
    norm: Norm  # the next norm
    scaled: Tensor | None = None  # [T, H], x * norm.weight in x's dtype; None on the naive path
    squares: Tensor | None = None  # [ceil(H / 64), T] float32; None on the naive path
    num_used: Tensor | None = None  # see `Batch`: kernels skip the tokens after these

    @classmethod
    def empty(cls, T: int, norm: Norm, like: Tensor, num_used: Tensor | None) -> "Residual":
        """Return uninitialized tensors for a kernel to write to."""
        H = norm.weight.shape[0]
        squares = torch.empty(triton.cdiv(H, GROUP.value), T, dtype=torch.float32, device=like.device)
        return cls(like.new_empty(T, H), norm, like.new_empty(T, H), squares, num_used)

    def outputs(self, residual: Tensor | None) -> Outputs:
        """Return the output arguments of a kernel that adds to `residual`."""
        return Outputs(self.x, residual, self.norm.weight, self.scaled, self.squares, self.num_used)


def embed(
    ids: Tensor, table: Any, norm: Norm, scale: float = 1.0, num_used: Tensor | None = None
) -> Residual:
    """Return the residual stream after the embedding of `ids` [T], each in 0 .. V - 1, times `scale`. `norm`:
    the first norm. `table`: see `look_up`."""
    rows = look_up(ids, table)
    return residual_add((rows if scale == 1 else rows * scale)[None], None, norm, num_used=num_used)


def look_up(ids: Tensor, table: Any) -> Tensor:
    """Return the rows [T, H] of `table`, a tensor [V, H] or an object with `rows(ids)` such as `Linear`."""
    return F.embedding(ids, table) if isinstance(table, Tensor) else table.rows(ids)


def residual_add(
    parts: Tensor, x: Tensor | None, next_norm: Norm, out_norm: Norm | None = None,
    num_used: Tensor | None = None,
) -> Residual:  # fmt: skip
    """Return x + h (x = 0 if None), or x + RMSNorm(h) with `out_norm` if given, for the next layer's norm."""
    if not use_triton(parts):
        return Residual(naive(parts, x, out_norm), next_norm)
    N, T, H = parts.shape
    new = Residual.empty(T, next_norm, parts, num_used)
    warps = min(max(next_power_of_2(H) // 512, 1), 16)  # up to 16 elements per thread for H = 8192
    _residual_add[(T,)](
        parts, out_norm, new.outputs(x), PARTS=N, ADD=x is not None, H=H, SKIP=num_used is not None,
        num_warps=warps, **options(parts, T),
    )  # fmt: skip
    return new


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Return RMSNorm of x [T, H]."""
    return residual_add(x[None], None, norm, out_norm=norm).x if use_triton(x) else naive_norm(x, norm)


def total(parts: Tensor) -> Tensor:
    """Return the sum of parts [N, ...] in order, accumulated in at least float32 and rounded once."""
    result = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        result = result + part  # converts in the same kernel on a GPU
    return result.to(parts.dtype)


def naive(parts: Tensor, x: Tensor | None, out_norm: Norm | None = None) -> Tensor:
    h = parts[0] if len(parts) == 1 else total(parts)
    h = h if out_norm is None else naive_norm(h, out_norm)
    return h if x is None else x + h


def naive_norm(x: Tensor, norm: Norm) -> Tensor:
    """Return RMSNorm of x [..., H]."""
    return F.rms_norm(x.to(norm.weight.dtype), (x.shape[-1],), *norm).to(x.dtype)


@triton.jit
def pairwise_sum(x):
    """Sum x [rows, width] over width by adjacent pairs, in an order that does not depend on the layout."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    for step in tl.static_range(0, 16):
        if WIDTH >> step > 1:
            left, right = tl.split(tl.reshape(x, [ROWS, WIDTH >> (step + 1), 2]))
            x = left + right
    return tl.reshape(x, [ROWS])


@triton.jit
def store_squares(x, squares, first, t, T, H):
    """Store sums of squares of a tile x [columns, tokens t], 0 outside H. `first`: its first column of H."""
    GROUPS: tl.constexpr = x.shape[0] // GROUP
    sums = x * x
    for step in tl.static_range(6):  # `pairwise_sum` would be 936 instead of 760 instructions (o of 0.6B)
        sums = tl.sum(tl.reshape(sums, [x.shape[0] >> (step + 1), 2, x.shape[1]]), 1)
    group = first // GROUP + tl.arange(0, GROUPS)[:, None]
    tl.store(squares + group * T + t[None, :], sums, (group < tl.cdiv(H, GROUP)) & (t < T)[None, :])


@triton.jit
def load_squares(squares, t, t_in, T, GROUPS: tl.constexpr):
    """Load the sums of squares [WIDTH, groups] of tokens t [WIDTH], 0 beyond GROUPS."""
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    inside = t_in[:, None] & (group < GROUPS)[None, :]
    return tl.load(squares + group[None, :] * T + t[:, None], inside, other=0.0)


@triton.jit
def sum_squares(squares, t, t_in, T, GROUPS: tl.constexpr):
    """Return `pairwise_sum(load_squares(...))` for many tokens. A thread adds up all groups of a token."""
    HALF: tl.constexpr = triton.next_power_of_2((GROUPS + 1) // 2)
    left = sum_groups(squares, 0, t, t_in, T, GROUPS, HALF)
    right = sum_groups(squares, HALF, t, t_in, T, GROUPS, HALF)
    # A reduction of two: the compiler would repeat the loads for a plain sum in the layout of the product
    # (Qwen3-8B, 64 tokens: 1,008 additions per thread instead of 63).
    return tl.sum(tl.join(left, right), 1)


@triton.jit
def sum_groups(squares, first, t, t_in, T, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum of the squares of COUNT groups from `first` on, by pairs."""
    if COUNT > 1:
        left = sum_groups(squares, first, t, t_in, T, GROUPS, COUNT // 2)
        total = left + sum_groups(squares, first + COUNT // 2, t, t_in, T, GROUPS, COUNT // 2)
    else:
        total = tl.load(squares + first * T + t, t_in & (first < GROUPS), other=0.0)
    return total


@triton.jit
def _residual_add(
    parts, out_norm, new, PARTS: tl.constexpr, ADD: tl.constexpr, H: tl.constexpr, SKIP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_next(PDL)
    i = tl.arange(0, triton.next_power_of_2((H + GROUP - 1) // GROUP) * GROUP)  # whole groups
    by = tl.load(new.weight + i, i < H, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    token, T = tl.program_id(0), tl.num_programs(0)
    if SKIP:  # noqa: SIM102
        if token >= tl.load(new.num_used):
            return
    at = token.to(tl.int64) * H + i
    if ADD:  # load before the reduction: one memory latency, and no spills with triton 3.6 on sm_100
        residual = tl.load(new.residual + at, i < H, other=0.0)
    h = tl.load(parts + at, i < H, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        h += tl.load(parts + part * T.to(tl.int64) * H + at, i < H, other=0.0).to(tl.float32)
    h = h.to(new.x.dtype.element_ty).to(tl.float32)
    value = h
    if out_norm is not None:
        weight = tl.load(out_norm.weight + i, i < H, other=0.0).to(tl.float32)
        value = h * tl.rsqrt(tl.sum(h * h) / H + out_norm.eps) * weight
    if ADD:
        value += residual.to(tl.float32)
    value = value.to(new.x.dtype.element_ty)
    tl.store(new.x + at, value, i < H)
    wide = value.to(tl.float32)
    tl.store(new.scaled + at, (wide * by).to(new.scaled.dtype.element_ty), i < H)
    group = tl.arange(0, i.shape[0] // GROUP)
    sums = pairwise_sum(tl.reshape(wide * wide, [i.shape[0] // GROUP, GROUP]))
    tl.store(new.squares + group * T + token, sums, group < tl.cdiv(H, GROUP))
