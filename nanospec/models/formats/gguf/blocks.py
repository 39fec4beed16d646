"""Types of GGUF tensors and their blocks, whose layouts are defined in ggml-common.h of llama.cpp. In bytes:

    Q4_0 to Q5_1  scale 2, minimum 2 (Q4_1, Q5_1), fifth bits 4 (Q5_0, Q5_1), codes 16
    Q8_0          scale 2, codes 32
    Q4_K, Q5_K    scale of scales 2, scale of minima 2, both of 8 groups 12, fifth bits 32 (Q5_K), codes 128
    Q6_K          low bits of codes 128, high bits 64, scales of 16 groups 16, scale of scales 2

Values are kept exactly, except that Q6_K has groups of 16 columns, which `_join_groups` joins in pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Decoded = tuple[Tensor, Tensor, Tensor | None]


class Type(NamedTuple):
    """A row of a tensor is a sequence of blocks of `elements` values in `size` bytes. `decode` converts
    blocks [B, size] uint8 to codes [B, elements] uint8, scales [B, groups] and minima [B, groups] or None."""

    elements: int
    size: int
    decode: Callable[[Tensor], Decoded] | torch.dtype  # the dtype of values that are not quantized


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at offset `at` of each block as [B, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(raw: Tensor, run: int, width: int = 4) -> Tensor:
    """Split bytes into codes: the lowest `width` bits of `run` bytes are the first `run` codes, and so on."""
    raw = raw.unflatten(1, (-1, run))
    return torch.stack([raw >> shift & (1 << width) - 1 for shift in range(0, 8, width)], 2).flatten(1)


def _five_bits(low: Tensor, run: int, high: Tensor, high_run: int) -> Tensor:
    return _bits(low, run) | _bits(high, high_run, 1) << 4


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of a block of Q4_K or Q5_K, 8 groups with 6 bits each in 12 bytes."""
    low, high, last = blocks[:, 4:16].split(4, 1)
    scale = torch.cat((low & 63, last & 15 | low >> 6 << 4), 1)
    minimum = torch.cat((high & 63, last >> 4 | high >> 6 << 4), 1)
    return _half(blocks, 0) * scale, -_half(blocks, 2) * minimum


def _q6_k(blocks: Tensor) -> Decoded:
    codes = _bits(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 32, 2) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return *_join_groups(codes + 96, scale), None  # 32 becomes 128


TYPES = {
    "F32": Type(1, 4, torch.float32),
    "F16": Type(1, 2, torch.float16),
    "BF16": Type(1, 2, torch.bfloat16),
    "Q4_0": Type(32, 18, lambda b: (_bits(b[:, 2:], 16), _half(b, 0), None)),
    "Q4_1": Type(32, 20, lambda b: (_bits(b[:, 4:], 16), _half(b, 0), _half(b, 2))),
    "Q5_0": Type(32, 22, lambda b: (_five_bits(b[:, 6:], 16, b[:, 2:6], 1) + 112, _half(b, 0), None)),
    "Q5_1": Type(32, 24, lambda b: (_five_bits(b[:, 8:], 16, b[:, 4:8], 1), _half(b, 0), _half(b, 2))),
    "Q8_0": Type(32, 34, lambda b: (b[:, 2:] ^ 128, _half(b, 0), None)),  # adds 128 to an int8
    "Q4_K": Type(256, 144, lambda b: (_bits(b[:, 16:], 32), *_k_scales(b))),
    "Q5_K": Type(256, 176, lambda b: (_five_bits(b[:, 48:], 32, b[:, 16:48], 32), *_k_scales(b))),
    "Q6_K": Type(256, 210, _q6_k),
}


def _join_groups(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Join pairs of groups of 16 codes with the offset 128, [B, elements], and scales [B, groups]. Pairs with
    equal scales keep their values. Others are rounded to 8 bits with the scale max|value| / 127, so the error
    is at most 1/254 of the largest value; rounding to Q6_K has an error of up to 1/64 of it."""
    values = codes.float().view(len(codes), -1, 2, 16).sub_(128)  # [B, groups / 2, 2, 16], divided by scales
    pairs = scale.view(len(scale), -1, 2)
    largest = (values.abs().amax(-1) * pairs.abs()).amax(-1)
    new = torch.where(pairs[..., 0] == pairs[..., 1], pairs[..., 0], largest / 127)
    ratio = (pairs / new[..., None]).nan_to_num(0, 0, 0)  # 0 / 0 and x / 0 in groups of zeros
    return values.mul_(ratio[..., None]).round_().add_(128).to(torch.uint8).view_as(codes), new
