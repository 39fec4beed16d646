"""Keep the tokens whose logit is at most n standard deviations below the largest.

Tang et al., 2024, "Top-nsigma: Not All Logits Are You Need". Unlike with top-p and min-p, what is kept does
not depend on the temperature.
"""

from __future__ import annotations

from torch import Tensor

from .base import SamplingParameter


class TopNSigma(
    SamplingParameter,
    name="top_n_sigma",
    help="keep tokens within so many standard deviations of the largest logit; 0 (default) keeps all",
):
    default, low, high = 0.0, 0.0, 100.0

    def change(self, logits: Tensor, value: Tensor) -> Tensor:
        largest, there = logits.amax(-1, keepdim=True), logits.isfinite()  # another may have left some out
        mean = logits.where(there, 0.0).sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
        spread = (logits - mean).where(there, 0.0).square().sum(-1, keepdim=True)
        sigma = (spread / (there.sum(-1, keepdim=True) - 1).clamp(min=1)).sqrt()
        least = largest - value * sigma
        return logits.masked_fill(logits < least, float("-inf"))
