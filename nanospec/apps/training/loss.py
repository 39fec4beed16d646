"""Cross entropy against a vocabulary projection that stays as it is, and which tokens it covers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FrozenCrossEntropy(torch.autograd.Function):
    """Weighted cross entropy of softmax(x @ projection.T), where the projection is not trained.

    x [N, H], projection [Vd, H], target [N, Vd] probabilities or [N] indices, weight [N] -> a scalar.
    The gradient is computed at once, as in Liger-Kernel, with everything as wide as the vocabulary in the
    dtype of the projection.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        logits = x.to(projection.dtype) @ projection.T  # [N, Vd]
        difference = logits.softmax(-1)
        if target.dim() == 2:
            loss = logits.logsumexp(-1).float() - (target * logits).sum(-1, dtype=torch.float32)
            difference -= target
        else:
            rows = torch.arange(len(x), device=x.device)
            loss = -difference[rows, target].float().clamp(min=1e-12).log()
            difference[rows, target] -= 1
        gradient = difference @ projection
        ctx.save_for_backward(gradient.to(x.dtype) * weight[:, None])
        return (loss * weight).sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None, None


def most_frequent(tokens: Tensor, size: int, vocab_size: int) -> Tensor:
    """The `size` (0: all) most frequent of `tokens` [R] int64, ascending; [Vd] int64.

    When there are fewer, the lowest ids follow: most tokenizers number tokens by frequency.
    """
    if size == 0 or size >= vocab_size:
        return torch.arange(vocab_size)
    counts = torch.bincount(tokens, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:size].sort().values
