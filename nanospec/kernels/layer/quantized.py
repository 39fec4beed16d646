"""Weights of 8 and 4 bits. All quantized checkpoint formats are converted to this one when they are loaded.

A weight [N, K] has one code per element and, for each group of columns in a row, a scale and a minimum:

    weight[n, k] = scale[n, g] * (code[n, k] - offset) + minimum[n, g],    g = k // (K / groups)

Codes are integers from 0 to 15 or 255 with the offset 8 or 128 if there is no minimum, else 0; or they are
float8 numbers with the offset 0.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROUP = 32  # the minimum number of columns per scale in kernels; K and larger groups are multiples of it
ROWS = 4096  # rows that are quantized at once


class Quantized(NamedTuple):
    """A quantized weight [N, K] that has not been packed for a kernel."""

    codes: Tensor  # [N, K] uint8, or float8_e4m3fn with `bits` 8 and no minimum
    scale: Tensor  # [N, groups] float32; negative in some groups of GGUF files
    minimum: Tensor | None  # [N, groups] float32, or None if codes are symmetric around the offset
    bits: int  # 4 or 8
    dtype: torch.dtype = torch.bfloat16  # of the activations, and of the dequantized weight

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """The number of columns per scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def tables(self) -> list[Tensor]:
        """The scale, and the minimum if there is one."""
        return [self.scale] if self.minimum is None else [self.scale, self.minimum]

    @property
    def offset(self) -> int:
        """The code that stands for 0 if integers have no minimum, else 0."""
        return 0 if self.minimum is not None or self.codes.is_floating_point() else 1 << (self.bits - 1)

    def rows(self, index: Tensor | slice) -> "Quantized":
        minimum = None if self.minimum is None else self.minimum[index]
        return self._replace(codes=self.codes[index], scale=self.scale[index], minimum=minimum)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Quantized":
        """Return the weight on a device, for activations of `dtype`."""
        minimum = None if self.minimum is None else self.minimum.to(device)
        return Quantized(self.codes.to(device), self.scale.to(device), minimum, self.bits, dtype)

    def regrouped(self, group: int) -> "Quantized":
        """Return the same weight with `group` columns per scale, which must divide the present number."""
        times = self.group // group
        minimum = None if self.minimum is None else self.minimum.repeat_interleave(times, 1)
        return self._replace(scale=self.scale.repeat_interleave(times, 1), minimum=minimum)

    def dequantize(self) -> Tensor:
        """Return the weight [N, K] in `dtype`, computed in float32."""
        groups = self.codes.float().unflatten(1, (-1, self.group)) - self.offset  # [N, groups, group]
        weight = groups * self.scale[..., None]
        if self.minimum is not None:
            weight += self.minimum[..., None]
        return weight.flatten(1).to(self.dtype)


def concatenate(weights: Sequence[Any]) -> Any:
    """Concatenate the rows of weights (Tensor or Quantized). The result is quantized if all weights are, with
    the largest group that divides all groups, the most bits, and minima if any weight has them or the bits
    differ. Values do not change, except that float8 becomes integers if both occur."""
    if len(weights) == 1:
        return weights[0]
    parts = [weight for weight in weights if isinstance(weight, Quantized)]
    if len(parts) < len(weights):
        return torch.cat([w.dequantize() if isinstance(w, Quantized) else w for w in weights])
    if len({part.codes.dtype for part in parts}) > 1:
        parts = [as_integers(part) for part in parts]
    group, bits = math.gcd(*(part.group for part in parts)), max(part.bits for part in parts)
    parts = [part.regrouped(group) for part in parts]
    if len({(part.bits, part.minimum is None) for part in parts}) > 1:
        parts = [p if p.minimum is not None else p._replace(minimum=-p.offset * p.scale) for p in parts]
    codes, scale = torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts])
    minima = [part.minimum for part in parts if part.minimum is not None]
    return Quantized(codes, scale, torch.cat(minima) if minima else None, bits, parts[0].dtype)


def as_integers(weight: Quantized) -> Quantized:
    """Requantize float8 to 8-bit integers; return other weights unchanged."""
    if not weight.codes.is_floating_point():
        return weight
    return quantize(weight._replace(dtype=torch.float32).dequantize(), 8)._replace(dtype=weight.dtype)


def quantize(weight: Tensor, bits: int) -> Quantized:
    """Round `weight` [N, K] to the nearest values with 8 bits (symmetric, in groups of 64 columns if these
    divide K) or 4 bits (with minima, in groups of `GROUP`). Raises ValueError with the reason if
    K or the values are not supported."""
    if weight.shape[1] % GROUP:
        raise ValueError(f"{weight.shape[1]} columns, not a multiple of {GROUP}")
    if not weight.isfinite().all():
        raise ValueError("NaN or infinite values")
    if len(weight) > ROWS:  # limits the memory for temporary tensors
        return concatenate([quantize(part, bits) for part in weight.split(ROWS)])
    group = math.gcd(weight.shape[1], 2 * GROUP) if bits == 8 else GROUP
    groups = weight.float().unflatten(1, (-1, group))  # [N, groups, group]
    if bits == 8:  # low: the value of code 0
        scale = groups.abs().amax(-1) / 127
        low, minimum = -128 * scale, None
    else:
        low = minimum = groups.amin(-1)
        scale = (groups.amax(-1) - low) / 15
    steps = (groups - low[..., None]) / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = steps.round().clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(1)
    return Quantized(codes, scale, minimum, bits, weight.dtype)
