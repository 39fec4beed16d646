"""Chooses the launch configuration of a product (`product.py`).

Only the division of K into parts determines the order of a sum. It depends on the shape of the weight and on
the number of multiprocessors; all else may depend on the number of tokens. Without parts, the 16 blocks of 64
rows of a small weight would occupy 16 of 132 multiprocessors.
"""

from functools import cache
from typing import NamedTuple

import triton

from ..launch import Gpu

MAX_UNSPLIT_K = 1024  # up to this K, one program is as fast as several parts
MIN_PART_K = 256  # minimum columns of a part
MAX_SPLIT_TOKENS = 256  # no split K for more tokens: storing the partial sums costs too much bandwidth


class Tiling(NamedTuple):
    """The launch configuration of a product."""

    rows: int  # rows of the weight per tile
    width: int  # tokens per tile
    block_k: int  # columns of K per iteration
    warps: int
    stages: int
    parts: int  # number of parts of K
    part: int  # columns per part; the last one may be shorter
    split_k: bool  # whether each part is a program; otherwise one program processes all parts


def split_k_parts(N: int, K: int, gpu: Gpu) -> tuple[int, int]:
    """Return the number of parts of K, enough to fill the GPU with programs of 64 rows in a small step, and
    the columns of each part except the last."""
    step = 128 if K % 128 == 0 else 64  # a multiple of BLOCK_K
    most = K // MIN_PART_K if K > MAX_UNSPLIT_K else 1
    count = max(min(gpu.multiprocessors // triton.cdiv(N, 64), most), 1)
    part = step * triton.cdiv(K, step * count)
    return triton.cdiv(K, part), part


@cache
def choose_tiling(T: int, N: int, K: int, gpu: Gpu, itemsize: int, weight_itemsize: float) -> Tiling:
    """Return the tiling for x [T, K] and weight [N, K]: the largest tile that occupies most of the GPU.
    `itemsize`, `weight_itemsize`: bytes per element of a tile of x and of the weight."""
    parts, part = split_k_parts(N, K, gpu)
    split_k = parts > 1 and T <= MAX_SPLIT_TOKENS
    tiles = [(64, 16 if T <= 16 else 32)] if T <= 32 else [(128, 64), (64, 64)]
    if T > 64 and (parts == 1 or gpu.family != "sm_86"):  # two accumulators spill on sm_120
        tiles = [(128, 128), *tiles]
    if T > 64 and parts == 1 and gpu.family == "sm_90":  # only its registers suffice
        tiles = [(256, 128), *tiles]
    for rows, width in tiles:
        programs = triton.cdiv(N, rows) * triton.cdiv(T, width) * (parts if split_k else 1)
        if programs >= 0.75 * gpu.multiprocessors:
            break
    block_k = 128 if rows == 64 and width <= 32 and K % 128 == 0 else 64
    share = triton.cdiv(programs, gpu.multiprocessors)
    together = min(share, max(128 * 128 // (rows * width), 1), 3)  # programs per multiprocessor
    if gpu.pdl and T <= 32:  # room for a program of the next kernel, which prefetches its weight
        together = max(together, 2)
    if width > 32:  # room for codes that pass through shared memory (sm_100, gfx942)
        weight_itemsize = itemsize
    steps = triton.cdiv(part if split_k else K, block_k)  # iterations; more stages would not be used
    stages = gpu.stages(int(rows * weight_itemsize + width * itemsize) * block_k, min(steps + 1, 6), together)
    warps = 8 if rows * width >= 128 * 64 else 4
    return Tiling(rows, width, block_k, warps, stages, parts, part, split_k)
