"""AWQ as stored by AutoAWQ ("gemm"): 4 bits with zero points, in groups of columns.

    qweight [K, N / 8] int32      qzeros [groups, N / 8] int32      scales [groups, N]

https://arxiv.org/abs/2306.00978
"""

import torch
from torch import Tensor

from .quantized import STORED, Config, Layout, Module, Quantized, make_quantized, option, parse_block

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of rows 0 to 7 of the weight in an int32, in units of 4 bits


class Awq:
    def __init__(self, config: Config) -> None:
        for key, value in {"bits": 4, "zero_point": True, "version": "gemm"}.items():
            option(config, key, value)
        self._block = parse_block(config, "group_size")

    def layout(self, module: Module) -> Layout:
        n, k = module.shape
        groups = module.grid(self._block)[1]

        def decode(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Quantized:
            codes, zero = (  # [N, K], [N, groups]
                torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in PLACES], 1).flatten(0, 1)
                for words in (qweight.T.contiguous(), qzeros.T.contiguous())
            )
            return make_quantized(codes[:n], scales.T, self._block, zero[:n], 4)

        sizes = {"qweight": (k, -(-n // 8)), "qzeros": (groups, -(-n // 8))}
        parts = {name: (size, ("I32",)) for name, size in sizes.items()}
        return {**parts, "scales": ((groups, n), STORED)}, decode
