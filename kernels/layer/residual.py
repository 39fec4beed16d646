"""What attention or an MLP gave, added to the residual stream x [T, H] where the product cannot do so itself.

    x + h, or x + RMSNorm(h) with a norm of its own (Gemma);  h = the sum of `parts` [N, T, H]

Parts are what N ranks computed of one product. They are added in their order in float32 and h is
rounded once, so its bits depend neither on which rank adds nor on how many tokens there are. A norm needs
whole rows, of which the programs of a product have parts; for it N may be 1.

Kernel: one program per token, which holds the whole row, as in `norm.py`; all in float32 but for h. Launch
and code depend on N and H only, so a token's bits do not depend on its neighbours.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..launch import release_next, use_triton, wait_for_previous
from . import norm as norms
from .norm import MAX_WIDTH, Norm
from .stream import Stream, row_options, store_row
from .vocab_parallel import total


def residual_add(parts: Tensor, x: Tensor, norm: Norm, own: Norm | None = None) -> Stream:
    """x plus h, or plus its `own` norm, for the `norm` that comes next."""
    if use_triton(parts):
        return launch(parts, x, norm, own)
    return Stream(naive(parts, x, own), norm)


def naive(parts: Tensor, x: Tensor, own: Norm | None = None) -> Tensor:
    h = parts[0] if len(parts) == 1 else total(parts)
    return x + (h if own is None else norms.naive(h, own))


@triton.jit(do_not_specialize=["T"])
def _residual_add(
    parts, own, new, T, H, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    token = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < H
    by = tl.load(new.weight + i, inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    at = token.to(tl.int64) * H + i
    h = tl.load(parts + at, inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        h += tl.load(parts + part * T.to(tl.int64) * H + at, inside, other=0.0).to(tl.float32)
    h = h.to(new.x.dtype.element_ty).to(tl.float32)
    value = h
    if own is not None:
        value = h * tl.rsqrt(tl.sum(h * h) / H + eps) * tl.load(own + i, inside, other=0.0).to(tl.float32)
    value = (value + tl.load(new.residual + at, inside, other=0.0).to(tl.float32)).to(new.x.dtype.element_ty)
    store_row(value, by, new, token, T, H)


def launch(parts: Tensor, x: Tensor, norm: Norm, own: Norm | None = None) -> Stream:
    N, T, H = parts.shape
    own_weight = None if own is None else own.weight
    for tensor, shape in ((parts, (N, T, H)), (x, (T, H)), (own_weight, (H,)), (norm.weight, (H,))):
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(f"All must be contiguous and fit h {[T, H]}, not {list(tensor.shape)}.")
    if H > MAX_WIDTH:
        raise ValueError(f"RMSNorm of width {H} exceeds the limit of {MAX_WIDTH} per program.")
    stream = Stream.empty(T, norm, parts[0])
    if T:
        _residual_add[(T,)](
            parts, own_weight, stream.written(x), T, H, 0.0 if own is None else own.eps, PARTS=N,
            **row_options(H, parts),
        )  # fmt: skip
    return stream
