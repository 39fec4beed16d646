"""Checkpoints in float8 against PyTorch's conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.quantized_files import Tensors, assert_loads

CASES = {  # variant, rows and columns with the same scale (-1: all), name of the scale
    "one-scale-llama": ("llama", -1, -1, "weight_scale"),
    "rows-phi3": ("phi3-window11", 1, -1, "weight_scale"),
    "blocks-128x128-qwen2": ("qwen2-tied", 128, 128, "weight_scale_inv"),
    "blocks-40x64-phi3": ("phi3-window11", 40, 64, "weight_scale_inv"),
}


@pytest.mark.parametrize(("variant", "rows", "columns", "name"), CASES.values(), ids=CASES)
def test_weights_equal_converted_ones(
    variant: str, rows: int, columns: int, name: str, tmp_path: Path
) -> None:
    def store(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        r, c = n if rows < 0 else rows, k if columns < 0 else columns
        scale = 0.001 * torch.rand(-(-n // r), -(-k // c)) + 0.0005
        spread = scale.repeat_interleave(r, 0)[:n].repeat_interleave(c, 1)[:, :k]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scale.squeeze() if scale.numel() == 1 else scale
        return {"weight": codes, name: stored, "input_scale": torch.ones(1)}, codes.float() * spread

    block = {} if columns < 0 else {"weight_block_size": [rows, columns]}
    assert_loads(tmp_path, variant, {"quant_method": "fp8", "fmt": "e4m3", **block}, store)
