"""Rotary position embedding: the angles by which `kernels/layer/rope_cache.py` rotates q and k.

Pair i of a head of dimension D turns by position * theta^(-2i/D) (Su et al., 2021,
https://arxiv.org/abs/2104.09864). Models with a longer context than they were pretrained with slow
some of the pairs down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Which angles a model uses.

    Attributes:
        kind: "default" as above; "linear" divides every frequency by `factor`; "llama3" divides low
            ones, keeps high ones and blends between.
        theta: the base.
        factor: how much longer the context got than in pretraining.
        low_freq_factor, high_freq_factor, original_max_len: llama3 only. Wavelengths above original_max_len /
            low_freq_factor are low, those below original_max_len / high_freq_factor are high.
    """

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


def cos_sin_table(rope: Rope, head_dim: int, max_len: int, device: torch.device | str) -> Tensor:
    """[max_len, D] float32: cos of the D/2 angles of each position, then sin; from float64."""
    position = torch.arange(max_len, dtype=torch.float64, device=device)
    angle = torch.outer(position, frequencies(rope, head_dim).to(device))
    return torch.cat((angle.cos().float(), angle.sin().float()), dim=1)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[D/2] float64: radians per position of each rotated pair."""
    base = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "llama3":
        # Turns over the original context decide: 0 keeps base / factor, 1 keeps base.
        turns = rope.original_max_len * base / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return base * (keep + (1 - keep) / rope.factor)
    return base / rope.factor
