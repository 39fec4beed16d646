"""The residual stream x [T, H], which carries what the norm that reads it next needs.

RMSNorm(x) @ W.T = (x * norm_weight) @ W.T / rms(x), so a kernel that writes x also writes `scaled` and
`squares`, and the product that reads them has a plain operand and one factor per token at its end.

Rounding: x * norm_weight is rounded once to x's dtype, where the separate norm rounds x / rms(x) and its
product; everything after is float32 up to the output. In fp16, |x * norm_weight| must stay below 65504.
The sums of squares are those of x as rounded, by a tree over each group of 64 columns, then by a tree
over the groups: the same bits whatever tile wrote them. (A square of bf16 or fp16 is exact in float32,
so it does not matter where the compiler fuses it with the addition.)

`embed` makes the first one: x [T, H] = table [V, H] at ids [T], times a number.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2, options, release_next, use_triton, wait_for_previous
from .norm import Norm
from .vocab_parallel import Vocabulary

GROUP = tl.constexpr(64)  # columns to a sum of squares


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


def embed(ids: Tensor, table: Tensor | Vocabulary, norm: Norm, scale: float = 1.0) -> Stream:
    """The embeddings of `ids`, each in 0 .. V - 1, times `scale`, for the first norm."""
    if isinstance(table, Vocabulary):
        ids, table = torch.arange(len(ids), device=ids.device), table.lookup(ids)
    return launch(ids, table, norm, scale) if use_triton(table) else Stream(naive(ids, table, scale), norm)


def naive(ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    x = F.embedding(ids, table)
    return x if scale == 1 else x * scale


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
def next_norm(value, new, area, T, N):
    """Write what belongs to a tile `value` [columns, tokens] of x.T; zero outside."""
    GROUPS: tl.constexpr = value.shape[0] // GROUP
    WIDTH: tl.constexpr = value.shape[1]
    n, t, n_in = area.n, area.t, area.n < N
    scaled = new.scaled + area.corner
    wide = value.to(tl.float32)
    by = tl.load(new.weight + n, n_in, other=0.0).to(tl.float32)
    inside = n_in[:, None] & (t < T)[None, :]
    tl.store(scaled + area.at, (wide * by[:, None]).to(new.scaled.dtype.element_ty), inside)
    rows = tl.reshape(tl.trans(wide * wide), [WIDTH * GROUPS, GROUP])
    sums = tl.reshape(tree_sum(rows), [WIDTH, GROUPS])
    group = tl.min(n, 0) // GROUP + tl.arange(0, GROUPS)
    known = tl.max(tl.where(n_in, n, 0), 0) // GROUP
    squares = new.squares + group[None, :] * T + t[:, None]
    tl.store(squares, sums, (t < T)[:, None] & (group <= known)[None, :])


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
def store_row(value, by, new, token, T, H):
    """Write a token's row of x, `value` [BLOCK], that times the norm's weight `by`, and the sums of squares
    of its groups."""
    BLOCK: tl.constexpr = value.shape[0]
    i = tl.arange(0, BLOCK)
    at = token.to(tl.int64) * H + i
    tl.store(new.x + at, value, i < H)
    wide = value.to(tl.float32)
    tl.store(new.scaled + at, (wide * by).to(new.scaled.dtype.element_ty), i < H)
    GROUPS: tl.constexpr = BLOCK // GROUP
    sums = tree_sum(tl.reshape(wide * wide, [GROUPS, GROUP]))
    group = tl.arange(0, GROUPS)
    tl.store(new.squares + group * T + token, sums, group < tl.cdiv(H, GROUP))


@triton.jit(do_not_specialize=["T"])
def _embed(ids, table, new, T, H, SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    token = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < H
    by = tl.load(new.weight + i, inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    row = tl.load(ids + token).to(tl.int64)
    value = tl.load(table + row * H + i, inside, other=0.0)
    if SCALE != 1:
        value = (value.to(tl.float32) * SCALE).to(value.dtype)
    store_row(value, by, new, token, T, H)


def launch(ids: Tensor, table: Tensor, norm: Norm, scale: float = 1.0) -> Stream:
    T, H = ids.shape[0], table.shape[1]
    if norm.weight.shape != (H,) or not norm.weight.is_contiguous() or not table.is_contiguous():
        raise ValueError(
            f"The table must be contiguous and the norm weight [{H}], not {list(norm.weight.shape)}."
        )
    stream = Stream.empty(T, norm, table)
    if T:
        _embed[(T,)](ids, table, stream.written(), T, H, SCALE=scale, **row_options(H, table))
    return stream


def row_options(H: int, like: Tensor) -> dict[str, Any]:
    """Return the constants and options of kernels with one program per row of H numbers."""
    block = max(next_power_of_2(H), GROUP.value)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16), **options(like)}
