"""Top-k, top-p and min-p as one threshold: the tokens of a request whose score reaches it are kept.

* top-k keeps the tokens that fewer than k others exceed.
* top-p keeps the tokens that less than the share p of the probability exceeds, among what top-k left
  (Holtzman et al., 2020): the smallest set of likeliest tokens that holds p.
* min-p keeps the tokens at least p times as likely as the likeliest (Nguyen et al., 2024).

Equal scores share their fate, so k equal scores at the threshold may keep more than k tokens, and the
result depends on no order of sorting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def naive(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The least score that is kept, 0-d float32; temperature > 0. scores [V] float32, largest finite."""
    best, V = scores.amax(), len(scores)
    threshold = torch.full_like(best, float("-inf"))
    if 0 < top_k < V:
        threshold = scores.topk(top_k)[0][-1]
        scores = scores[scores >= threshold]
    if top_p < 1:
        weights = ((scores - best) / temperature).exp()
        mass = top_p * weights.sum(dtype=torch.float64)
        # Only a shortcut, since sorting is slow: tokens lighter than this weigh less than 1 - p all
        # together, so the share of those above them is larger than p.
        floor = 0.5 * (1 - top_p) * float(weights.sum()) / V
        scores = scores[weights >= floor].sort(descending=True)[0]
        weights = ((scores - best) / temperature).exp().double()
        above = weights.cumsum(0) - weights
        threshold = scores[max(int((above < mass).sum()), 1) - 1]
    if min_p > 0:
        threshold = torch.maximum(threshold, best + temperature * math.log(min_p))
    return threshold
