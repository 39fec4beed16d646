"""The probabilities that a query draws from: after shaping, temperature and filters, as `sample` has them.

`naive` gives them all. The kernel reduces each query's distribution to four numbers, from which the
probability of any token follows from its score. One program per query, one pass over the vocabulary
behind `scan`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import penalties, sample, scan, top_k_top_p
from .sample import Params
from .scan import Inputs

TILE = tl.constexpr(4096)  # tokens of the vocabulary per iteration


def naive(scores: Tensor, s: int, params: Params) -> Tensor:
    """[V]: the logarithm of what request row s draws from, temperature > 0; -inf for what it filters."""
    kept = scores.masked_fill(scores < sample.threshold(scores, s, params), float("-inf"))
    return (kept / params.temperature[s]).log_softmax(-1)


class Law(NamedTuple):
    """What tells a token's probability at a query from its score, [N] each.

    The largest score, NaN if there is nothing to draw from; the logarithm of the mass
    sum(exp((score - best) / T)) of the kept; their entropy; the least key (`top_k_top_p.order_key`) kept.
    """

    best: Tensor
    log_mass: Tensor
    entropy: Tensor
    least: Tensor


@triton.jit(do_not_specialize=["max_q_len"])
def _measure(
    inputs, partials, law, max_q_len,
    CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    query = scan.this_query(inputs, max_q_len)
    s, t = query[0], query[1]
    if s < 0:
        return
    best, invalid = scan.best_score(partials, t, CHUNKS, CHUNKS_PADDED)
    tl.store(law.best + t, tl.where(invalid, float("nan"), best))
    if invalid:
        return
    least = tl.full([], 0, tl.uint32)
    if top_k_top_p.asked(inputs, s):
        whole = scan.whole_mass(inputs, partials, s, t, best, CHUNKS, CHUNKS_PADDED)
        groups = partials.groups + t.to(tl.int64) * GROUPS
        _, key, floor = top_k_top_p.threshold(
            inputs, query, groups, best, whole, GROUPS, GROUPS_PADDED, GROUP, BF16
        )
        least = tl.maximum(key, top_k_top_p.order_key(floor))
    temperature = tl.load(inputs.params.temperature + s)
    mass, weighted = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for first in range(0, inputs.vocab, TILE):
        scores = penalties.load_scores(inputs, query, first + tl.arange(0, TILE))
        x = (scores - best) / temperature
        weight = tl.where(top_k_top_p.order_key(scores) >= least, tl.exp(x), 0.0)
        mass += weight
        weighted += tl.where(weight > 0, weight * x, 0.0)
    whole = tl.sum(mass)
    tl.store(law.log_mass + t, tl.log(whole))
    tl.store(law.entropy + t, tl.log(whole) - tl.sum(weighted) / whole)
    tl.store(law.least + t, least.to(tl.int32, bitcast=True))


@triton.jit
def log_probs(inputs, query, law, ids):
    """log p of token ids at a query, -inf for what is filtered and for ids beyond the vocabulary."""
    s, t = query[0], query[1]
    scores = penalties.load_scores(inputs, query, tl.where(ids < 0, inputs.vocab, ids))
    least = tl.load(law.least + t).to(tl.uint32, bitcast=True)
    x = (scores - tl.load(law.best + t)) / tl.load(inputs.params.temperature + s)
    return tl.where(top_k_top_p.order_key(scores) >= least, x - tl.load(law.log_mass + t), float("-inf"))


def measure(inputs: Inputs, max_q_len: int) -> Law:
    """Measure what up to max_q_len queries per row draw from."""
    partials, constants = scan.scan(inputs, max_q_len)

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(inputs.logits.shape[0], dtype=dtype, device=inputs.logits.device)

    law = Law(empty(torch.float32), empty(torch.float32), empty(torch.float32), empty(torch.int32))
    grid = (inputs.rows.shape[0] * max_q_len,)
    _measure[grid](inputs, partials, law, max_q_len, **constants, num_warps=16)
    return law
