"""GPTQ as stored by AutoGPTQ and GPTQModel: 4 or 8 bits with zero points, in groups of columns.

    qweight [K * bits / 32, N] int32      qzeros [groups, N * bits / 32] int32      scales [groups, N]
    g_idx [K] int32, the group of each column; optional

With "desc_act", columns of a group are not adjacent; such weights are dequantized when they are loaded.

https://arxiv.org/abs/2210.17323
"""

import torch
from torch import Tensor

from .quantized import STORED, Config, Layout, Module, Quantized, make_quantized, option, parse_block, unpack

ONES = {4: 0x11111111, 8: 0x01010101}  # an int32 of the code 1


class Gptq:
    def __init__(self, config: Config) -> None:
        self._bits, self._block = option(config, "bits", 4, 8), parse_block(config, "group_size")
        key = "checkpoint_format" if "checkpoint_format" in config else "format"
        # Version 1 subtracts 1 from all zero points of an int32 at once, with borrows if some are 0.
        self._added = ONES[self._bits] if option(config, key, "gptq", "gptq_v2") == "gptq" else 0

    def layout(self, module: Module) -> Layout:
        (n, k), groups, bits = module.shape, module.grid(self._block)[1], self._bits

        def decode(qweight: Tensor, qzeros: Tensor, scales: Tensor, **order: Tensor) -> Tensor | Quantized:
            codes, zero = unpack(qweight.T, bits), unpack(qzeros + self._added, bits)[:, :n].T
            adjacent = torch.arange(k) // (self._block[1] if self._block else k)
            group = order.get("g_idx", adjacent).long()
            if torch.equal(group, adjacent):
                return make_quantized(codes, scales.T, self._block, zero, bits)
            if group.min() < 0 or group.max() >= groups:
                raise ValueError(f"a g_idx outside 0 to {groups - 1}")
            columns = make_quantized(codes, scales.T[:, group], (1, 1), zero[:, group], bits)
            return columns._replace(dtype=torch.float32).dequantize()

        sizes = {"qweight": (k * bits // 32, n), "qzeros": (groups, -(-n * bits // 32)), "g_idx": (k,)}
        parts = {name: (sizes[name], ("I32",)) for name in sizes if name != "g_idx" or name in module.stored}
        return {**parts, "scales": ((groups, n), STORED)}, decode
