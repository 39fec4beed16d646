"""Checkpoints of compressed-tensors against those that the library writes and decompresses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quantized_files import Tensors, assert_loads

library = pytest.importorskip("compressed_tensors.compressors", exc_type=ImportError)
quantization = pytest.importorskip("compressed_tensors.quantization", exc_type=ImportError)

INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
INT8: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
ASYMMETRIC: dict[str, Any] = {"symmetric": False}
BLOCKS: dict[str, Any] = {"strategy": "block", "block_structure": [128, 64]}
LINEAR, MLP, UP = "Linear", r"re:.*layers\.\d+\.mlp\.(up|down)_proj$", "model.layers.1.mlp.up_proj"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # variant, format, targets with weights
    "int4-group32-llama": ("llama", "pack", {LINEAR: INT4}),
    "int4-group32-asymmetric-phi3": ("phi3-window11", "pack", {LINEAR: INT4 | ASYMMETRIC}),
    "int8-rows-packed-asymmetric-qwen2": ("qwen2-tied", "pack", {LINEAR: INT8 | ASYMMETRIC}),
    "int8-rows-phi3": ("phi3-window11", "int", {LINEAR: INT8}),
    "int8-rows-asymmetric-llama": ("llama", "int", {LINEAR: INT8 | ASYMMETRIC}),
    "fp8-one-scale-llama": ("llama", "float", {LINEAR: FP8 | {"strategy": "tensor"}}),
    "fp8-rows-phi3": ("phi3-window11", "float", {LINEAR: FP8 | {"strategy": "channel"}}),
    "fp8-blocks-qwen2": ("qwen2-tied", "float", {LINEAR: FP8 | BLOCKS}),
    "fp8-group32-llama": ("llama", "float", {LINEAR: FP8 | {"strategy": "group", "group_size": 32}}),
    "several-targets": ("llama", "pack", {LINEAR: INT4, MLP: INT8, UP: INT4 | ASYMMETRIC, "model": INT8}),
}  # fmt: skip


@pytest.mark.parametrize(("variant", "format", "weights"), CASES.values(), ids=CASES)
def test_weights_equal_decompressed_ones(
    variant: str, format: str, weights: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    arguments = {target: quantization.QuantizationArgs(**args) for target, args in weights.items()}
    schemes = {t: quantization.QuantizationScheme(targets=[t], weights=a) for t, a in arguments.items()}
    compressor = library.BaseCompressor.load_from_registry(f"{format}-quantized")

    def store(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        target = UP if module == UP else MLP if module.endswith(("up_proj", "down_proj")) else LINEAR
        scheme = schemes.get(target, schemes[LINEAR])
        (n, k), args = weight.shape, scheme.weights
        rows, columns = args.block_structure or (n if args.strategy == "tensor" else 1, args.group_size or k)
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale, zero = quantization.utils.calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        if args.strategy == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    groups = {f"group_{i}": scheme for i, scheme in enumerate(schemes.values())}
    fields: dict[str, Any] = {"format": f"{format}-quantized", "ignore": ["lm_head"]}
    config = quantization.QuantizationConfig(config_groups=groups, **fields)
    assert_loads(tmp_path, variant, config.model_dump(mode="json"), store)
