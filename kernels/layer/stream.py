"""The residual stream x [T, H], which carries what the norm that reads it next needs.

RMSNorm(x) @ W.T = (x * norm_weight) @ W.T / rms(x), so a kernel that writes x also writes `scaled` and
`squares`, and the product that reads them has a plain operand and one factor per token at its end.

Rounding: x * norm_weight is rounded once to x's dtype, where the separate norm rounds x / rms(x) and its
product; everything after is float32 up to the output. In fp16, |x * norm_weight| must stay below 65504.
The sums of squares are those of x as rounded, by a tree over each group of 64 columns, then by a tree
over the groups: the same bits whatever tile wrote them. (A square of bf16 or fp16 is exact in float32,
so it does not matter where the compiler fuses it with the addition.)

* `embed` makes the first one: x [T, H] = table [V, H] at ids [T], times a number.
* `residual_add` is for what a product cannot add itself: x + h, or x + RMSNorm(h) with a norm of its own
  (Gemma), which needs whole rows; h [T, H] is the sum of `parts` [N, T, H], which N ranks computed of one
  product. They are added in their order in float32 and rounded once, so h depends neither on the rank nor on
  T.

Both kernels have one program per token, which holds the whole row; all in float32 but for h. Launch and code
depend on N and H only, so a token's bits do not depend on its neighbours.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import release_next, use_triton, wait_for_previous
from . import norm as norms
from .norm import Norm, row_options

GROUP = tl.constexpr(64)  # columns to a sum of squares

Lookup = Callable[[Tensor], Tensor]
"""Returns the rows [T, H] of a table for ids [T]."""

# What a kernel writes: x, scaled and squares of `Stream` for a norm with `weight`; and the x that it adds to,
# `residual`, or None.
Written = namedtuple("Written", "residual weight x scaled squares")


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

    def written(self, residual: Tensor | None = None) -> Written:
        """Return the tensors that a kernel writes."""
        return Written(residual, self.norm.weight, self.x, self.scaled, self.squares)


def embed(ids: Tensor, table: Tensor | Lookup, norm: Norm, scale: float = 1.0) -> Stream:
    """Return the embeddings of `ids`, each in 0 .. V - 1, times `scale`, for the first norm."""
    if not isinstance(table, Tensor):
        ids, table = torch.arange(len(ids), device=ids.device), table(ids)
    T, H = len(ids), table.shape[1]
    if not use_triton(table):
        x = F.embedding(ids, table)
        return Stream(x if scale == 1 else x * scale, norm)
    stream = Stream.empty(T, norm, table)
    if T:
        _embed[(T,)](ids, table, stream.written(), SCALE=scale, H=H, **row_options(H, table))
    return stream


def residual_add(parts: Tensor, x: Tensor, norm: Norm, own: Norm | None = None) -> Stream:
    """Return x plus h, or plus its `own` norm, for the `norm` that comes next."""
    if not use_triton(parts):
        return Stream(naive(parts, x, own), norm)
    N, T, H = parts.shape
    stream, (weight, eps) = Stream.empty(T, norm, x), own or (None, 0.0)
    if T:
        _residual_add[(T,)](
            parts, weight, stream.written(x), eps, PARTS=N, H=H, **row_options(H, parts)
        )  # fmt: skip
    return stream


def total(parts: Tensor) -> Tensor:
    """Return the sum of parts [N, ...] in their order, in float32 at least, rounded once."""
    found = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        found = found + part  # which widens it: one kernel on a GPU
    return found.to(parts.dtype)


def naive(parts: Tensor, x: Tensor, own: Norm | None = None) -> Tensor:
    h = parts[0] if len(parts) == 1 else total(parts)
    return x + (h if own is None else norms.naive(h, own))


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
def store_squares(x, squares, n, t, T, H):
    """Write the sums of squares of a tile x [columns n, tokens t] of x.T, which is zero outside."""
    GROUPS: tl.constexpr = x.shape[0] // GROUP
    WIDTH: tl.constexpr = x.shape[1]
    rows = tl.reshape(tl.trans(x * x), [WIDTH * GROUPS, GROUP])
    sums = tl.reshape(tree_sum(rows), [WIDTH, GROUPS])
    group = tl.min(n, 0) // GROUP + tl.arange(0, GROUPS)
    inside = (t < T)[:, None] & (group < tl.cdiv(H, GROUP))[None, :]
    tl.store(squares + group[None, :] * T + t[:, None], sums, inside)


@triton.jit
def load_squares(squares, t, t_in, T, GROUPS: tl.constexpr):
    """The sums of squares [WIDTH, GROUPS] of `Stream` of the tokens t [WIDTH], padded to a power of two."""
    PADDED: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = tl.arange(0, PADDED)
    inside = t_in[:, None] & (group < GROUPS)[None, :]
    return tl.load(squares + group[None, :] * T + t[:, None], inside, other=0.0)


@triton.jit
def inverse_rms(sums, H, eps):
    """Return 1 / rms(x) [1, WIDTH] of tokens from the result of `load_squares`, added by a tree."""
    return tl.rsqrt(tree_sum(sums) / H + eps)[None, :]


@triton.jit
def inverse_rms_of_many(squares, t, t_in, T, H, eps, GROUPS: tl.constexpr):
    """`inverse_rms` of `load_squares`, to the bit, but a few groups at a time: the sums of many tokens would
    not fit the registers."""
    total = _sum_of_squares(squares, 0, t, t_in, T, GROUPS, triton.next_power_of_2(GROUPS))
    return tl.rsqrt(total / H + eps)[None, :]


@triton.jit
def _sum_of_squares(squares, first, t, t_in, T, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Return the sum [WIDTH] of COUNT groups from `first` on, by the tree of `tree_sum`."""
    if COUNT > 8:
        HALF: tl.constexpr = COUNT // 2
        left = _sum_of_squares(squares, first, t, t_in, T, GROUPS, HALF)
        right = _sum_of_squares(squares, first + HALF, t, t_in, T, GROUPS, HALF)
        total = left + right
    else:
        group = first + tl.arange(0, COUNT)
        inside = t_in[:, None] & (group < GROUPS)[None, :]
        total = tree_sum(tl.load(squares + group[None, :] * T + t[:, None], inside, other=0.0))
    return total


