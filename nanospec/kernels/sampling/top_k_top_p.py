"""Top-k, top-p and min-p as one threshold: tokens whose score is at least the threshold are kept.

* top-k keeps tokens with fewer than k larger scores.
* top-p is applied to the tokens that top-k keeps. It keeps tokens for which the probability of all larger
  scores is less than p (Holtzman et al., 2020): the smallest set of most likely tokens whose sum reaches p.
* min-p keeps tokens at least p times as likely as the most likely one (Nguyen et al., 2024).

Tokens with equal scores are kept or dropped together. So top-k may keep more than k tokens, and the result
does not depend on a sorting order.

Kernel: it sorts only the maxima of groups of 64 to 256 tokens, which `scan.py` computes while it reads the
logits. For top-k it opens the groups whose maximum is at least the k-th largest maximum: closed groups cannot
contain a kept token. Without top-k, groups are opened in descending order until no closed group can; for a
peaked distribution, a few suffice. A radix search over the tokens of the open groups then determines the
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
LOWEST = tl.constexpr(0x00800000)  # `order_key` of the lowest finite score; -inf is never drawn


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


class Groups(NamedTuple):
    """The groups of a query by descending maximum: a pointer to their numbers, and the keys of their maxima.
    The first `count` groups are open."""

    order: Any
    largest: Any
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
    floor = order_key(best + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0)))
    floor = tl.where(min_p > 0, floor, LOWEST)
    groups, target = _sort_groups(scan, query), top_p
    if by_count:  # at least k tokens reach the k-th largest maximum
        g = tl.arange(0, groups.largest.shape[0])
        least = tl.max(tl.where(g == top_k - 1, groups.largest, LOWEST))
        weighing = Weighing(True, best, temperature, top_k)
        least = _search(scan, query, _open(groups, least), weighing, least, False)
    else:
        largest, mass = load_chunks(scan, query, scan.largest), load_chunks(scan, query, scan.mass, 0.0)
        mass = tl.sum(mass * tl.exp((largest - best) / temperature))  # of the vocabulary
        target = tl.where(top_p < 1, top_p * mass, float("inf"))
        least = _lower_bound(scan, query, groups, Weighing(False, best, temperature, target), floor)
    if top_p < 1:
        weighing = Weighing(False, best, temperature, target)
        least = _search(scan, query, _open(groups, least), weighing, least, by_count)
    # Keep at least the most likely token, even if top_p is 0.
    key = tl.maximum(tl.minimum(least, order_key(best)), floor)
    return _open(groups, key), key


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
def _sort_groups(scan, query):
    """Sort the groups of a query by descending maximum and store their numbers. Return them, all closed."""
    g = tl.arange(0, triton.next_power_of_2(scan.GROUPS))
    line = query.line.to(tl.int64) * scan.GROUPS
    key = order_key(tl.load(scan.groups + line + g, g < scan.GROUPS, other=float("-inf"))).to(tl.uint64) << 32
    key = tl.sort(tl.where(g < scan.GROUPS, key | g.to(tl.uint64), 0), descending=True)
    tl.store(scan.order + line + g, (key & 0xFFFFFFFF).to(tl.int32), g < scan.GROUPS)
    tl.debug_barrier()  # other threads of the program read it
    return Groups(scan.order + line, (key >> 32).to(tl.uint32), 0)


@triton.jit
def _open(groups, least):
    """Open the groups that have tokens with keys of at least `least`, which is above 0."""
    return Groups(groups.order, groups.largest, tl.sum((groups.largest >= least).to(tl.int32)))


@triton.jit
def _lower_bound(scan, query, groups, weighing, floor):
    """Open groups, twice as many each time, until the tokens above all closed ones reach the target, or the
    closed ones are below `floor`. Return the lowest key above the closed groups."""
    g = tl.arange(0, groups.largest.shape[0])
    count, least = tl.full([], TILE // scan.GROUP, tl.int32), tl.full([], 0, tl.uint32)
    short = tl.full([], True, tl.int1)
    while short:
        least = tl.max(tl.where(g >= count, groups.largest, LOWEST - 1)) + 1
        short = least > floor
        if short:
            pivot = tl.zeros([1], tl.uint32) + least
            short = tl.sum(_weigh(scan, query, _open(groups, least), weighing, pivot)) < weighing.target
        count *= 2
    return least


@triton.jit
def _search(scan, query, opened, weighing, least, is_share):
    """Return the largest key such that the open tokens with at least this key reach the target weight, but at
    least `least`: a radix search from the highest bits down, with 16 pivots per step.

    If `is_share`, the target is a fraction of the weight of the tokens with keys of at least `least`.
    """
    steps = 8
    if scan.inputs.logits.dtype.element_ty == tl.bfloat16:
        # The lower half of the key of a bf16 logit has no information unless penalties have changed it.
        steps = tl.where(tl.load(scan.inputs.table.penalized + query.s), 8, 4)
    found, digits = tl.full([], 0, tl.uint32), tl.arange(0, PIVOTS)
    differing = least ^ order_key(weighing.best)
    for step in range(steps):
        shift = 28 - 4 * step
        if (differing >> shift) == 0:  # both bounds have this digit, and all before it
            found = least >> shift << shift
        else:
            # Digit 0 stands for `least`: its weight is that of all tokens considered, as `is_share` needs.
            pivots = tl.where(digits > 0, found + (digits << shift).to(tl.uint32), 0)
            above = _weigh(scan, query, opened, weighing, tl.maximum(pivots, least))
            target = weighing.target * tl.where(is_share, tl.max(above), 1.0)
            found += (tl.max(tl.where(above >= target, digits, 0)) << shift).to(tl.uint32)
    return tl.maximum(found, least)


@triton.jit
def _weigh(scan, query, opened, weighing, pivots):
    """Return, for each pivot, the weight of the open tokens with keys of at least the pivot."""
    # Each thread adds up its own tokens for all pivots: on sm_90, the loop has no barrier and does not access
    # shared memory; with a sum per tile, it has 9 barriers and 42 accesses.
    above = tl.zeros([pivots.shape[0], TILE], tl.float32)
    for first in range(0, opened.count * scan.GROUP, TILE):
        _ids, scores = _load_open(scan, query, opened, first)
        mass = tl.exp((scores - weighing.best) / weighing.temperature)
        weight = tl.where(weighing.by_count, 1.0, mass)
        above += tl.where(order_key(scores) >= pivots[:, None], weight, 0.0)
    return tl.sum(above, 1)


@triton.jit
def _load_open(scan, query, opened, first):
    """Load token ids and scores, [1, TILE] each, of the open groups, starting at their token number `first`.

    In one dimension, `_weigh` would have to convert their layout (4 barriers)."""
    j = first + tl.arange(0, TILE)[None, :]
    inside = j < opened.count * scan.GROUP
    group = tl.load(opened.order + j // scan.GROUP, inside, other=0)
    token = group * scan.GROUP + j % scan.GROUP
    ids = tl.where(inside, token, scan.inputs.table.vocab_size)  # else out of range: score -inf
    return ids, load_scores(scan.inputs, query, ids)
