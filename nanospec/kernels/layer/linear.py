"""Linear layers, fused with the operations around them.

    layer = make_linear(weight [N, K], bias [N] or None)

    layer(x)                    x [T, K] @ weight.T + bias -> [T, N] in x's dtype
    layer.after_norm(residual)  layer(RMSNorm(residual stream)); `residual.norm` is that norm (`residual.py`)
    layer.gated(residual)       silu(g) * u, or gelu(g) * u, of the halves of `after_norm` -> [T, N / 2]
    layer.add_to(residual, x)   the residual stream plus `layer(x)`, for the next norm

`make_linear` selects the implementation, one of the classes below, when a model is loaded. On a CPU the
weight is packed, that is, reordered: in bfloat16 for the C++ of `native/packed.py`, otherwise for oneDNN,
which is 3 times as fast as `F.linear` for a few fp32 rows.
"""

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import use_native, use_triton
from ..native import packed
from .quantized import Quantized
from .residual import Norm, Residual, residual_add, rms_norm

Gate = Literal["silu", "gelu"]


def make_linear(weight: Tensor | Quantized, bias: Tensor | None = None) -> "Linear":
    """Return the fastest implementation for the weight's device and dtype. A `Quantized` weight must satisfy
    `multiplies_quantized`."""
    if isinstance(weight, Quantized):
        is_gpu = use_triton(weight.codes)
        return TritonLinear(weight, bias) if is_gpu else NativeLinear(packed.pack_quantized(weight), bias)
    if use_triton(weight):
        return TritonLinear(weight.contiguous(), bias)
    if use_native(weight) and weight.shape[1] % 2 == 0:
        return NativeLinear(packed.pack(weight), bias)
    if not weight.is_cuda and torch.backends.mkldnn.is_available():
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not on CPUs without AVX-512
        if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bf16):
            return OneDnnLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias)
    return Linear(weight, bias)


def multiplies_quantized(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Return whether activations of `dtype` can be multiplied by `Quantized` weights, which are dequantized
    otherwise."""
    probe = torch.empty(0, dtype=dtype, device=device)
    return use_triton(probe) or use_native(probe)


class Linear:
    """A linear layer in PyTorch, and the base class of the others."""

    def __init__(self, weight: Any, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def unpacked_weight(self) -> Tensor | None:
        """Return the weight [N, K], or None if it is packed."""
        return self.weight if isinstance(self.weight, Tensor) and not self.weight.is_mkldnn else None

    @property
    def nbytes(self) -> int:
        """Return the memory size of the weight in bytes."""
        parts = (self.weight,) if isinstance(self.weight, Tensor) else self.weight
        return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))

    def __call__(self, x: Tensor, out: Tensor | None = None, num_used: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias, in `out` [T, N] if given. `num_used`: see `Batch`."""
        result = self._product(x)
        return result if out is None else out.copy_(result)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T, K] of a quantized weight, for an embedding."""
        return self.weight.rows(ids)

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def after_norm(self, residual: Residual) -> Tensor:
        """Return RMSNorm(x) @ weight.T + bias."""
        return self(rms_norm(residual.x, residual.norm))

    def gated(self, residual: Residual, gate: Gate = "silu") -> Tensor:
        """Return silu(g) * u, or gelu(g) * u (tanh approximation), of the halves of `after_norm`."""
        g, u = self.after_norm(residual).chunk(2, -1)
        return (F.silu(g) if gate == "silu" else F.gelu(g, approximate="tanh")) * u

    def add_to(self, residual: Residual, x: Tensor, norm: Norm, out_norm: Norm | None = None) -> Residual:
        """Return the residual stream plus y = x @ weight.T + bias, or plus RMSNorm(y) if `out_norm` is given.
        `norm` is the norm that the next layer applies to the sum."""
        y = self(x, num_used=residual.num_used)
        return residual_add(y[None], residual.x, norm, out_norm, residual.num_used)


class TritonLinear(Linear):
    """A linear layer with the Triton kernel of `product.py`, which is imported only here. A quantized weight
    is a `PackedCodes`."""

    def __init__(self, weight: Tensor | Quantized, bias: Tensor | None = None) -> None:
        from .dequantize import pack_codes
        from .product import new_counters, product

        super().__init__(pack_codes(weight) if isinstance(weight, Quantized) else weight, bias)
        self._launch = partial(product, weight=self.weight, bias=bias, counters=new_counters(self.weight))

    def __call__(self, x: Tensor, out: Tensor | None = None, num_used: Tensor | None = None) -> Tensor:
        return self._launch(x, out=out, num_used=num_used)

    def after_norm(self, residual: Residual) -> Tensor:
        return self._launch(residual, num_used=residual.num_used)

    def gated(self, residual: Residual, gate: Gate = "silu") -> Tensor:
        return self._launch(residual, gate=gate, num_used=residual.num_used)

    def add_to(self, residual: Residual, x: Tensor, norm: Norm, out_norm: Norm | None = None) -> Residual:
        if out_norm is not None:  # needs whole rows
            return super().add_to(residual, x, norm, out_norm)
        new = Residual.empty(len(x), norm, x, residual.num_used)
        self._launch(x, new=new.outputs(residual.x), num_used=residual.num_used)
        return new


class NativeLinear(Linear):
    """A linear layer in C++; the weight is a `Packed`."""

    def _product(self, x: Tensor) -> Tensor:
        return packed.linear(x, self.weight, self.bias)


class OneDnnLinear(Linear):
    """A linear layer with oneDNN. For a long single row, oneDNN splits the sum differently than for several
    rows. Duplicating such a row has no measurable cost and makes the result independent of the batch."""

    def _product(self, x: Tensor) -> Tensor:
        rows = x.expand(2, -1) if x.shape[0] == 1 and x.shape[1] > 1024 else x
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")[: len(x)]
