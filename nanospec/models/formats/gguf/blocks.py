"""Read tensors and decode their blocks, whose layouts are defined in ggml-common.h of llama.cpp.

Values are kept exactly, except that Q6_K has groups of 16 columns, which `join_groups` joins in pairs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ....kernels.layer.quantized import GROUP, Quantized
from .file import BLOCKS, GGUFError, StoredTensor

CHUNK = 1 << 20  # elements that are decoded at a time
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read(path: Path, tensor: StoredTensor, exact: bool = False) -> Tensor | Quantized:
    """Read a tensor. With `exact`, Q6_K keeps groups of 16 columns. Raises GGUFError if scales or minima are
    invalid, and ImportError if a type that is not in `BLOCKS` needs the gguf library. Files are not
    memory-mapped, because the resident pages would count as memory of the process."""
    if tensor.type not in BLOCKS:
        return _read_with_library(path, tensor)
    elements, size = BLOCKS[tensor.type]
    with path.open("rb") as file:
        file.seek(tensor.offset)
        if tensor.type in FLOATS:
            raw = _take(file, math.prod(tensor.shape) * size)
            return raw.view(FLOATS[tensor.type]).view(tensor.shape)
        (N, K), group = tensor.shape, 16 if exact and tensor.type == "Q6_K" else GROUP
        codes, (scale, minimum) = torch.empty(N, K, dtype=torch.uint8), torch.empty(2, N, K // group)
        for first in range(0, N, step := max(1, CHUNK // K)):
            rows = slice(first, first + step)
            raw = _take(file, codes[rows].numel() // elements * size).view(-1, size)
            new, new_scale, new_minimum = decode(tensor.type, raw)
            if new_scale.shape[1] * group > elements:
                new, new_scale = join_groups(new, new_scale)
            codes[rows], scale[rows] = new.view(-1, K), new_scale.view(-1, K // group)
            if new_minimum is not None:
                minimum[rows] = new_minimum.view(-1, K // group)
    minima = None if new_minimum is None else minimum
    total = scale.sum() + (0 if minima is None else minima.sum())  # NaN or infinite if one of them is
    if not total.isfinite() or not scale.any():
        problem = f"the scales of tensor {tensor.name} are NaN, infinite or all 0"
        raise GGUFError(f"{problem}; download the file again.")
    return Quantized(codes, scale, minima, bits=4 if tensor.type.startswith("Q4") else 8)


def _read_with_library(path: Path, tensor: StoredTensor) -> Tensor:
    """Read a tensor of a rare type in float32, for `convert`."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ImportError(f"tensors of type {tensor.type} need the gguf library: pip install gguf.") from None
    kind = gguf.GGMLQuantizationType[tensor.type]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    with path.open("rb") as file:
        file.seek(tensor.offset)
        raw = _take(file, math.prod(tensor.shape) // elements * size).view(*tensor.shape[:-1], -1)
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind))


def _take(file: BinaryIO, size: int) -> Tensor:
    raw = torch.empty(size, dtype=torch.uint8)
    if file.readinto(raw.numpy()) < size:  # type: ignore[attr-defined]
        raise ValueError("unexpected end of file")
    return raw


def join_groups(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Join pairs of groups of 16 codes with the offset 128, [B, elements], and scales [B, groups]. Pairs with
    equal scales keep their values. Others are rounded to 8 bits with the scale max|value| / 127, so the error
    is at most 1/254 of the largest value; rounding to Q6_K has an error of up to 1/64 of it."""
    values = codes.float().view(len(codes), -1, 2, 16).sub_(128)  # [B, groups / 2, 2, 16], divided by scales
    pairs = scale.view(len(scale), -1, 2)
    largest = (values.abs().amax(-1) * pairs.abs()).amax(-1)
    new = torch.where(pairs[..., 0] == pairs[..., 1], pairs[..., 0], largest / 127)
    ratio = (pairs / new[..., None]).nan_to_num(0, 0, 0)  # 0 / 0 and x / 0 in groups of zeros
    return values.mul_(ratio[..., None]).round_().add_(128).to(torch.uint8).view_as(codes), new


def _half(raw: Tensor, at: int) -> Tensor:
    """Return the float16 at offset `at` of each block as [B, 1] float32."""
    return raw[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, run: int) -> Tensor:
    """Return codes of 4 bits: of each `run` bytes, first all low halves, then all high ones."""
    raw = raw.unflatten(1, (-1, run))
    return torch.cat((raw & 15, raw >> 4), -1).flatten(1)


def _bits(raw: Tensor, run: int, width: int) -> Tensor:
    """Return codes of `width` bits: of each `run` bytes, first the lowest bits of all, then the next ones."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (raw.unflatten(1, (-1, 1, run)) >> shifts & (1 << width) - 1).flatten(1)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minima of a block of Q4_K or Q5_K, 8 groups with 6 bits each in 12 bytes."""
    low, high, last = raw[:, 4:16].split(4, 1)
    scale = torch.cat((low & 63, last & 15 | low >> 6 << 4), 1)
    minimum = torch.cat((high & 63, last >> 4 | high >> 6 << 4), 1)
    return _half(raw, 0) * scale, -_half(raw, 2) * minimum


def decode(kind: str, raw: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Decode blocks, [B, size] uint8, and return codes [B, elements] uint8, scales [B, groups] and minima
    [B, groups] in float32, or None without minima."""
    match kind:
        case "Q4_0":
            return _nibbles(raw[:, 2:], 16), _half(raw, 0), None
        case "Q4_1":
            return _nibbles(raw[:, 4:], 16), _half(raw, 0), _half(raw, 2)
        case "Q5_0":
            codes = _nibbles(raw[:, 6:], 16) | _bits(raw[:, 2:6], 1, 1) << 4
            return codes + 112, _half(raw, 0), None  # 16 becomes 128
        case "Q5_1":
            codes = _nibbles(raw[:, 8:], 16) | _bits(raw[:, 4:8], 1, 1) << 4
            return codes, _half(raw, 0), _half(raw, 2)
        case "Q8_0":
            return raw[:, 2:] ^ 128, _half(raw, 0), None  # adds 128 to an int8
        case "Q4_K":
            return _nibbles(raw[:, 16:], 32), *_k_scales(raw)
        case "Q5_K":
            return _nibbles(raw[:, 48:], 32) | _bits(raw[:, 16:48], 32, 1) << 4, *_k_scales(raw)
        case "Q6_K":
            codes = _nibbles(raw[:, :128], 64) | _bits(raw[:, 128:192], 32, 2) << 4
            return codes + 96, _half(raw, 208) * raw[:, 192:208].view(torch.int8), None  # 32 becomes 128
    raise AssertionError(kind)
