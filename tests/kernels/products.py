"""Linear layers with random weights, for the tests of `linear.py` here and in tests/gpu."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.launch import forced, use_triton
from nanospec.kernels.layer import product
from nanospec.kernels.layer.linear import make_linear
from nanospec.kernels.layer.quantized import Quantized
from nanospec.kernels.layer.residual import Norm, Residual, embed, rms_norm

KINDS = (
    "linear", "linear_bias", "linear_add", "residual_add", "norm_linear", "norm_swiglu", "swiglu_bias",
    "geglu",
)  # fmt: skip


class Products:
    """x [T, K] with rows of different magnitudes, and a weight [N, K] with bias, norm scale and residual.
    The kernel multiplies by `quantized`, if it is set, and `naive` by the weight."""

    quantized: Quantized | None = None

    def __init__(
        self, T: int, N: int, K: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        generator = torch.Generator(device).manual_seed(T * N * K)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(dtype)

        self.x = (normal(T, K) * torch.linspace(0.1, 2, T, device=device)[:, None]).to(dtype)
        self.weight = (normal(N, K) / K**0.5).to(dtype)
        self.bias, self.scale, self.residual = normal(N), normal(K), normal(T, N)

    def of(self, weight: Quantized) -> "Products":
        """Use a quantized weight."""
        self.quantized = weight._replace(dtype=self.x.dtype)
        self.weight = self.quantized.dequantize()
        return self

    def run(self, kind: str, rows: slice = slice(None)) -> Tensor:
        """Return the kernel's result for some rows."""
        with forced("triton"):
            return self._run(kind, rows, self.x.dtype)

    def run_tiled(
        self, kind: str, first: int, count: int, monkeypatch: pytest.MonkeyPatch, **fields: Any
    ) -> Tensor:
        """Return the kernel's result for some rows with three parts of K, and `fields` of the tiling."""
        fields |= {"parts": 3, "part": 128}
        with monkeypatch.context() as patch:
            chosen = product.choose_tiling
            patch.setattr(product, "choose_tiling", lambda *shape: chosen(*shape)._replace(**fields))
            return self.run(kind, slice(first, first + count))

    def check_independence(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Check that results depend on the parts of K, but on neither the number of rows nor the rest of the
        tiling."""
        together = self.run_tiled(kind, 0, len(self.x), monkeypatch, split_k=True)
        for first, count, split_k in ((0, 1, True), (2, 3, False), (5, 17, True), (3, 65, False)):
            out = self.run_tiled(kind, first, count, monkeypatch, split_k=split_k)
            assert torch.equal(out, together[first : first + count]), first
        for rows, width, block_k in ((256, 64, 64), (128, 128, 64), (64, 32, 128)):
            tiling = {"split_k": False, "rows": rows, "width": width, "block_k": block_k}
            out = self.run_tiled(kind, 0, 40, monkeypatch, **tiling)
            assert torch.equal(out, together[:40]), tiling

    def expected(self, kind: str) -> Tensor:
        """Return the result of `naive` in float64."""
        with forced("naive"):
            return self._run(kind, slice(None), torch.float64)

    def _run(self, kind: str, rows: slice, dtype: torch.dtype) -> Tensor:
        x, weight, bias, scale, residual = (
            tensor.to(dtype)
            for tensor in (self.x[rows], self.weight, self.bias, self.scale, self.residual[rows])
        )
        has_bias, stored = kind not in ("linear", "norm_swiglu", "geglu"), self.quantized
        linear = make_linear(
            weight if stored is None or not use_triton(x) else stored, bias if has_bias else None
        )
        if kind in ("linear", "linear_bias"):
            return linear(x)
        if kind in ("linear_add", "residual_add"):
            norm = Norm(bias, 1e-5)
            out_norm = Norm(1 + bias.to(torch.promote_types(dtype, torch.float32)), 1e-5)
            given = out_norm if kind == "residual_add" else None
            new = linear.add_to(residual_of(residual, norm), x, norm, given)
            return torch.cat((new.x, normed(new)), 1)
        source = residual_of(x, Norm(scale, 1e-5))
        if kind == "norm_linear":
            return linear.after_norm(source)
        return linear.gated(source, "gelu" if kind == "geglu" else "silu")


def residual_of(x: Tensor, norm: Norm) -> Residual:
    """Return x [T, H] as a residual stream."""
    return embed(torch.arange(len(x), device=x.device), x, norm)


def normed(residual: Residual) -> Tensor:
    """Return the norm of a residual [T, H], as its readers compute it."""
    if residual.scaled is None or residual.squares is None:
        return rms_norm(residual.x, residual.norm)
    mean = residual.squares.sum(0) / residual.x.shape[1]
    return (residual.scaled * (mean + residual.norm.eps).rsqrt()[:, None]).to(residual.x.dtype)
