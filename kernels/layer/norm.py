"""RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * weight, reduced in float32.

    x [..., H], weight [H]  ->  [..., H] in x's dtype         (Zhang & Sennrich, 2019)

The weight is in x's dtype, or in float32 (1 + w of Gemma).

Kernel: one program per row, which holds the whole row. Launch and code depend on H
only, so a row's bits do not depend on its neighbours.
"""

from typing import Any, NamedTuple

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2, options, release_next, use_triton, wait_for_previous


class Norm(NamedTuple):
    weight: Tensor  # [H]
    eps: float


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise each row of x by its root mean square and scale by the weight."""
    if not use_triton(x):
        return naive(x, norm)
    H = x.shape[-1]
    rows = x.reshape(-1, H)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty(rows.shape)
    if len(rows):
        _rms_norm[(len(rows),)](rows, norm.weight, out, rows.stride(0), norm.eps, H=H, **row_options(H, x))
    return out.view(x.shape)


def naive(x: Tensor, norm: Norm) -> Tensor:
    if norm.weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), *norm)
    return F.rms_norm(x.to(norm.weight.dtype), (x.shape[-1],), *norm).to(x.dtype)


@triton.jit
def _rms_norm(x, weight, out, row_stride, eps, H: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(H))
    value = tl.load(x + row * row_stride + i, i < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / H + eps)
    w = tl.load(weight + i, i < H, other=0.0).to(tl.float32)
    tl.store(out + row * H + i, (value * scale * w).to(out.dtype.element_ty), i < H)


def row_options(H: int, like: Tensor) -> dict[str, Any]:
    """Return the options of kernels with one program per row of H numbers: up to 8192, 16 or fewer per
    thread."""
    return {"num_warps": min(max(next_power_of_2(H) // 512, 1), 16), **options(like)}
