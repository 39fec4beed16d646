"""compressed-tensors, as stored by llm-compressor: integers of 8 or 4 bits, or float8 as in `fp8.py`.

    weight_packed [N, K * bits / 32] int32      weight_zero_point [N * bits / 32, groups] int32
    weight [N, K] int8                          weight_zero_point int8, like the scale
    weight_scale [1], [N, 1], [N, groups] or one for each block

Only asymmetric weights have zero points. Integers in int32 have the offset 2^(bits - 1).
"""

import re
from typing import Any

import torch
from torch import Tensor

from ...text import shown
from .fp8 import Fp8
from .quantized import STORED, Config, Layout, Module, Quantized, make_quantized, option, parse_block, unpack

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


class CompressedTensors:
    """Selects the format of a module by targets: exact names before patterns ("re:") before "Linear"."""

    def __init__(self, config: Config) -> None:
        option(config, "format", *FORMATS)
        for key, name in (("sparsity_config", "format"), ("transform_config", "config_groups")):
            if (config.get(key) or {}).get(name) not in (None, {}, "dense"):
                raise ValueError(f"{key}={shown(config[key])} is not supported; use a model without it.")
        self._rules = []
        for group in config["config_groups"].values():
            for target in group["targets"] if group.get("weights") else ():  # others quantize activations
                rank = 2 if target == "Linear" else int(target.startswith("re:"))
                pattern = re.compile((re.escape(target) + "$", target[3:], "")[rank])
                self._rules.append((rank, pattern, _format(group["weights"])))
        self._rules.sort(key=lambda rule: rule[0])

    def layout(self, module: Module) -> Layout | None:
        matching = (format for _, pattern, format in self._rules if pattern.match(module.name))
        return next((format.layout(module) for format in matching), None)


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
        (n, k), size, bits = module.shape, module.grid(self._block, "weight_scale"), self._bits
        parts = {"weight_packed": ((n, k * bits // 32), ("I32",)), "weight_scale": (size, STORED)}
        zeros: Any = (-(-n * bits // 32), module.grid(self._block)[1]), ("I32",)
        if not (is_packed := "weight_packed" in module.stored):
            bits, zeros = 8, (size, ("I8",))
            parts = {"weight": (module.shape, ("I8",)), "weight_scale": (size, STORED)}

        def decode(weight_scale: Tensor, weight_zero_point: Any = None, **weight: Any) -> Quantized:
            (codes,), zero = weight.values(), weight_zero_point
            if is_packed:
                codes, zero = unpack(codes, bits), zero if zero is None else unpack(zero.T, bits)[:, :n].T
            else:
                codes, zero = (t if t is None else t.view(torch.uint8) ^ 128 for t in (codes, zero))
            return make_quantized(codes, weight_scale, self._block, zero, bits)

        return (parts if self._is_symmetric else {**parts, "weight_zero_point": zeros}), decode
