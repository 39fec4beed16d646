"""Weights in float8 (e4m3) with one scale, or one for each row or block, as stored by DeepSeek and vLLM.

    weight [N, K] float8      weight_scale or weight_scale_inv [], [N, 1] or [N / rows, K / columns]

In spite of its name, `weight_scale_inv` is multiplied by the weight, too.
"""

from torch import Tensor

from .quantized import STORED, Config, Layout, Module, Quantized, make_quantized, parse_block


class Fp8:
    def __init__(self, config: Config) -> None:
        self._block = parse_block(config, "weight_block_size")

    def layout(self, module: Module) -> Layout:
        def decode(weight: Tensor, **scale: Tensor) -> Quantized:
            return make_quantized(weight, scale[name], self._block)

        name = "weight_scale_inv" if "weight_scale_inv" in module.stored else "weight_scale"
        scale = module.grid(self._block, name), STORED
        return {"weight": (module.shape, ("F8_E4M3",)), name: scale}, decode
