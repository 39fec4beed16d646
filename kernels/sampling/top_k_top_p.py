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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..table import Table
from . import noise
from .scores import better_of, load_scores, of_chunks

PIVOTS = tl.constexpr(16)  # thresholds tried at once; 4 bits of the answer
TILE = tl.constexpr(1024)  # tokens per iteration


def naive(scores: Tensor, s: int, table: Table) -> Tensor:
    """Return the least of scores [V] float32 that request row s keeps, 0-d float32. Its temperature is not 0
    and the largest score is finite."""
    temperature, top_k, top_p, min_p = (
        column[s].item() for column in (table.temperature, table.top_k, table.top_p, table.min_p)
    )
    best, V = scores.amax(), len(scores)
    threshold = torch.full_like(best, float("-inf"))
    if 0 < top_k < V:
        threshold = scores.topk(int(top_k))[0][-1]
        scores = scores[scores >= threshold]
    if top_p < 1:
        weights = ((scores - best) / temperature).exp()
        mass = float(weights.sum())
        # Only a shortcut, since sorting is slow: all tokens below this weight hold less than 1 - top_p.
        near = weights >= (1 - top_p) * mass / V
        scores, order = scores[near].sort(descending=True)
        weights = weights[near][order].double()
        above = weights.cumsum(0) - weights
        threshold = scores[max(int((above < top_p * mass).sum()), 1) - 1]
    if min_p > 0:
        threshold = torch.maximum(threshold, best + temperature * math.log(min_p))
    return threshold


class Open(NamedTuple):
    """The open groups: the first `count` of `order`, all groups by their largest score."""

    order: Any
    count: Any


class Weighing(NamedTuple):
    """How tokens are weighed: each counts 1 where `by_count`, else exp((score - best) / temperature).

    `target`: the sum of weights that must be reached.
    """

    by_count: Any
    best: Any
    temperature: Any
    target: Any


