"""Quantized weights for the matrix product of `product.py`, which dequantizes a tile in each step.

    weight[n, k] = (code[n, k] - center) * scale[n, g] + shift[n, g]

So the scale and the shift of a group are always one word of 32 bits, the smallest that GPUs copy
asynchronously: two numbers in the dtype of the activations. The center, 8 or 128, keeps the rounding of
shifts small, and symmetric 4-bit codes have none. It is 0 for float8, and for symmetric 8-bit integers, whose
shift is -128 * scale, which is exact. Both numbers are divided by `factor`, a power of 2 per weight, as those
of small weights would underflow in float16; the sums of products are multiplied by it.

NVIDIA GPUs dequantize two weights with a few instructions and keep them in registers, from which the MMA
instructions read them:

* The codes of each 64 columns are stored so that those which a thread needs are adjacent (`rearrange`).
* An integer below 256 needs no conversion: its bits, read as a bfloat16, are the integer times 2^-133. Bytes
  of float8 are sign-extended and shifted, which gives the value times 2^-120 (float16: 2^-24 and 2^-8).
  Scales are divided by this `unit` in advance, and one packed FMA per two weights computes code * scale +
  shift, rounded once. A center takes another FMA before it, which subtracts it exactly.
"""

import math
from collections import namedtuple
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..launch import gpu_of, is_interpreted
from .quantized import Quantized

FLOAT8 = tl.constexpr(2.0**120)  # corrects the exponent of float8 in float32: the biases are 7 and 127
FLOAT8_BITS = tl.constexpr(-0x78100000)  # sign, low 4 bits of the exponent, high 3 bits of the mantissa
UNITS = {torch.bfloat16: (2.0**-133, 2.0**-120), torch.float16: (2.0**-24, 2.0**-8)}  # of integers, float8
# Axes of 64 columns, for `rearrange`: h halves, q the 16 columns of an MMA instruction in them, l its 4 lanes
# of a row, j pairs of a lane, i columns of a pair. By width: the two pairs of a lane are 8 columns apart (2)
# or in sequence (4), as Triton chooses for AMD GPUs and, before version 3.8, for mma.sync.
COLUMNS = {2: "hqjli", 4: "hqlji"}
# By bits: the axes in storage. A lane has 2 or 4 words in sequence; low halves have the first of each pair.
STORED = {4: "lhiqj", 8: "lhqij"}
CENTERED = 2.0**-13  # unit of integers after the center has been subtracted
OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)  # see `COLUMNS`

# Compile-time constants: BITS per code; FLOAT: whether codes are float8; SCALES: per row and 64 columns, 1 or
# 2; CENTER, WIDTH: see `PackedCodes`; PTX: whether codes are dequantized by inline assembly.
Codes = namedtuple("Codes", "BITS FLOAT SCALES CENTER WIDTH PTX")


