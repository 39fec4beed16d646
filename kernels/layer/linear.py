"""Matrix products of a decoder layer, with what surrounds them fused in.

    x [T, K], weight [N, K], bias [N]  ->  [T, N] in x's dtype

* `linear`: x @ weight.T + bias
* `norm_linear`: linear of RMSNorm(x)
* `linear_add`: linear plus a residual of the output's shape
* `norm_swiglu`: silu(gate) * up, where [gate; up] = weight [2I, K] applied to RMSNorm(x)

On a CPU `pack` reorders a weight once for oneDNN, which makes a product of few rows 1.4 times (bf16)
to 3 times (fp32) as fast as `F.linear`; every function takes packed and plain weights alike.

The kernel (`gemm.py`) is for up to `MAX_ROWS` rows, what a decode step scores: it streams the weight
once, and a row's bits do not depend on the other rows. Longer inputs, which are prefill, go to the
vendor's library with the norm as a launch of its own: for speculation to change no bit, B * (K + 1) must
not exceed `MAX_ROWS`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import use_triton
from . import gemm
from .norm import Norm, rms_norm

MAX_ROWS = 1024


def pack(weight: Tensor) -> Tensor:
    """`weight` [N, K] in the fastest layout for this device: oneDNN's on a CPU that has it.

    A packed weight is good for the functions of this file only.
    """
    plain = use_triton(weight) or weight.is_cuda or weight.dtype == torch.float16
    if plain or not torch.backends.mkldnn.is_available():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    return gemm.launch(x, weight, bias) if _gemm(x) else naive(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """residual + x @ weight.T + bias."""
    return gemm.launch(x, weight, bias, residual) if _gemm(x) else naive_add(x, weight, residual, bias)


def norm_linear(x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """RMSNorm(x) @ weight.T + bias."""
    return gemm.launch(x, weight, bias, norm=norm) if _gemm(x) else naive(rms_norm(x, norm), weight, bias)


def norm_swiglu(x: Tensor, norm: Norm, weight: Tensor) -> Tensor:
    """silu(gate) * up of RMSNorm(x); weight is [2I, K], gate rows first; gives [T, I]."""
    if _gemm(x):
        return gemm.launch(x, weight, norm=norm, swiglu=True)
    gate, up = naive(rms_norm(x, norm), weight).chunk(2, -1)
    return F.silu(gate) * up


def _gemm(x: Tensor) -> bool:
    return use_triton(x) and x.shape[0] <= MAX_ROWS


def naive(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    rows = _at_least_two(x)
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")[: len(x)]


def naive_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    if not weight.is_mkldnn:
        return residual + F.linear(x, weight, bias)
    rows = _at_least_two(x)
    residual = residual.expand(len(rows), -1)
    return torch.ops.mkldnn._linear_pointwise.binary(rows, residual, weight, bias, "add")[: len(x)]


def _at_least_two(x: Tensor) -> Tensor:
    """oneDNN splits the sum of a long single row differently from that of several rows. Doubling such
    a row costs nothing that can be measured, and makes a row's bits independent of the batch."""
    return x.expand(2, -1) if x.shape[0] == 1 and x.shape[1] > 1024 else x
