"""Weights for tests and benchmarks, made on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .config import ModelConfig


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int
) -> Callable[[str], Tensor]:
    """Gives tensors of `config.parameter_shapes` by name, in the order in which they are asked for.

    Scaled so that activations stay near 1 and logits have a standard deviation of about 2: the text is
    nonsense, but neither constant nor uniform. The same seed gives the same weights up to rounding in every
    dtype (not across devices).
    """
    shapes = config.parameter_shapes()
    generator = torch.Generator(device=device).manual_seed(seed)

    def get(name: str) -> Tensor:
        shape = shapes[name]
        noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        elif len(shape) == 1:  # biases
            noise *= 0.1
        else:
            scale = 2.0 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1.0
            noise *= scale / math.sqrt(shape[1])
        return noise.to(dtype)

    return get
