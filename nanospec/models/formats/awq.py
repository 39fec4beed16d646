"""AWQ as stored by AutoAWQ ("gemm"): 4 bits with zero points, in groups of columns.

    qweight [K, N / 8] int32      qzeros [groups, N / 8] int32      scales [groups, N]

https://arxiv.org/abs/2306.00978
"""

from torch import Tensor

from .quantized_safetensors import Config, Layout, Module, Quantized, from_blocks, option, parse_block, unpack

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # positions of 8 rows of the weight in an int32, in units of 4 bits


class Awq:
    def __init__(self, config: Config) -> None:
        for key, value in {"bits": 4, "zero_point": True, "version": "gemm"}.items():
            option(config, key, value)
        self._block = parse_block(config, "group_size")

    def layout(self, module: Module) -> Layout:
        block, (_, groups) = module.blocks(self._block, "scales")
        n, k = module.shape
        packed_rows = -(-n // 8)

        def codes(packed: Tensor) -> Tensor:
            return unpack(packed, 4).unflatten(1, (-1, 8))[..., PLACES].flatten(1)[:, :n].T

        def decode(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Quantized:
            return from_blocks(codes(qweight), scales.T, block, codes(qzeros), 4)

        parts = {"qweight": ((k, packed_rows), "I32"), "qzeros": ((groups, packed_rows), "I32")}
        return {**parts, "scales": ((groups, n), "float")}, decode
