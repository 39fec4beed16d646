"""The probabilities that a query draws from: after penalties, temperature, top-k, top-p and min-p, as
`sample` has them.

`naive` gives them all. The kernel reduces each query's distribution to four numbers, from which the
probability of any token follows from its score. One program per query, one pass over the vocabulary
behind `scan`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..table import Table
from . import top_k_top_p
from .scan import best_score, leaves_out, scan
from .scores import Inputs, load_scores, this_query
from .top_k_top_p import order_key

TILE = tl.constexpr(4096)  # tokens of the vocabulary per iteration


def naive(scores: Tensor, s: int, table: Table) -> Tensor:
    """Return the logarithm [V] of what request row s draws from, temperature > 0; -inf for what is left
    out."""
    kept = scores.masked_fill(scores < top_k_top_p.naive(scores, s, table), float("-inf"))
    return ((kept - kept.amax()) / table.temperature[s]).log_softmax(-1)  # the difference is exact, or tiny


class Distribution(NamedTuple):
    """What tells a token's probability at a query from its score, [T] each.

    The largest score, NaN if there is nothing to draw from; the logarithm of the mass
    sum(exp((score - best) / T)) of the kept; their entropy; the least key (`top_k_top_p.order_key`) kept.
    """

    best: Tensor
    log_mass: Tensor
    entropy: Tensor
    least: Tensor


@triton.jit
def _measure(inputs, partials, distribution):
    query = this_query(inputs.batch)
    s, t = query.s, query.t
    if s < 0:
        return
    best, invalid = best_score(partials, t)
    tl.store(distribution.best + t, tl.where(invalid, float("nan"), best))
    if invalid:
        return
    least = tl.full([], 0, tl.uint32)
    temperature = tl.load(inputs.table.temperature + s)
    if leaves_out(inputs.table, s):
        kept = top_k_top_p.threshold(inputs, query, partials, best)
        least = tl.maximum(kept.key, order_key(kept.floor))
    mass, weighted = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for first in range(0, inputs.table.vocab_size, TILE):
        scores = load_scores(inputs, query, first + tl.arange(0, TILE))
        x = (scores - best) / temperature
        weight = tl.where(order_key(scores) >= least, tl.exp(x), 0.0)
        mass += weight
        weighted += tl.where(weight > 0, weight * x, 0.0)
    whole = tl.sum(mass)
    tl.store(distribution.log_mass + t, tl.log(whole))
    tl.store(distribution.entropy + t, tl.log(whole) - tl.sum(weighted) / whole)
    tl.store(distribution.least + t, least.to(tl.int32, bitcast=True))


@triton.jit
def log_probs(inputs, query, distribution, ids):
    """Return log p of token ids at a query, -inf for what is left out and for ids beyond the vocabulary."""
    t = query.t
    scores = load_scores(inputs, query, tl.where(ids < 0, inputs.table.vocab_size, ids))
    least = tl.load(distribution.least + t).to(tl.uint32, bitcast=True)
    x = (scores - tl.load(distribution.best + t)) / tl.load(inputs.table.temperature + query.s)
    return tl.where(order_key(scores) >= least, x - tl.load(distribution.log_mass + t), float("-inf"))


def measure(inputs: Inputs, max_q_len: int) -> Distribution:
    """Measure what up to max_q_len queries per row draw from."""
    T, f32 = len(inputs.logits), torch.float32
    dtypes = (f32, f32, f32, torch.int32)
    distribution = Distribution(*(inputs.logits.new_empty(T, dtype=dtype) for dtype in dtypes))
    grid = (max_q_len, inputs.batch.rows.shape[0])
    _measure[grid](inputs, scan(inputs, max_q_len), distribution, num_warps=16)
    return distribution
