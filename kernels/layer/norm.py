"""RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * weight, reduced in float32.

    x [..., H], weight [H]  ->  [..., H] in x's dtype         (Zhang & Sennrich, 2019)

The weight is in x's dtype, or in float32 (1 + w of Gemma).

Kernel: one program per row, which holds the whole row (H <= 65536). Launch and code depend on H
only, so a row's bits do not depend on its neighbours.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_2, options, release_next, use_triton, wait_for_previous

MAX_WIDTH = 65536


class Norm(NamedTuple):
    weight: Tensor  # [H]
    eps: float


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise each row of x by its root mean square and scale by the weight."""
    return launch(x, norm) if use_triton(x) else naive(x, norm)


def naive(x: Tensor, norm: Norm) -> Tensor:
    if norm.weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), *norm)
    return F.rms_norm(x.to(norm.weight.dtype), (x.shape[-1],), *norm).to(x.dtype)


@triton.jit
def _rms_norm(x, weight, out, row_stride, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    value = tl.load(x + row * row_stride + i, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    w = tl.load(weight + i, inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, (value * scale * w).to(out.dtype.element_ty), inside)


def launch(x: Tensor, norm: Norm) -> Tensor:
    weight, eps = norm
    width = x.shape[-1]
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"The weight of RMSNorm must be [{width}] and contiguous, not {weight.shape}.")
    if width > MAX_WIDTH:
        raise ValueError(f"RMSNorm of width {width} exceeds the limit of {MAX_WIDTH} per program.")
    rows = x.reshape(-1, width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = next_power_of_2(width)
        warps = min(max(block // 512, 1), 16)  # 16 values or fewer per thread up to 8192
        _rms_norm[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), width, eps, BLOCK=block, num_warps=warps, **options(x)
        )
    return out.view(x.shape)