@triton.jit
def order_key(x):
    """Return the uint32 that orders as the float does."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def threshold(scan, query, best):
    """Return the groups that hold all that a query keeps, and its least key; `best` is its largest score."""
    table, s = scan.inputs.table, query.s
    temperature = tl.load(table.temperature + s)
    top_k, top_p, min_p = tl.load(table.top_k + s), tl.load(table.top_p + s), tl.load(table.min_p + s)
    by_count = (top_k > 0) & (top_k < table.vocab_size)
    floor = best + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
    floor = order_key(tl.where(min_p > 0, floor, float("-inf")))
    # The mass of the whole vocabulary.
    largest = of_chunks(scan, query, scan.largest)
    mass = of_chunks(scan, query, scan.mass, 0.0)
    mass = tl.sum(mass * tl.exp((largest - best) / temperature))
    target = tl.where(by_count, top_k.to(tl.float32), tl.where(top_p < 1, top_p * mass, float("inf")))
    weighing = Weighing(by_count, best, temperature, target)
    opened = _open_groups(scan, query, weighing, floor)
    key = tl.full([], 0, tl.uint32)
    if by_count:
        key = _search(scan, query, opened, weighing, key, False)
        target = top_p  # of the mass of what top-k leaves
    if top_p < 1:
        weighing = Weighing(False, best, temperature, target)
        found = _search(scan, query, opened, weighing, key, by_count)
        # Never nothing: the likeliest token stays even for a top-p of 0.
        key = tl.minimum(tl.maximum(found, key), order_key(best))
    return opened, tl.maximum(key, floor)


@triton.jit
def draw(scan, query, best):
    """Return the token drawn at a query from what its request keeps. `best` is its largest score."""
    opened, least = threshold(scan, query, best)
    # Kept in the query, the position spills on sm_80.
    position = tl.load(scan.inputs.batch.positions + query.line) + 1
    temperature = tl.load(scan.inputs.table.temperature + query.s)
    seed = tl.load(scan.inputs.table.seed + query.s)
    winner, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, opened.count * scan.GROUP, TILE):
        ids, scores = _load_open(scan, query, opened, first)
        value = scores - temperature * noise.log_e(seed, position, ids)
        kept = tl.where(order_key(scores) >= least, value, float("-inf"))
        winner, token = better_of(winner, token, kept, ids)
    return token


@triton.jit
def _open_groups(scan, query, weighing, floor):
    """Open groups until the tokens in them that exceed all tokens of the others are enough."""
    g = tl.arange(0, triton.next_power_of_2(scan.GROUPS))
    groups = scan.groups + query.line.to(tl.int64) * scan.GROUPS
    key = order_key(tl.load(groups + g, g < scan.GROUPS, other=float("-inf"))).to(tl.uint64) << 32
    key = tl.sort(tl.where(g < scan.GROUPS, key | g.to(tl.uint64), 0), descending=True)
    order, largest = (key & 0xFFFFFFFF).to(tl.int32), (key >> 32).to(tl.uint32)

    count = tl.minimum(scan.inputs.table.vocab_size, TILE // scan.GROUP)
    enough = count >= scan.GROUPS
    while not enough:
        shut = tl.max(tl.where(g >= count, largest, 0))
        pivots = tl.zeros([PIVOTS], tl.uint32) + (shut + 1)
        above = tl.max(_weigh(scan, query, Open(order, count), weighing, pivots, 0))
        if (above >= weighing.target) | ((shut < floor) & (not weighing.by_count)):
            enough = True
        else:
            count = tl.minimum(2 * count, scan.GROUPS)
            enough = count >= scan.GROUPS
    return Open(order, tl.minimum(count, scan.GROUPS))


@triton.jit
def _search(scan, query, opened, weighing, least, is_share):
    """Return the largest key that open tokens of the target weight reach, of those that reach `least`.

    Found from the highest bits down: the largest of 16 pivots that is reached by enough. Where `is_share`,
    the target is a share of all that reaches `least`.
    """
    steps = 8
    if scan.inputs.logits.dtype.element_ty == tl.bfloat16:
        # The lower half of such a logit's key tells nothing, unless penalties have changed it.
        steps = tl.where(tl.load(scan.inputs.table.penalized + query.s), 8, 4)
    found, target = tl.full([], 0, tl.uint32), weighing.target
    digits = tl.arange(0, PIVOTS)
    for step in range(steps):
        pivots = found + (digits << (28 - 4 * step)).to(tl.uint32)
        above = _weigh(scan, query, opened, weighing, pivots, least)
        if (step == 0) & is_share:
            target *= tl.max(above)  # the first pivot is 0, which all reach
        digit = tl.max(tl.where(above >= target, digits, 0))
        found += (digit << (28 - 4 * step)).to(tl.uint32)
    return found


@triton.jit
def _weigh(scan, query, opened, weighing, pivots, least):
    """Return for each pivot the weight of the open tokens that reach it and `least`."""
    above = tl.zeros([PIVOTS], tl.float32)
    for first in range(0, opened.count * scan.GROUP, TILE):
        _, scores = _load_open(scan, query, opened, first)
        key = order_key(scores)
        mass = tl.exp((scores - weighing.best) / weighing.temperature)
        weight = tl.where(key >= least, tl.where(weighing.by_count, 1.0, mass), 0.0)
        above += tl.sum(tl.where(key[:, None] >= pivots[None, :], weight[:, None], 0.0), 0)
    return above


@triton.jit
def _load_open(scan, query, opened, first):
    """Return token ids and scores of a tile of the open groups, from their `first` token on."""
    j = first + tl.arange(0, TILE)
    inside = j < opened.count * scan.GROUP
    group = tl.gather(opened.order, tl.where(inside, j // scan.GROUP, 0), 0)
    token = group * scan.GROUP + j % scan.GROUP
    ids = tl.where(inside, token, scan.inputs.table.vocab_size)  # beyond: scores -inf
    return ids, load_scores(scan.inputs, query, ids)
