"""GPTQ as stored by AutoGPTQ and GPTQModel: 4 or 8 bits with zero points, in groups of columns.

    qweight [K * bits / 32, N] int32      qzeros [groups, N * bits / 32] int32      scales [groups, N]
    g_idx [K] int32, the group of each column; optional

With "desc_act", columns of a group are not adjacent; such weights are dequantized when they are loaded.

https://arxiv.org/abs/2210.17323
"""

import torch
from torch import Tensor

from .quantized_safetensors import Config, Layout, Module, Quantized, from_blocks, option, parse_block, unpack

ONES = {4: 0x11111111, 8: 0x01010101}  # an int32 of the code 1


class Gptq:
    def __init__(self, config: Config) -> None:
        self._bits, self._block = option(config, "bits", 4, 8), parse_block(config, "group_size")
        key = "checkpoint_format" if "checkpoint_format" in config else "format"
        # Version 1 stores zero points minus 1. It subtracts from an int32 as a whole, so that a zero point of
        # 0 borrows from the next one; adding to an int32 as a whole restores both.
        self._added = ONES[self._bits] if option(config, key, "gptq", "gptq_v2") == "gptq" else 0

    def layout(self, module: Module) -> Layout:
        (n, k), bits = module.shape, self._bits
        block, (_, groups) = module.blocks(self._block, "scales")

        def decode(
            qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None
        ) -> Tensor | Quantized:
            codes, zero = unpack(qweight.T, bits), unpack(qzeros + self._added, bits)[:, :n].T
            if g_idx is None or torch.equal(g_idx.long(), torch.arange(k) // block[1]):
                return from_blocks(codes, scales.T, block, zero, bits)
            if g_idx.min() < 0 or g_idx.max() >= groups:
                raise ValueError(f"a g_idx outside 0 to {groups - 1}")
            columns = from_blocks(codes, scales.T[:, g_idx], (1, 1), zero[:, g_idx], bits)
            return columns._replace(dtype=torch.float32).dequantize()

        sizes = {"qweight": (k * bits // 32, n), "qzeros": (groups, -(-n * bits // 32)), "g_idx": (k,)}
        parts = {name: (sizes[name], "I32") for name in sizes if name != "g_idx" or name in module.stored}
        return {**parts, "scales": ((groups, n), "float")}, decode
