"""Top-k, top-p and min-p as one threshold: the tokens of a request whose score reaches it are kept.

* top-k keeps the tokens that fewer than k others exceed.
* top-p keeps the tokens that less than the share p of the probability exceeds, among what top-k left
  (Holtzman et al., 2020): the smallest set of likeliest tokens that holds p.
* min-p keeps the tokens at least p times as likely as the likeliest (Nguyen et al., 2024).

Equal scores share their fate, so k equal scores at the threshold may keep more than k tokens, and the
result depends on no order of sorting.

Kernel: nothing is sorted but the largest scores of groups of 64 to 256 tokens, which the pass over the
logits leaves behind (`scan.py`). Groups are opened in that order until those that stay shut can
hold no survivor; a peaked distribution is decided by a few of them. Among the tokens of open groups
the threshold is found exactly, 4 bits of its order-preserving integer at a time.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise
from .penalties import load_scores

PIVOTS = tl.constexpr(16)  # thresholds tried at once; 4 bits of the answer
TILE = tl.constexpr(1024)  # tokens per iteration


def naive(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The least score that is kept, 0-d float32; temperature > 0. scores [V] float32, largest finite."""
    best, V = scores.amax(), len(scores)
    threshold = torch.full_like(best, float("-inf"))
    if 0 < top_k < V:
        threshold = scores.topk(top_k)[0][-1]
        scores = scores[scores >= threshold]
    if top_p < 1:
        weights = ((scores - best) / temperature).exp()
        mass = top_p * float(weights.sum())
        # Only a shortcut, since sorting is slow: if the tokens from some weight on hold more than the
        # mass, the threshold is one of them.
        for least in (1e-3, 1e-5, 0.0):
            near = weights >= least
            if float(weights[near].sum()) > mass:
                break
        scores, order = scores[near].sort(descending=True)
        weights = weights[near][order].double()
        above = weights.cumsum(0) - weights
        threshold = scores[max(int((above < mass).sum()), 1) - 1]
    if min_p > 0:
        threshold = torch.maximum(threshold, best + temperature * math.log(min_p))
    return threshold


@triton.jit
def asked(table, s):
    """Whether request row s leaves tokens out when it draws."""
    top_k = tl.load(table.top_k + s)
    by_count = (top_k > 0) & (top_k < table.vocab_size)
    by_mass = (tl.load(table.top_p + s) < 1) | (tl.load(table.min_p + s) > 0)
    return (tl.load(table.temperature + s) > 0) & (by_count | by_mass)