@triton.jit
def store_row(value, by, new, H: tl.constexpr):
    """Write a token's row of x, `value` [BLOCK], that times the norm's weight `by`, and the sums of squares
    of its groups."""
    BLOCK: tl.constexpr = value.shape[0]
    token, T, i = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    at = token.to(tl.int64) * H + i
    tl.store(new.x + at, value, i < H)
    wide = value.to(tl.float32)
    tl.store(new.scaled + at, (wide * by).to(new.scaled.dtype.element_ty), i < H)
    GROUPS: tl.constexpr = BLOCK // GROUP
    sums = tree_sum(tl.reshape(wide * wide, [GROUPS, GROUP]))
    group = tl.arange(0, GROUPS)
    tl.store(new.squares + group * T + token, sums, group < tl.cdiv(H, GROUP))


@triton.jit
def columns_of(H: tl.constexpr):
    """Return the columns of a row, padded to a power of two of whole groups."""
    return tl.arange(0, triton.next_power_of_2((H + GROUP - 1) // GROUP) * GROUP)


@triton.jit
def _embed(ids, table, new, SCALE: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    i = columns_of(H)
    by = tl.load(new.weight + i, i < H, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    value = tl.load(table + row * H + i, i < H, other=0.0)
    if SCALE != 1:
        value = (value.to(tl.float32) * SCALE).to(value.dtype)
    store_row(value, by, new, H)


@triton.jit
def _residual_add(
    parts, own, new, eps, PARTS: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    i = columns_of(H)
    by = tl.load(new.weight + i, i < H, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    at = tl.program_id(0).to(tl.int64) * H + i
    h = tl.load(parts + at, i < H, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        h += tl.load(parts + part * tl.num_programs(0).to(tl.int64) * H + at, i < H, other=0.0).to(tl.float32)
    h = h.to(new.x.dtype.element_ty).to(tl.float32)
    value = h
    if own is not None:
        value = h * tl.rsqrt(tl.sum(h * h) / H + eps) * tl.load(own + i, i < H, other=0.0).to(tl.float32)
    value = (value + tl.load(new.residual + at, i < H, other=0.0).to(tl.float32)).to(new.x.dtype.element_ty)
    store_row(value, by, new, H)
