"""Top-k, top-p and min-p as one threshold: tokens whose score is at least the threshold are kept.

* top-k keeps tokens with fewer than k larger scores.
* top-p is applied to the tokens that top-k keeps. It keeps tokens for which the probability of all larger
  scores is less than p (Holtzman et al., 2020): the smallest set of most likely tokens whose sum reaches p.
* min-p keeps tokens at least p times as likely as the most likely one (Nguyen et al., 2024).

Tokens with equal scores are kept or dropped together. So top-k may keep more than k tokens, and the result
does not depend on a sorting order.

Kernel: it sorts only the maxima of groups of 64 to 256 tokens, which `scan.py` computes while it reads the
logits. Groups are opened in descending order until the remaining ones cannot contain a kept token; for
a peaked distribution, a few suffice. A radix search over the tokens of the open groups then determines the
threshold exactly, 4 bits of an order-preserving integer at a time.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..table import Table
from . import noise
from .scores import load_chunks, load_scores, update_max

PIVOTS = tl.constexpr(16)  # thresholds tried at once: 4 bits of the result
TILE = tl.constexpr(1024)  # tokens per iteration


def naive(scores: Tensor, s: int, table: Table) -> Tensor:
    """Return the threshold (0-d float32) of request row s: it keeps the tokens with a score (`scores` [V]
    float32) of at least this; -inf keeps all. Requires a temperature above 0 and a finite maximum score."""
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
        # To sort fewer tokens: those below this weight hold less than 1 - top_p of the mass in total.
        near = weights >= (1 - top_p) * mass / V
        scores, order = scores[near].sort(descending=True)
        weights = weights[near][order].double()
        above = weights.cumsum(0) - weights
        threshold = scores[max(int((above < top_p * mass).sum()), 1) - 1]
    if min_p > 0:
        threshold = torch.maximum(threshold, best + temperature * math.log(min_p))
    return threshold


class Open(NamedTuple):
    """The open groups: the first `count` of `order`, which lists all groups by descending maximum."""

    order: Any
    count: Any


class Weighing(NamedTuple):
    """The weight of a token: 1 if `by_count`, else exp((score - best) / temperature)."""

    by_count: Any
    best: Any
    temperature: Any
    target: Any  # the sum of weights that the kept tokens must reach


@triton.jit
def order_key(x):
    """Return a uint32 that orders like the float."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def threshold(scan, query, best):
    """Return open groups that hold all kept tokens, and the threshold's key. `best`: the query's maximum."""
    table, s = scan.inputs.table, query.s
    temperature = tl.load(table.temperature + s)
    top_k, top_p, min_p = tl.load(table.top_k + s), tl.load(table.top_p + s), tl.load(table.min_p + s)
    by_count = (top_k > 0) & (top_k < table.vocab_size)
    floor = best + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
    floor = order_key(tl.where(min_p > 0, floor, float("-inf")))
    # Sum of the weights of the whole vocabulary.
    largest = load_chunks(scan, query, scan.largest)
    mass = load_chunks(scan, query, scan.mass, 0.0)
    mass = tl.sum(mass * tl.exp((largest - best) / temperature))
    target = tl.where(by_count, top_k.to(tl.float32), tl.where(top_p < 1, top_p * mass, float("inf")))
    weighing = Weighing(by_count, best, temperature, target)
    opened = _open_groups(scan, query, weighing, floor)
    key = tl.full([], 0, tl.uint32)
    if by_count:
        key = _search(scan, query, opened, weighing, key, False)
        target = top_p  # times the sum over the tokens that top-k keeps
    if top_p < 1:
        weighing = Weighing(False, best, temperature, target)
        found = _search(scan, query, opened, weighing, key, by_count)
        # Keep at least the most likely token, even if top_p is 0.
        key = tl.minimum(tl.maximum(found, key), order_key(best))
    return opened, tl.maximum(key, floor)


