"""compressed-tensors, as stored by llm-compressor: integers of 8 or 4 bits, or float8 as in `fp8.py`.

    weight_packed [N, K * bits / 32] int32      weight_zero_point [N * bits / 32, groups] int32
    weight [N, K] int8                          weight_zero_point int8, shaped like the scale
    weight_scale [1], [N, 1], [N, groups] or one for each block

Only asymmetric weights have zero points. Integers in int32 have the offset 2^(bits - 1).
"""

import re
from typing import Any

import torch
from torch import Tensor

from ...text.validation import shown
from .fp8 import Fp8
from .quantized_safetensors import Config, Layout, Module, Quantized, from_blocks, option, parse_block, unpack

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


class CompressedTensors:
    """Selects the format of a module by targets: its name, then patterns ("re:..."), then "Linear"."""

    def __init__(self, config: Config) -> None:
        option(config, "format", *FORMATS)
        for key, name in (("sparsity_config", "format"), ("transform_config", "config_groups")):
            if (config.get(key) or {}).get(name) not in (None, {}, "dense"):
                raise ValueError(f"{key}={shown(config[key])} is not supported; use a model without it.")
        self._by_name: dict[str, Integers | Fp8] = {}
        self._by_pattern: list[tuple[re.Pattern[str], Integers | Fp8]] = []
        for group in config["config_groups"].values():
            for target in group["targets"] if group.get("weights") else ():  # others quantize activations
                format = _format(group["weights"])
                if target.startswith("re:"):
                    self._by_pattern.append((re.compile(target[3:]), format))
                else:
                    self._by_name.setdefault(target, format)

    def layout(self, module: Module) -> Layout | None:
        matching = (format for pattern, format in self._by_pattern if pattern.match(module.name))
        named = self._by_name.get
        format = named(module.name) or next(matching, None) or named("Linear")
        return None if format is None else format.layout(module)


def _format(weights: Config) -> "Integers | Fp8":
    option(weights, "actorder", None, False, "weight", "static")
    if option(weights, "type", "int", "float") == "int":
        return Integers(weights)
    option(weights, "num_bits", 8)
    return Fp8({"weight_block_size": weights.get("block_structure") or weights.get("group_size")})


class Integers:
    def __init__(self, weights: Config) -> None:
        self._bits = option(weights, "num_bits", 8, 4)
        self._is_symmetric = option(weights, "symmetric", True, False)
        self._block = parse_block(weights, "block_structure") or parse_block(weights, "group_size")

    def layout(self, module: Module) -> Layout:
        block, (rows, groups) = module.blocks(self._block, "weight_scale")
        (n, k), scale = module.shape, module.fitted("weight_scale", (rows, groups))
        is_packed = "weight_packed" in module.stored
        bits = self._bits if is_packed else 8

        def decode(weight_scale: Tensor, weight_zero_point: Any = None, **weight: Any) -> Quantized:
            (codes,), zero = weight.values(), weight_zero_point
            if is_packed:
                codes, zero = unpack(codes, bits), None if zero is None else unpack(zero.T, bits)[:, :rows].T
            else:
                codes, zero = (None if t is None else t.view(torch.uint8) ^ 128 for t in (codes, zero))
            return from_blocks(codes, weight_scale, block, zero, bits)

        parts = {"weight": (module.shape, "I8"), "weight_zero_point": (scale, "I8")}
        if is_packed:
            parts = {"weight_packed": ((n, k * bits // 32), "I32")}
            parts["weight_zero_point"] = (-(-rows * bits // 32), groups), "I32"
        if self._is_symmetric:
            del parts["weight_zero_point"]
        return {**parts, "weight_scale": (scale, "float")}, decode
