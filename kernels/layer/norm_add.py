"""The residual stream plus the norm of what attention or an MLP gave (Gemma), for the norm that comes next.

    x [T, H] + RMSNorm(h [T, H])

The product that gave h is a kernel of its own: the norm needs whole rows, of which its programs have parts.

Kernel: one program per token, which holds the whole row, as in `norm.py`; all in float32 up to the new x,
which is rounded once (`naive` rounds the norm before). Launch and code depend on H only, so a token's bits do
not depend on its neighbours.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import use_triton
from ..launch import next_power_of_2
from ..overlap import options, release_next, wait_for_previous
from . import norm as norms
from .norm import MAX_WIDTH, Norm
from .stream import GROUP, Stream, tree_sum


def norm_add(h: Tensor, own: Norm, stream: Stream, norm: Norm) -> Stream:
    """The stream plus the `own` norm of h [T, H], for the `norm` that comes next."""
    if use_triton(h):
        return launch(h, own, stream, norm)
    return Stream(naive(h, own, stream.x), norm)


def naive(h: Tensor, own: Norm, x: Tensor) -> Tensor:
    return x + norms.naive(h, own)


@triton.jit(do_not_specialize=["T"])
def _norm_add(
    h, own, x, weight, new, scaled, squares, T, H, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    token = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < H
    by_own = tl.load(own + i, inside, other=0.0).to(tl.float32)
    by = tl.load(weight + i, inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    at = token.to(tl.int64) * H + i
    wide = tl.load(h + at, inside, other=0.0).to(tl.float32)
    before = tl.load(x + at, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / H + eps)
    value = tl.fma(wide * scale, by_own, before).to(new.dtype.element_ty)
    tl.store(new + at, value, inside)
    wide = value.to(tl.float32)
    tl.store(scaled + at, (wide * by).to(scaled.dtype.element_ty), inside)
    GROUPS: tl.constexpr = BLOCK // GROUP
    sums = tree_sum(tl.reshape(wide * wide, [GROUPS, GROUP]), GROUPS, GROUP)
    group = tl.arange(0, GROUPS)
    tl.store(squares + group * T + token, sums, group < tl.cdiv(H, GROUP))


def launch(h: Tensor, own: Norm, stream: Stream, norm: Norm) -> Stream:
    T, H = h.shape
    for tensor, shape in ((h, (T, H)), (stream.x, (T, H)), (own.weight, (H,)), (norm.weight, (H,))):
        if tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"All must be contiguous and fit h {[T, H]}, not {list(tensor.shape)}.")
    if H > MAX_WIDTH:
        raise ValueError(f"RMSNorm of width {H} exceeds the limit of {MAX_WIDTH} per program.")
    new = Stream.empty(T, norm, h)
    if T:
        block = max(next_power_of_2(H), GROUP.value)
        _norm_add[(T,)](
            h, own.weight, stream.x, norm.weight, new.x, new.scaled, new.squares, T, H, own.eps, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16), **options(h),
        )  # fmt: skip
    return new