@triton.jit
def draw(scan, query, best):
    """Sample a token from those that a query keeps. `best`: its largest score."""
    opened, min_key = threshold(scan, query, best)
    # Using query.position would spill registers on sm_80.
    position = tl.load(scan.inputs.batch.positions + query.line) + 1
    temperature = tl.load(scan.inputs.table.temperature + query.s)
    seed = tl.load(scan.inputs.table.seed + query.s)
    winner, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, opened.count * scan.GROUP, TILE):
        ids, scores = _load_open(scan, query, opened, first)
        value = scores - temperature * noise.log_e(seed, position, ids)
        kept = tl.where(order_key(scores) >= min_key, value, float("-inf"))
        winner, token = update_max(winner, token, kept, ids)
    return token


@triton.jit
def _open_groups(scan, query, weighing, floor):
    """Open groups until the tokens above all closed ones reach the target, or min-p drops all closed ones."""
    g = tl.arange(0, triton.next_power_of_2(scan.GROUPS))
    groups = scan.groups + query.line.to(tl.int64) * scan.GROUPS
    key = order_key(tl.load(groups + g, g < scan.GROUPS, other=float("-inf"))).to(tl.uint64) << 32
    key = tl.sort(tl.where(g < scan.GROUPS, key | g.to(tl.uint64), 0), descending=True)
    order, largest = (key & 0xFFFFFFFF).to(tl.int32), (key >> 32).to(tl.uint32)

    count = tl.minimum(scan.inputs.table.vocab_size, TILE // scan.GROUP)
    enough = count >= scan.GROUPS
    while not enough:
        closed_max = tl.max(tl.where(g >= count, largest, 0))
        pivots = tl.zeros([PIVOTS], tl.uint32) + (closed_max + 1)
        above = tl.max(_weigh(scan, query, Open(order, count), weighing, pivots, 0))
        if (above >= weighing.target) | ((closed_max < floor) & (not weighing.by_count)):
            enough = True
        else:
            count = tl.minimum(2 * count, scan.GROUPS)
            enough = count >= scan.GROUPS
    return Open(order, tl.minimum(count, scan.GROUPS))


@triton.jit
def _search(scan, query, opened, weighing, min_key, is_share):
    """Return the largest key such that the open tokens with at least this key, and at least `min_key`,
    reach the target weight: a radix search from the highest bits down, with 16 pivots per step.

    If `is_share`, the target is a fraction of the weight of all tokens with keys of at least `min_key`.
    """
    steps = 8
    if scan.inputs.logits.dtype.element_ty == tl.bfloat16:
        # The lower half of the key of a bf16 logit has no information unless penalties have changed it.
        steps = tl.where(tl.load(scan.inputs.table.penalized + query.s), 8, 4)
    found, target = tl.full([], 0, tl.uint32), weighing.target
    digits = tl.arange(0, PIVOTS)
    for step in range(steps):
        pivots = found + (digits << (28 - 4 * step)).to(tl.uint32)
        above = _weigh(scan, query, opened, weighing, pivots, min_key)
        if (step == 0) & is_share:
            target *= tl.max(above)  # the first pivot is 0: the weight of all
        digit = tl.max(tl.where(above >= target, digits, 0))
        found += (digit << (28 - 4 * step)).to(tl.uint32)
    return found


@triton.jit
def _weigh(scan, query, opened, weighing, pivots, min_key):
    """Return, for each pivot, the weight of the open tokens with keys of at least the pivot and `min_key`."""
    above = tl.zeros([PIVOTS], tl.float32)
    for first in range(0, opened.count * scan.GROUP, TILE):
        _, scores = _load_open(scan, query, opened, first)
        key = order_key(scores)
        mass = tl.exp((scores - weighing.best) / weighing.temperature)
        weight = tl.where(key >= min_key, tl.where(weighing.by_count, 1.0, mass), 0.0)
        above += tl.sum(tl.where(key[:, None] >= pivots[None, :], weight[:, None], 0.0), 0)
    return above


@triton.jit
def _load_open(scan, query, opened, first):
    """Load token ids and scores of a tile of the open groups, starting at their token number `first`."""
    j = first + tl.arange(0, TILE)
    inside = j < opened.count * scan.GROUP
    group = tl.gather(opened.order, tl.where(inside, j // scan.GROUP, 0), 0)
    token = group * scan.GROUP + j % scan.GROUP
    ids = tl.where(inside, token, scan.inputs.table.vocab_size)  # else out of range: score -inf
    return ids, load_scores(scan.inputs, query, ids)
