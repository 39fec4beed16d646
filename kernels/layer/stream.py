"""The residual stream x [T, H] and RMSNorm, which reads it.

    RMSNorm(x) = x / rms(x) * weight,  rms(x) = sqrt(mean(x^2) + eps)         (Zhang & Sennrich, 2019)

The weight [H] is in x's dtype, or in float32 (1 + w of Gemma).

RMSNorm(x) @ W.T = (x * weight) @ W.T / rms(x), so a kernel that writes x also writes `scaled`, x * weight,
and `squares`, and the product that reads them has a plain operand and one factor per token at its end.

Rounding: x * weight is rounded once to x's dtype, where `rms_norm` rounds x / rms(x) and its product;
everything after is float32 up to the output. In fp16, |x * weight| must stay below 65504. The sums of squares
are those of x as rounded, by a tree over each group of 64 columns, then by a tree over the groups: the same
bits whatever tile wrote them. (A square of bf16 or fp16 is exact in float32, so it does not matter where the
compiler fuses it with the addition.)

`residual_add` is for what a product cannot add itself: x + h, or x + RMSNorm(h) with a norm of its own
(Gemma), which needs whole rows; h [T, H] is the sum of `parts` [N, T, H], which N ranks computed of one
product. They are added in their order in float32 and rounded once, so h depends neither on the rank nor on T.
Without x, its kernel serves `embed`, which makes the first stream, and `rms_norm`, the end of the model.

Kernel: one program per token, which holds the whole row; all in float32 but for h. Launch and code depend on
N and H only, so a token's bits do not depend on its neighbours.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2, options, release_next, use_triton, wait_for_previous

GROUP = tl.constexpr(64)  # columns to a sum of squares

# What a kernel writes: x and, for a norm with `weight`, scaled and squares of `Stream`; `residual` is the x
# that it adds to.
Written = namedtuple("Written", "x residual weight scaled squares", defaults=[None, None, None, None])


class Norm(NamedTuple):
    weight: Tensor  # [H]
    eps: float


class Stream(NamedTuple):
    """The residual stream before a norm.

    Attributes:
        x: [T, H].
        norm: the one that comes next.
        scaled: [T, H], x * norm.weight in x's dtype. None on the naive path, as is `squares`.
        squares: [ceil(H / 64), T] float32.
    """

    x: Tensor
    norm: Norm
    scaled: Tensor | None = None
    squares: Tensor | None = None

    @classmethod
    def empty(cls, T: int, norm: Norm, like: Tensor) -> "Stream":
        """Return one for a kernel to write to."""
        H = norm.weight.shape[0]
        squares = torch.empty(triton.cdiv(H, GROUP.value), T, dtype=torch.float32, device=like.device)
        return cls(like.new_empty(T, H), norm, like.new_empty(T, H), squares)

    def written(self, residual: Tensor | None) -> Written:
        """Return the tensors that a kernel writes."""
        return Written(self.x, residual, self.norm.weight, self.scaled, self.squares)


def embed(ids: Tensor, table: Tensor | Callable[[Tensor], Tensor], norm: Norm, scale: float = 1.0) -> Stream:
    """Return the embeddings of `ids` [T], each in 0 .. V - 1, times `scale`, for the first norm. `table`:
    [V, H], or a function that returns its rows [T, H] for ids."""
    rows = F.embedding(ids, table) if isinstance(table, Tensor) else table(ids)
    return residual_add((rows if scale == 1 else rows * scale)[None], None, norm)


def residual_add(parts: Tensor, x: Tensor | None, norm: Norm, own: Norm | None = None) -> Stream:
    """Return x (None: zeros) plus h, or plus its `own` norm, for the `norm` that comes next."""
    if not use_triton(parts):
        return Stream(naive(parts, x, own), norm)
    N, T, H = parts.shape
    new = Stream.empty(T, norm, parts)
    warps = min(max(next_power_of_2(H) // 512, 1), 16)  # up to 16 numbers per thread in rows of 8192
    _residual_add[(T,)](
        parts, own, new.written(x), PARTS=N, ADD=x is not None, H=H, num_warps=warps, **options(parts)
    )
    return new


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Return RMSNorm of x [T, H]."""
    return residual_add(x[None], None, norm, own=norm).x if use_triton(x) else naive_norm(x, norm)


