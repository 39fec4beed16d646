"""Matrix products of a decoder layer, with what surrounds them fused in.

    x [T, K], weight [N, K], bias [N]  ->  [T, N] in x's dtype

* `linear`: x @ weight.T + bias
* `norm_linear`: linear of the residual stream, by the norm that it carries (`stream.py`)
* `norm_swiglu`: silu(gate) * up, where [gate; up] = weight [2I, K] applied to the normed stream; or with gelu
* `linear_add`: the residual stream plus a linear, for the norm that comes next; or plus a linear's own norm

On a CPU `pack` reorders a weight once, in bfloat16 for our own C++ (`native/packed.py`), else for oneDNN,
which makes a product of few fp32 rows 3 times as fast as `F.linear`; every function takes packed and plain
weights alike. The kernel, for any number of rows, is in `product.py`.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import use_native, use_triton
from ..native import packed
from ..native.packed import Packed
from .norm import Norm, rms_norm
from .product import GELU, SILU, product, product_add
from .stream import Stream, residual_add
from .vocab_parallel import Summed, Vocabulary

Whole = Tensor | Packed  # plain, or packed by `pack`
Weight = Whole | Summed | Vocabulary  # or a part of one


def pack(weight: Tensor) -> Whole:
    """`weight` [N, K] in the fastest layout for this device: on a CPU that of our own C++, or oneDNN's.

    A packed weight is good for the functions of this file only.
    """
    if use_native(weight) and weight.shape[1] % 2 == 0:
        return packed.pack(weight)
    plain = use_triton(weight) or weight.is_cuda or not _onednn_packs(weight.dtype)
    return weight if plain else torch.ops.mkldnn._reorder_linear_weight(weight)


def _onednn_packs(dtype: torch.dtype) -> bool:
    """It refuses bfloat16 on processors without AVX-512."""
    if not torch.backends.mkldnn.is_available() or dtype == torch.float16:
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def num_bytes(weight: Weight) -> int:
    """What a weight, or this rank's part of it, takes in memory."""
    if isinstance(weight, Summed | Vocabulary):
        return num_bytes(weight.part)
    tensor = weight.data if isinstance(weight, Packed) else weight
    return tensor.numel() * tensor.element_size()


def _whole(weight: Weight) -> Whole:
    """For products whose result is all of it."""
    if isinstance(weight, Summed | Vocabulary):
        raise ValueError("This is a part of a weight, whose product other ranks have parts of.")
    return weight


def plain(weight: Weight) -> Tensor:
    """For kernels, which take no packed weights."""
    if not isinstance(weight, Tensor) or weight.is_mkldnn:
        raise ValueError("This weight was packed for a CPU; pack it with the kernels switched on.")
    return weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, written to `out` [T, N] if it is given."""
    if isinstance(weight, Vocabulary):
        return weight.whole(linear(x, weight.part, bias), out)
    if use_triton(x):
        return product(x, plain(weight), bias, out=out)
    result = naive(x, _whole(weight), bias)
    return result if out is None else out.copy_(result)


def norm_linear(stream: Stream, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """RMSNorm(x) @ weight.T + bias."""
    if use_triton(stream.x):
        return product(stream, plain(weight), bias)
    return naive(rms_norm(stream.x, stream.norm), _whole(weight), bias)


def norm_swiglu(
    stream: Stream, weight: Weight, bias: Tensor | None = None, gate: Literal["silu", "gelu"] = "silu"
) -> Tensor:
    """silu(g) * u of RMSNorm(x), or gelu by tanh; weight is [2I, K] and bias [2I], g first; gives [T, I]."""
    if use_triton(stream.x):
        return product(stream, plain(weight), bias, gate=(SILU if gate == "silu" else GELU).value)
    g, u = norm_linear(stream, weight, bias).chunk(2, -1)
    return (F.silu(g) if gate == "silu" else F.gelu(g, approximate="tanh")) * u


def linear_add(
    h: Tensor, weight: Weight, stream: Stream, norm: Norm, bias: Tensor | None = None, own: Norm | None = None
) -> Stream:
    """The stream plus h @ weight.T + bias, or plus its `own` norm, for the `norm` that comes next."""
    if isinstance(weight, Summed):
        return residual_add(weight.parts(linear(h, weight.part, bias)), stream.x, norm, own)
    if own is not None:
        return residual_add(linear(h, weight, bias)[None], stream.x, norm, own=own)
    if use_triton(h):
        return product_add(h, plain(weight), bias, stream, norm)
    return Stream(naive_add(h, _whole(weight), stream.x, bias), norm)


def naive(x: Tensor, weight: Whole, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Packed):
        return packed.linear(x, weight, bias)
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    rows = _at_least_two(x)
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")[: len(x)]


def naive_add(x: Tensor, weight: Whole, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Packed) or not weight.is_mkldnn:
        return residual + naive(x, weight, bias)
    rows = _at_least_two(x)
    residual = residual.expand(len(rows), -1)
    return torch.ops.mkldnn._linear_pointwise.binary(rows, residual, weight, bias, "add")[: len(x)]


def _at_least_two(x: Tensor) -> Tensor:
    """oneDNN splits the sum of a long single row differently from that of several rows. Doubling such
    a row costs nothing that can be measured, and makes a row's bits independent of the batch."""
    return x.expand(2, -1) if x.shape[0] == 1 and x.shape[1] > 1024 else x