@triton.jit
def order_key(x):
    """The uint32 that orders as the float does."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def threshold(inputs, query, partials, best, mass):
    """What a query's request keeps: (the open groups, the least key, the least score).

    `best` is the largest score, `mass` the sum of exp((score - best) / temperature). All that is kept lies
    in the open groups.
    """
    table, s = inputs.table, query[0]
    temperature = tl.load(table.temperature + s)
    top_k, top_p, min_p = tl.load(table.top_k + s), tl.load(table.top_p + s), tl.load(table.min_p + s)
    by_count = (top_k > 0) & (top_k < table.vocab_size)
    floor = best + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
    floor = tl.where(min_p > 0, floor, float("-inf"))
    target = tl.where(by_count, top_k.to(tl.float32), tl.where(top_p < 1, top_p * mass, float("inf")))

    # Sort the groups by their largest score.
    g = tl.arange(0, triton.next_power_of_2(partials.GROUPS))
    groups = partials.groups + query[1].to(tl.int64) * partials.GROUPS
    key = order_key(tl.load(groups + g, g < partials.GROUPS, other=float("-inf"))).to(tl.uint64) << 32
    key = tl.sort(tl.where(g < partials.GROUPS, key | g.to(tl.uint64), 0), descending=True)
    order, largest = (key & 0xFFFFFFFF).to(tl.int32), (key >> 32).to(tl.uint32)

    # Open groups until the tokens in them that exceed all tokens of the others are enough.
    weighing = (by_count, best, temperature)
    num_open = tl.minimum(table.vocab_size, TILE // partials.GROUP)
    enough = num_open >= partials.GROUPS
    while not enough:
        shut = tl.max(tl.where(g >= num_open, largest, 0))
        pivots = tl.zeros([PIVOTS], tl.uint32) + (shut + 1)
        opened = (order, num_open)
        above = tl.max(_weigh(inputs, query, opened, weighing, pivots, 0, partials.GROUP))
        if (above >= target) | ((shut < order_key(floor)) & (not by_count)):
            enough = True
        else:
            num_open = tl.minimum(2 * num_open, partials.GROUPS)
            enough = num_open >= partials.GROUPS
    opened = (order, tl.minimum(num_open, partials.GROUPS))

    # The least key that is kept: by top-k, then by top-p among those.
    least, steps = tl.full([], 0, tl.uint32), 8
    if inputs.logits.dtype.element_ty == tl.bfloat16:
        # The lower half of such a logit's key tells nothing, unless penalties have changed it.
        steps = tl.where(tl.load(table.penalized + s), 8, 4)
    if by_count:
        least = _search(inputs, query, opened, weighing, target, False, least, steps, partials.GROUP)
        target = top_p  # of a mass that is not known yet
    if top_p < 1:
        weighing = (False, best, temperature)
        found = _search(inputs, query, opened, weighing, target, by_count, least, steps, partials.GROUP)
        # Never nothing: the likeliest token stays even for a top-p of 0.
        least = tl.minimum(tl.maximum(found, least), order_key(best))
    return opened, least, floor


@triton.jit
def draw(inputs, query, partials, best, mass):
    """The token drawn at `query` from what its request keeps. See `threshold`."""
    temperature = tl.load(inputs.table.temperature + query[0])
    opened, least, floor = threshold(inputs, query, partials, best, mass)
    position = tl.load(inputs.batch.positions + query[1]) + 1
    seed = tl.load(inputs.table.seed + query[0])
    winner, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, opened[1] * partials.GROUP, TILE):
        ids, scores = _open(inputs, query, opened, first, partials.GROUP)
        value = scores - temperature * noise.block(seed, position, ids)
        kept = (order_key(scores) >= least) & (scores >= floor)
        high, lowest = best_of(tl.where(kept, value, float("-inf")), ids)
        better = (high > winner) | ((high == winner) & (lowest < token))
        winner, token = tl.where(better, high, winner), tl.where(better, lowest, token)
    return token


@triton.jit
def best_of(values, ids):
    """The largest of a block of values, and the lowest id that has it."""
    largest = tl.max(values)
    return largest, tl.min(tl.where(values == largest, ids, 2147483647))


@triton.jit
def _search(inputs, query, opened, weighing, target, share, least, steps, GROUP: tl.constexpr):
    """The largest key that `target` or more of the open tokens reach, of those that reach `least`.

    Found from the highest bits down: the largest of 16 pivots that is reached by enough. With `share`
    the target is a share of all that reaches `least`.
    """
    found = tl.full([], 0, tl.uint32)
    digits = tl.arange(0, PIVOTS)
    for step in range(steps):
        pivots = found + (digits << (28 - 4 * step)).to(tl.uint32)
        above = _weigh(inputs, query, opened, weighing, pivots, least, GROUP)
        if (step == 0) & share:
            target *= tl.max(above)  # the first pivot is 0, which all reach
        digit = tl.max(tl.where(above >= target, digits, 0))
        found += (digit << (28 - 4 * step)).to(tl.uint32)
    return found


@triton.jit
def _weigh(inputs, query, opened, weighing, pivots, least, GROUP: tl.constexpr):
    """For each pivot, the number or the mass of the open tokens that reach it and `least`."""
    by_count, best, temperature = weighing
    above = tl.zeros([PIVOTS], tl.float32)
    for first in range(0, opened[1] * GROUP, TILE):
        _, scores = _open(inputs, query, opened, first, GROUP)
        key = order_key(scores)
        weight = tl.where(by_count, 1.0, tl.exp((scores - best) / temperature))
        weight = tl.where(key >= least, weight, 0.0)
        above += tl.sum(tl.where(key[:, None] >= pivots[None, :], weight[:, None], 0.0), 0)
    return above


@triton.jit
def _open(inputs, query, opened, first, GROUP: tl.constexpr):
    """Token ids and scores of a tile of the open groups, from their `first` token on."""
    order, num_open = opened
    j = first + tl.arange(0, TILE)
    inside = j < num_open * GROUP
    group = tl.gather(order, tl.where(inside, j // GROUP, 0), 0)
    ids = tl.where(inside, group * GROUP + j % GROUP, inputs.table.vocab_size)  # beyond: scores -inf
    return ids, load_scores(inputs, query, ids)
