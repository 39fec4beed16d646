"""Compute the angles by which `kernels/layer/rope_cache.py` rotates q and k.

Pair i of a head of dimension D turns by position * theta^(-2i/D) (Su et al., 2021,
https://arxiv.org/abs/2104.09864). Models with a longer context than in pretraining slow some pairs down.
Where only R numbers of a head are rotated, R takes the place of D, and the last (D - R)/2 pairs stand still;
`families/phi3.py` reorders such heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """The kind of angles and their parameters.

    Attributes:
        kind: "default" as above; "linear" divides every frequency by `factor`; "llama3" divides low
            frequencies, keeps high ones and blends between; "longrope" divides each by its own factor.
        theta: the base.
        factor: ratio of the context to that of pretraining.
        low_freq_factor, high_freq_factor, original_max_len: of llama3. Wavelengths above original_max_len /
            low_freq_factor are low, those below original_max_len / high_freq_factor are high.
        part: the rotated fraction of each head.
        short_factors, long_factors: of longrope, one for each rotated pair; the long ones hold if
            max_position_embeddings exceeds original_max_len (cached keys cannot change over).
        attention_factor: of longrope, the scale of q and k; None computes it from `factor`
            (https://arxiv.org/abs/2402.13753).
    """

    kind: Literal["default", "linear", "llama3", "longrope"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    part: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float | None = None

    def rotated(self, head_dim: int) -> int:
        """Return the number of rotated values of a head."""
        return int(head_dim * self.part)

    @property
    def amplitude(self) -> float:
        """Scale of q and k."""
        if self.kind != "longrope":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_max_len))


def cos_sin_table(rope: Rope, head_dim: int, max_len: int, device: torch.device | str) -> Tensor:
    """Return [max_len, D] float32: cos of the D/2 angles of each position, then sin; from float64."""
    position = torch.arange(max_len, dtype=torch.float64, device=device)
    angle = torch.outer(position, frequencies(rope, head_dim, max_len).to(device))
    table = torch.cat((angle.cos().float(), angle.sin().float()), dim=1)
    if rope.amplitude != 1:
        table.unflatten(1, (2, -1))[..., : rope.rotated(head_dim) // 2] *= rope.amplitude
    return table


def frequencies(rope: Rope, head_dim: int, max_len: int) -> Tensor:
    """Return [D/2] float64: radians per position of each pair, for texts of up to `max_len` tokens."""
    rotated = rope.rotated(head_dim)
    base = rope.theta ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if rope.kind == "llama3":
        # Turns over the original context decide: 0 keeps base / factor, 1 keeps base.
        turns = rope.original_max_len * base / (2 * math.pi)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        base = base * (keep + (1 - keep) / rope.factor)
    elif rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_max_len else rope.short_factors
        base = base / torch.tensor(factors, dtype=torch.float64)
    else:
        base = base / rope.factor
    return torch.cat((base, base.new_zeros((head_dim - rotated) // 2)))