class PackedCodes(NamedTuple):
    """A quantized weight [N, K]. The number of columns in a group is K or a power of 2."""

    codes: Tensor  # [N, ceil(K / 64) * 2 * bits] int32 words of codes in the order `STORED`
    words: Tensor  # [groups, N] int32: scales / unit (low bits) and shifts (high bits), both / factor
    columns: int  # K
    factor: float  # a power of 2
    unit: float  # a power of 2; 1 if codes are converted to float32, without assembly
    center: int  # the code that is subtracted from all codes
    width: int  # see `COLUMNS`
    bits: int
    is_float: bool  # whether codes are float8_e4m3fn
    dtype: torch.dtype  # of the activations that it is multiplied with

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.columns

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
        return 31 if len(self.words) == 1 else (self.columns // len(self.words)).bit_length() - 1

    @property
    def constants(self) -> Codes:
        scales, is_ptx = 2 if self.shift == 5 else 1, self.unit != 1
        return Codes(self.bits, self.is_float, scales, self.center, self.width, is_ptx)

    def rows(self, index: Tensor) -> Tensor:
        """Return dequantized rows [T, K]."""
        codes, words = self.codes.index_select(0, index).view(torch.uint8), self.words.index_select(1, index)
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        codes = rearrange(codes, STORED[self.bits], COLUMNS[self.width])[:, : self.columns]
        pairs = words.T[..., None].contiguous().view(pair_dtype(self.dtype)).double() * self.factor
        scale, shift = pairs[..., 0] * self.unit, pairs[..., 1]
        scale, minimum = scale.float(), (shift - self.center * scale).float()
        codes = codes.contiguous().view(torch.float8_e4m3fn) if self.is_float else codes
        return Quantized(codes, scale, minimum, self.bits, self.dtype).dequantize()


def pack_codes(weight: Quantized) -> PackedCodes:
    """Return `weight` in the layout of the kernel. Its scales and shifts are rounded to 16 bits."""
    if weight.scale.shape[1] > 1:
        weight = weight.regrouped(weight.group & -weight.group)  # the largest power of 2 that divides it
    if weight.bits == 8 and weight.minimum is not None:
        weight = centered(weight)
    codes, scale, minimum, bits, dtype = weight
    center = 8 if bits == 4 else 0 if minimum is None else 128
    family, is_float, pair = gpu_of(codes).family, codes.is_floating_point(), pair_dtype(dtype)
    is_ptx = family != "gfx942" and dtype in UNITS and not is_interpreted()
    unit, factor = (CENTERED if center else UNITS[dtype][is_float]) if is_ptx else 1.0, 1.0
    if codes.device.type != "meta":  # no values while kernels are compiled without a GPU
        most = max(256 * scale.abs().max().item(), 0 if minimum is None else minimum.abs().max().item())
        factor = 2.0 ** (math.frexp(most)[1] + 1)  # so that scale / unit is finite, also in float16
    exact = scale.double() / factor
    rounded = (exact / unit).to(pair)
    if minimum is None:
        shift = (center - weight.offset) * unit * rounded.double()
    else:
        shift = minimum.double() / factor + center * exact
    words = torch.stack((rounded, shift.to(pair)), -1).view(torch.int32)[..., 0].T.contiguous()
    width = 4 if family == "gfx942" or (OLD_TRITON and family != "sm_90") else 2
    data = F.pad(codes.contiguous().view(torch.uint8), (0, -codes.shape[1] % 64))
    data = rearrange(data, COLUMNS[width], STORED[bits])
    data = data[:, ::2] | data[:, 1::2] << 4 if bits == 4 else data
    data = data.contiguous().view(torch.int32)
    return PackedCodes(data, words, codes.shape[1], factor, unit, center, width, bits, is_float, dtype)


def centered(weight: Quantized) -> Quantized:
    """Return an equal weight of 8-bit integers with minima in which 128 is the middle of the codes of each
    row. Some formats use fewer than 256."""
    assert weight.minimum is not None
    codes = weight.codes.short()
    up = 128 - (codes.amin(1, keepdim=True) + codes.amax(1, keepdim=True) + 1) // 2  # [N, 1]
    return weight._replace(codes=(codes + up).to(torch.uint8), minimum=weight.minimum - up * weight.scale)


def pair_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales and shifts."""
    return dtype if dtype in UNITS else torch.float16


def rearrange(codes: Tensor, old: str, new: str) -> Tensor:
    """Return codes [N, K] with the axes of each 64 columns in another order. Axis l has 4 elements."""
    blocks = codes.unflatten(1, (-1, *(4 if axis == "l" else 2 for axis in old)))
    return blocks.permute(0, 1, *(2 + old.index(axis) for axis in new)).flatten(1)


@triton.jit
def row_words(K, CODES: tl.constexpr):
    """Return the number of words in a row of codes."""
    return tl.cdiv(K, 64) * (2 * CODES.BITS)


@triton.jit
def load_dequantized(operands, tile, first, sizes, C: tl.constexpr, CODES: tl.constexpr):
    """Return the tile [BLOCK_N, BLOCK_K] of the weight from column `first` on, divided by `sizes.factor`, in
    x's dtype. Elements outside of the weight are finite."""
    BLOCKS: tl.constexpr = C.BLOCK_K // 64
    width = row_words(sizes.K, CODES)
    column = first * CODES.BITS // 32 + tl.arange(0, C.BLOCK_K * CODES.BITS // 32)
    inside = tile.rows_in[:, None]
    if not C.EVEN:
        inside = inside & (column < width)[None, :]
    place = operands.weight + tile.rows.to(tl.int64)[:, None] * width + column[None, :]
    codes = tl.load(place, inside, other=0)
    codes = tl.reshape(codes, [C.BLOCK_N, BLOCKS, 4, 2, CODES.BITS // 4])  # axes l, h and, with 8 bits, q
    column = first + tl.arange(0, BLOCKS * CODES.SCALES) * (64 // CODES.SCALES)
    inside = tile.rows_in[:, None]
    if not C.EVEN:
        inside = inside & (column < sizes.K)[None, :]
    N = sizes.N * 2 if C.GATE != "" else sizes.N
    words = tl.load(
        operands.words + (column >> sizes.shift)[None, :] * N + tile.rows[:, None], inside, other=0
    )
    words = tl.reshape(words, [C.BLOCK_N, BLOCKS, 1, CODES.SCALES, 1])
    x = operands.x
    value = tl.join(unpack(codes, words, x, 0, CODES), unpack(codes, words, x, 1, CODES))  # axes i, j
    if CODES.BITS == 4:
        high = tl.join(unpack(codes, words, x, 2, CODES), unpack(codes, words, x, 3, CODES))
        value = tl.reshape(tl.join(value, high), [C.BLOCK_N, BLOCKS, 4, 2, 2, 2, 2])
        value = tl.permute(value, [0, 1, 2, 3, 6, 4, 5])  # put axis q before i and j
    if CODES.WIDTH == 2:  # from lhqij to the order of `COLUMNS`
        value = tl.permute(value, [0, 1, 3, 4, 6, 2, 5])
    else:
        value = tl.permute(value, [0, 1, 3, 4, 2, 6, 5])
    value = tl.reshape(value, [C.BLOCK_N, C.BLOCK_K])
    if CODES.PTX:  # a copy that takes no instruction, without which Triton does not compile for sm_100
        T = x.dtype.element_ty
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], T, is_pure=True, pack=2)
    return value


@triton.jit
def unpack(codes, words, x, INDEX: tl.constexpr, CODES: tl.constexpr):
    """Return weights [.., 2] in x's dtype: pair number INDEX of each word of codes, dequantized."""
    if CODES.PTX:
        T = x.dtype.element_ty
        BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
        ptx: tl.constexpr = unpack_ptx(INDEX, CODES.BITS, CODES.FLOAT, CODES.CENTER, BF16)
        first, second = tl.inline_asm_elementwise(
            ptx, "=h,=h,r,r", [codes, words], (T, T), is_pure=True, pack=1
        )
    else:
        first = dequantized(codes, words, x, INDEX * CODES.BITS, CODES)
        second = dequantized(codes, words, x, 16 + INDEX * CODES.BITS, CODES)
    return tl.join(first, second)


@triton.jit
def dequantized(codes, words, x, FIRST: tl.constexpr, CODES: tl.constexpr):
    """Return the weights of the codes at bit FIRST of each word, computed in float32."""
    scale = half_of(words, x)
    if CODES.FLOAT:
        value = (((codes << (24 - FIRST)) >> 4) & FLOAT8_BITS).to(tl.float32, bitcast=True)
        scale *= FLOAT8
    else:
        value = (codes >> FIRST & (1 << CODES.BITS) - 1).to(tl.float32) - CODES.CENTER
    return (value * scale + half_of(words >> 16, x)).to(x.dtype.element_ty)


@triton.jit
def half_of(words, x):
    """Return the number in the low bits of words as float32."""
    half = (words & 0xFFFF).to(tl.int16)
    if x.dtype.element_ty == tl.bfloat16:
        return half.to(tl.bfloat16, bitcast=True).to(tl.float32)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.constexpr_function
def unpack_ptx(index: int, bits: int, is_float: bool, center: int, is_bf16: bool) -> str:
    """Return assembly that dequantizes pair number `index` of the codes in $2 to $0 and $1. The low half of
    $3 is the scale, the high half the shift."""
    kind, subtract = "bf16x2" if is_bf16 else "f16x2", ""
    first = index * bits % 8  # bit
    if is_float:  # extend the signs of bytes 0 and 2, or 1 and 3, to 16 bits
        shift, mask = (4, 0x87F0) if is_bf16 else (7, 0xBF80)
        code = f"prmt.b32 v, $2, 0, {0xA280 + 0x1111 * index:#x}; shl.b32 v, v, {shift};"
    else:
        mask, code = (1 << bits) - 1 << first, f"shr.u32 v, $2, {index * bits - first};"
    if center:  # (code - center) * 2^-13; at bit 4, a code is 16 times as large
        times = ((0x7B80, 0x7980) if is_bf16 else (0x6800, 0x5800))[first // 4]
        minus = {8: (0x9400, 0xBA80), 128: (0xA400, 0xBC80)}[center][is_bf16]
        subtract = (
            f"mov.b32 s, {times * 0x10001:#x}; mov.b32 m, {minus * 0x10001:#x}; fma.rn.{kind} v, v, s, m;"
        )
    return (
        f"{{ .reg .b32 v, s, m; {code} and.b32 v, v, {mask * 0x10001:#x}; {subtract} "
        f"prmt.b32 s, $3, 0, 0x1010; prmt.b32 m, $3, 0, 0x3232; "
        f"fma.rn.{kind} v, v, s, m; mov.b32 {{$0, $1}}, v; }}"
    )
