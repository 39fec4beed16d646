"""Quantized weights for the matrix product of `product.py`, which dequantizes a tile in each step.

    weight[n, k] = code[n, k] * scale[n, g] + minimum[n, g]

Symmetric codes have the minimum -offset * scale. So the scale and minimum of a group are always one word of
32 bits, the smallest that GPUs copy asynchronously: two float16, multiplied by a power of 2 per weight, as
those of small weights would underflow. Codes become float32 by bit operations, which are faster than
conversions and need no float8 instructions: an integer is put into the highest bits of the mantissa of
2^bits, float8 into the lowest bits of the exponent and the highest of the mantissa.
"""

import math
from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantized import Quantized, as_integers

FLOAT8 = tl.constexpr(2.0**120)  # corrects the exponent of float8 in float32: the biases are 7 and 127
FLOAT8_BITS = tl.constexpr(-0x78100000)  # sign, low 4 bits of the exponent, high 3 bits of the mantissa
MAX_FLOAT8_SCALE = 128.0  # times FLOAT8, still finite in float32

# Compile-time constants: BITS per code; FLOAT: whether codes are float8; SCALES: per row of a tile, at least
# two, since with one, Triton passes the dequantized tile through shared memory.
Codes = namedtuple("Codes", "BITS FLOAT SCALES")


class PackedCodes(NamedTuple):
    """A quantized weight [N, K]. The number of columns in a group is K or a power of 2."""

    codes: Tensor  # [N, K] uint8, or with 4 bits [N, K / 2], where byte j has column 2 j in its low bits
    words: Tensor  # [groups, N] int32: float16 scales (low bits) and minima (high bits), divided by `factor`
    factor: float
    bits: int
    is_float: bool  # whether codes are float8_e4m3fn
    dtype: torch.dtype  # of the activations that it is multiplied with

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def itemsize(self) -> float:
        """Bytes per element of a tile, including a word of 4 bytes for each 32 columns, the most possible."""
        return (self.bits + 1) / 8

    @property
    def shift(self) -> int:
        """The group of a column is column >> shift: log2 of the columns per group, or 31 if there is one."""
        return 31 if len(self.words) == 1 else (self.shape[1] // len(self.words)).bit_length() - 1

    def rows(self, index: Tensor) -> Tensor:
        """Return dequantized rows [T, K]."""
        codes, words = self.codes.index_select(0, index), self.words.index_select(1, index)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        pairs = words.T[..., None].contiguous().view(torch.float16).float() * self.factor
        scale, minimum = pairs.unbind(-1)
        codes = codes.view(torch.float8_e4m3fn) if self.is_float else codes
        return Quantized(codes, scale, minimum, self.bits, self.dtype).dequantize()


def pack_codes(weight: Quantized) -> PackedCodes:
    """Return `weight` in the layout of the kernel."""
    has_values = weight.codes.device.type != "meta"  # no values while kernels are compiled without a GPU
    if weight.codes.is_floating_point() and has_values and weight.scale.max() >= MAX_FLOAT8_SCALE:
        weight = as_integers(weight)
    if weight.scale.shape[1] > 1:
        weight = weight.regrouped(weight.group & -weight.group)  # the largest power of 2 that divides it
    codes, scale, minimum, bits, dtype = weight
    pairs = torch.stack((scale, -weight.offset * scale if minimum is None else minimum), -1)
    factor = 2.0 ** (math.frexp(pairs.abs().max().item())[1] - 15) if has_values else 1.0
    words = (pairs / factor).half().view(torch.int32)[..., 0].T.contiguous()
    data = codes.contiguous().view(torch.uint8)
    data = data[:, ::2] | data[:, 1::2] << 4 if bits == 4 else data
    return PackedCodes(data, words, factor, bits, codes.is_floating_point(), dtype)


@triton.jit
def load_dequantized(operands, tile, first, sizes, C: tl.constexpr, CODES: tl.constexpr):
    """Return the tile [BLOCK_N, BLOCK_K] of the weight from column `first` on, in x's dtype. Elements outside
    of the weight are finite."""
    width = tl.multiple_of(sizes.K * CODES.BITS // 8, 16)  # since 32 divides K
    column = first * CODES.BITS // 8 + tl.arange(0, C.BLOCK_K * CODES.BITS // 8)
    inside = tile.rows_in[:, None]
    if not C.EVEN:
        inside = inside & (column < width)[None, :]
    place = operands.weight + tile.rows.to(tl.int64)[:, None] * width + column[None, :]
    codes = tl.load(place, inside, other=0)
    if CODES.BITS == 4:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), [C.BLOCK_N, C.BLOCK_K])
    if CODES.FLOAT:
        bits = codes.to(tl.int8, bitcast=True).to(tl.int32) << 20 & FLOAT8_BITS
    else:
        bits = codes.to(tl.int32) << (23 - CODES.BITS) | (127 + CODES.BITS) << 23
    SHARE: tl.constexpr = C.BLOCK_K // CODES.SCALES
    value = tl.reshape(bits.to(tl.float32, bitcast=True), [C.BLOCK_N, CODES.SCALES, SHARE])
    column = first + tl.arange(0, CODES.SCALES) * SHARE
    inside = tile.rows_in[:, None]
    if not C.EVEN:
        inside = inside & (column < sizes.K)[None, :]
    N = sizes.N * 2 if C.GATE != "" else sizes.N
    words = tl.load(
        operands.words + (column >> sizes.shift)[None, :] * N + tile.rows[:, None], inside, other=0
    )
    scale, minimum = half_of(words) * sizes.factor, half_of(words >> 16) * sizes.factor
    if CODES.FLOAT:
        scale *= FLOAT8
    else:
        minimum -= scale * (1 << CODES.BITS)
    value = value * scale[:, :, None] + minimum[:, :, None]
    return tl.reshape(value, [C.BLOCK_N, C.BLOCK_K]).to(operands.x.dtype.element_ty)


@triton.jit
def half_of(words):
    """Return the float16 in the low bits of words as float32."""
    return (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