def total(parts: Tensor) -> Tensor:
    """Return the sum of parts [N, ...] in their order, in float32 at least, rounded once."""
    found = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        found = found + part  # which widens it: one kernel on a GPU
    return found.to(parts.dtype)


def naive(parts: Tensor, x: Tensor | None, own: Norm | None = None) -> Tensor:
    h = parts[0] if len(parts) == 1 else total(parts)
    h = h if own is None else naive_norm(h, own)
    return h if x is None else x + h


def naive_norm(x: Tensor, norm: Norm) -> Tensor:
    """Return RMSNorm of x [..., H]."""
    return F.rms_norm(x.to(norm.weight.dtype), (x.shape[-1],), *norm).to(x.dtype)


@triton.jit
def tree_sum(x):
    """Sum x [rows, width] over width by adjacent pairs, in the same order for any layout."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    for step in tl.static_range(0, 16):
        if WIDTH >> step > 1:
            left, right = tl.split(tl.reshape(x, [ROWS, WIDTH >> (step + 1), 2]))
            x = left + right
    return tl.reshape(x, [ROWS])


@triton.jit
def store_squares(x, squares, first, t, T, H):
    """Write the sums of squares of a tile x [columns from `first` on, tokens t] of x.T, zero outside."""
    GROUPS: tl.constexpr = x.shape[0] // GROUP
    WIDTH: tl.constexpr = x.shape[1]
    rows = tl.reshape(tl.trans(x * x), [WIDTH * GROUPS, GROUP])
    sums = tl.reshape(tree_sum(rows), [WIDTH, GROUPS])
    group = first // GROUP + tl.arange(0, GROUPS)
    inside = (t < T)[:, None] & (group < tl.cdiv(H, GROUP))[None, :]
    tl.store(squares + group[None, :] * T + t[:, None], sums, inside)


@triton.jit
def load_squares(squares, first, t, t_in, T, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Load the sums of squares [WIDTH, COUNT] of the tokens t [WIDTH], of the groups from `first` on, which
    end at GROUPS. COUNT is a power of two."""
    group = first + tl.arange(0, COUNT)
    inside = t_in[:, None] & (group < GROUPS)[None, :]
    return tl.load(squares + group[None, :] * T + t[:, None], inside, other=0.0)


@triton.jit
def sum_squares(squares, first, t, t_in, T, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Return `tree_sum` of `load_squares`, but load a few groups at a time: those of many tokens would not
    fit the registers."""
    if COUNT > 8:
        HALF: tl.constexpr = COUNT // 2
        left = sum_squares(squares, first, t, t_in, T, GROUPS, HALF)
        right = sum_squares(squares, first + HALF, t, t_in, T, GROUPS, HALF)
        total = left + right
    else:
        total = tree_sum(load_squares(squares, first, t, t_in, T, GROUPS, COUNT))
    return total


@triton.jit
def _residual_add(
    parts, own, new, PARTS: tl.constexpr, ADD: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr
):
    release_next(PDL)
    i = tl.arange(0, triton.next_power_of_2((H + GROUP - 1) // GROUP) * GROUP)  # whole groups
    by = tl.load(new.weight + i, i < H, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    token, T = tl.program_id(0), tl.num_programs(0)
    at = token.to(tl.int64) * H + i
    if ADD:  # before the reduction: one wait for memory, and triton 3.6 spills on sm_100 if it comes after
        residual = tl.load(new.residual + at, i < H, other=0.0)
    h = tl.load(parts + at, i < H, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        h += tl.load(parts + part * T.to(tl.int64) * H + at, i < H, other=0.0).to(tl.float32)
    h = h.to(new.x.dtype.element_ty).to(tl.float32)
    value = h
    if own is not None:
        weight = tl.load(own.weight + i, i < H, other=0.0).to(tl.float32)
        value = h * tl.rsqrt(tl.sum(h * h) / H + own.eps) * weight
    if ADD:
        value += residual.to(tl.float32)
    value = value.to(new.x.dtype.element_ty)
    tl.store(new.x + at, value, i < H)
    wide = value.to(tl.float32)
    tl.store(new.scaled + at, (wide * by).to(new.scaled.dtype.element_ty), i < H)
    store_squares(wide[:, None], new.squares, 0, token + tl.arange(0, 1), T, H)
