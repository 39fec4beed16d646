"""Weights in float8 (e4m3) with one scale, or one for each row or block, as stored by DeepSeek and vLLM.

    weight [N, K] float8      weight_scale or weight_scale_inv [], [N, 1] or [N / rows, K / columns]

Despite its name, `weight_scale_inv` is the scale, not its inverse.
"""

from torch import Tensor

from .quantized_safetensors import Config, Layout, Module, Quantized, from_blocks, parse_block


class Fp8:
    def __init__(self, config: Config) -> None:
        self._block = parse_block(config, "weight_block_size")

    def layout(self, module: Module) -> Layout:
        name = "weight_scale_inv" if "weight_scale_inv" in module.stored else "weight_scale"
        block, grid = module.blocks(self._block, name)

        def decode(weight: Tensor, **scale: Tensor) -> Quantized:
            return from_blocks(weight, scale[name], block)

        return {"weight": (module.shape, "F8_E4M3"), name: (module.fitted(name, grid), "float")}, decode
