"""AWQ, GPTQ and float8 checkpoints against the definitions of these formats."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quantized_files import Tensors, assert_loads, pack

V2, ACT = {"checkpoint_format": "gptq_v2"}, {"desc_act": True}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns from the lowest bits of an int32
INTEGERS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {  # variant, method, bits, group, others
    "awq-group64-llama": ("llama", "awq", 4, 64, {"version": "gemm", "zero_point": True}),
    "awq-group32-phi3": ("phi3-window11", "awq", 4, 32, {}),
    "awq-rows-qwen2": ("qwen2-tied", "awq", 4, -1, {}),
    "gptq-int4-group32-llama": ("llama", "gptq", 4, 32, {"checkpoint_format": "gptq"}),
    "gptq-int4-group64-symmetric-phi3": ("phi3-window11", "gptq", 4, 64, {"sym": True}),
    "gptq-int4-group32-act-order-phi3": ("phi3-window11", "gptq", 4, 32, ACT),
    "gptq-int8-group32-qwen2": ("qwen2-tied", "gptq", 8, 32, {}),
    "gptq-int8-rows-v2-llama": ("llama", "gptq", 8, -1, V2 | ACT),
}


@pytest.mark.parametrize(("variant", "method", "bits", "group", "more"), INTEGERS.values(), ids=INTEGERS)
def test_integers(
    variant: str, method: str, bits: int, group: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """A weight is scale * (code - zero point)."""

    def store(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        groups = torch.arange(k) // (k if group < 0 else group)
        shape = int(groups[-1]) + 1, n
        codes, zeros = torch.randint(1 << bits, (k, n)), torch.randint(1 << bits, shape)
        zeros = torch.full(shape, 1 << (bits - 1)) if more.get("sym") else zeros
        scales = (torch.rand(shape) * 0.3 / (1 << bits) + 1e-4).half()
        groups = groups[torch.randperm(k)] if more.get("desc_act") else groups
        dequantized = (scales.float()[groups] * (codes - zeros[groups])).T
        if method == "awq":
            stored = {"qweight": pack(codes, 4, 1, AWQ_ORDER), "qzeros": pack(zeros, 4, 1, AWQ_ORDER)}
            return {**stored, "scales": scales}, dequantized
        subtracted = 0 if more == V2 | ACT else pack(torch.ones_like(zeros), bits, 1)
        stored = {"qweight": pack(codes, bits, 0), "qzeros": pack(zeros, bits, 1) - subtracted}
        bias = {} if variant == "qwen2-tied" else {"bias": torch.zeros(n)}  # as stored by AutoGPTQ
        order = {"g_idx": groups.int()} if more else {}
        return {**stored, **bias, **order, "scales": scales}, dequantized

    config = {"quant_method": method, "bits": bits, "group_size": group, **more}
    assert_loads(tmp_path, variant, config, store)


@pytest.mark.parametrize(
    ("variant", "block"), [("qwen2-tied", (128, 128)), ("phi3-partly-rotated", (40, 64))]
)
def test_float8(variant: str, block: tuple[int, int], tmp_path: Path) -> None:
    """Test blocks, which test_compressed_tensors.py does not test with reordered rows, and unused scales."""
    rows, columns = block

    def store(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        n, k = weight.shape
        scale = 0.001 * torch.rand(-(-n // rows), -(-k // columns)) + 0.0005
        spread = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale_inv": scale}
        unused = {f"{kind}_scale": torch.ones(1) for kind in ("input", "k", "v")}
        return stored | unused, codes.float() * spread

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    assert_loads(tmp_path, variant, config, store, hidden_size=64)
