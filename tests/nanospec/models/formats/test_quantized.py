"""Quantized checkpoints that are invalid or not supported are rejected with the reason."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec.models.formats import open_checkpoint
from nanospec.models.weights import load_model
from tests.quantized_files import FILE, Tensors, pack, save_quantized

FP8: dict[str, Any] = {"quant_method": "fp8"}
AWQ, GPTQ = ({"quant_method": name, "bits": 4, "group_size": 32} for name in ("awq", "gptq"))
UP = "model.layers.1.mlp.up_proj"


def grouped(target: object = "Linear", format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": [target], "weights": {"num_bits": 4, "group_size": 32, **weights}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"bits": 4}, "quant_method=None is not supported; use awq or compressed-tensors or fp8 or gptq"),
    ({**GPTQ, "bits": 3}, "bits=3 is not supported; use 4 or 8"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported; use 'gptq' or"),
    ({**AWQ, "version": "gemv"}, "version='gemv' is not supported; use 'gemm'"),
    ({**AWQ, "zero_point": False}, "zero_point=False is not supported; use True"),
    ({**AWQ, "group_size": 48}, "group_size=48 is not supported; its columns must be a multiple of 32"),
    ({**FP8, "weight_block_size": [128, "x"]}, r"weight_block_size=\[128, 'x'\] is not supported"),
    (grouped(actorder="group"), "actorder='group' is not supported"),
    (grouped("re:("), "quantization_config=.* is not valid .*missing \\)"),
    (grouped(5), "quantization_config=.* is not valid"),
    (grouped(format="marlin-24"), "format='marlin-24' is not supported; use 'pack-quantized' or"),
    ({**grouped(), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config=.* is not supported"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=lambda value: str(value)[:40])
def test_unsupported_config_is_rejected(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    for raw in ({"quantization_config": config}, {"text_config": {"quantization_config": config}}):
        with pytest.raises(ValueError, match=rf"config\.json: {words}[^\n]*\.$"):
            open_checkpoint(tmp_path, raw)


def gptq(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Store symmetric weights, except those of `UP`."""
    n, k = weight.shape
    scales = torch.full((k // 32, n), 0.01).bfloat16()
    zeros = torch.full(scales.shape, 6 if module == UP else 7)
    parts = {"qweight": pack(torch.randint(16, (k, n)), 4, 0), "qzeros": pack(zeros, 4, 1), "scales": scales}
    return {**parts, "g_idx": torch.arange(k).int() // 32}, weight


def fp8(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(len(weight), 1)}, weight


def test_symmetric_weights_have_no_minima(tmp_path: Path) -> None:
    folder = save_quantized(tmp_path, "llama", GPTQ, gptq)
    layer = load_model(folder, torch.bfloat16, "cpu").layers[1]
    symmetric, other = layer.down.weight, layer.gate_up.weight
    assert (symmetric.has_minima, symmetric.bits, symmetric.group) == (False, 4, 32)
    assert other.has_minima


def last(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces the last element of a tensor."""
    return lambda it: torch.cat((it.flatten()[:-1], torch.tensor([value]).to(it.dtype))).view(it.shape)


NAN, SCALE = float("nan"), f"{UP}.weight in .* has a scale that is NaN, too large, negative or zero"
Change = Callable[[Tensor], Tensor]
FILES: list[tuple[dict[str, Any], str, Change, str]] = [  # a tensor of UP, the change to it
    *((GPTQ, "scales", last(value), SCALE) for value in (NAN, float("inf"), -0.01, 0.0)),
    (FP8, "weight_scale", last(1e36), SCALE),
    (FP8, "weight", last(-NAN), f"{UP}.weight in .* has a value that is NaN"),
    *((GPTQ, "g_idx", last(i), f"{UP}.weight in .* has a g_idx outside 0 to 1") for i in (2, -1)),
    (GPTQ, "qweight", lambda it: it.long(), f"not stored as I32: {UP}.qweight I64"),
    (GPTQ, "qzeros", lambda it: it[:1], rf"wrong shape: {UP}.qzeros \[1, 12\] instead of \[2, 12\]"),
    (GPTQ, "bias", lambda it: torch.ones(96), f"1 tensor.s. unexpected: {UP}.bias"),
    ({**GPTQ, "group_size": 64}, "bias", lambda it: torch.zeros(96), "42 tensor.s. of the wrong .*qzeros"),
    ({**FP8, "weight_block_size": [128, 64]}, "bias", lambda it: torch.zeros(96), r"instead of \[1, 1\]"),
]


@pytest.mark.parametrize(("config", "name", "change", "words"), FILES, ids=range(len(FILES)))
def test_invalid_file_is_rejected(
    config: dict[str, Any], name: str, change: Change, words: str, tmp_path: Path
) -> None:
    folder = save_quantized(tmp_path, "llama", config, fp8 if config["quant_method"] == "fp8" else gptq)
    tensors = load_file(folder / FILE)
    tensors[f"{UP}.{name}"] = change(tensors.get(f"{UP}.{name}", torch.empty(0)))
    save_file(tensors, folder / FILE)
    with pytest.raises(ValueError, match=rf"{words}[^\n]*\.$"):
        load_model(folder, torch.float32, "cpu")
    os.truncate(folder / FILE, 9999)
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        load_model(folder, torch.float32, "cpu")


def test_columns_must_be_a_multiple_of_32(tmp_path: Path) -> None:
    folder = save_quantized(tmp_path, "phi3-partly-rotated", FP8, fp8)  # hidden size 80
    with pytest.raises(ValueError, match="has 80 columns, not a multiple of 32"):
        load_model(folder, torch.float32, "cpu")
