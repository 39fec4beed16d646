"""A fleet under a load: how well it serves, and how much it can take.

A request is served well if its first token comes within `Bounds.first` and the others within `Bounds.token`
on average; the rate that a fleet takes is the highest at which 95 % are, and first tokens do not come later
and later (`capacity`). Caches of prefixes are filled beforehand, and requests of the first part of a run,
while rows fill, are left out of all figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

from bench.scale.costs import Costs
from bench.scale.fleet import Fleet
from bench.scale.guessing import Brought, Guessing
from bench.scale.paper import dollars, steady
from bench.scale.replica import Replica
from bench.scale.routing import ROUTERS
from bench.scale.workload import Request, Workload

Json = dict[str, Any]
WELL = 0.95  # of the requests must be served within bounds
FILLING = 0.4  # of a run that is left out
GROWS, SHORT = (
    1.5,
    0.2,
)  # last waits over first ones that make a queue one that grows; seconds that do not count
WARM = 60.0  # seconds of requests that fill the caches beforehand
CLOSE = 0.02  # a rate is found if it is known so well


class Bounds(NamedTuple):
    """Seconds to the first token, and per token behind it on average."""

    first: float = 1.0
    token: float = 0.02


@dataclass(frozen=True)
class Setup:
    """A fleet: `replicas` of the same kind, `prefillers` of which compute prompts only."""

    costs: Costs
    guessing: Guessing
    replicas: int = 1
    router: str = "least loaded"
    rows: int = 256
    chunk: int = 2048
    prefillers: int = 0
    bandwidth: float = 50e9

    @property
    def gpus(self) -> int:
        return self.replicas * self.costs.gpus

    def fleet(self) -> Fleet:
        def several(count: int, prefills: bool = False) -> list[Replica]:
            return [Replica(self.costs, self.guessing, self.rows, self.chunk, prefills) for _ in range(count)]

        prefillers, rest = several(self.prefillers, True), several(self.replicas - self.prefillers)
        return Fleet(rest, ROUTERS[self.router](), prefillers, self.bandwidth * self.costs.gpus)


def figures(setup: Setup, load: Workload, bounds: Bounds, seed: int = 0) -> Json:
    """What a fleet makes of a load."""
    fleet, requests = setup.fleet(), load.requests(seed)
    if load.shared:
        fleet.warm(replace(load, seconds=WARM).requests(seed + 1))
    fleet.run(requests)
    begin = FILLING * load.seconds
    counted = [request for request in requests if request.at >= begin]
    totals = [replica.totals for replica in (*fleet.prefillers, *fleet.replicas)]
    busy, decoding = sum(t.busy for t in totals), sum(t.decoding for t in totals)
    computed, cached = sum(t.computed for t in totals), sum(t.cached for t in totals)
    tokens = sum(r.output for r in counted if served_well(r, bounds)) / (load.seconds - begin)
    return {
        "served_well": shorten(sum(served_well(r, bounds) for r in counted) / max(len(counted), 1)),
        "waits_grow": waits_grow(counted),
        "good_tokens_per_s_and_gpu": shorten(tokens / setup.gpus),
        "dollars": shorten(dollars(tokens / setup.gpus)) if tokens else None,
        "ttft_ms": spread([1e3 * r.ttft for r in counted]),
        "tpot_ms": spread([1e3 * r.tpot for r in counted if r.output > 1]),
        "busy": shorten(busy / len(totals) / fleet.now),
        "rows": shorten(sum(t.rows for t in totals) / busy),
        "k": shorten(sum(t.guessed for t in totals) / decoding) if decoding else 0.0,
        "prompt_tokens_cached": shorten(cached / max(computed + cached, 1)),
    }


def served_well(request: Request, bounds: Bounds) -> bool:
    return request.ttft <= bounds.first and request.tpot <= bounds.token


def waits_grow(requests: Sequence[Request]) -> bool:
    """Whether first tokens of the last third of these requests came so much later than those of the first
    third that more are asked for than can be answered."""
    third = len(requests) // 3
    if not third:
        return False
    first, last = (fmean(r.ttft for r in part) for part in (requests[:third], requests[-third:]))
    return last > max(GROWS * first, SHORT)


def spread(values: Sequence[float]) -> Json:
    """Median and the 99th of a hundred."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100)
    return {"median": shorten(cuts[49]), "p99": shorten(cuts[98])}


def shorten(value: float) -> float:
    return float(f"{value:.4g}")


def capacity(setup: Setup, load: Workload, bounds: Bounds, low: float, high: float) -> tuple[float, Json]:
    """The highest rate, in requests per second and GPU, that is served well, and the figures there. It is
    searched between `low` and `high`, which move if they have to."""
    found: dict[float, Json] = {}

    def good(rate: float) -> bool:
        found[rate] = figures(setup, replace(load, rate=rate * setup.gpus), bounds)
        return found[rate]["served_well"] >= WELL and not found[rate]["waits_grow"]

    while not good(low):
        low, high = low / 2, low
        if low < 1e-3:
            return 0.0, found[2 * low]
    while good(high):
        low, high = high, high * high / low
    while high > low * (1 + CLOSE):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if good(middle) else (low, middle)
    return shorten(low), found[low]


def paper_rate(setup: Setup, load: Workload, bounds: Bounds, kind: Brought, cached: int = 0) -> float:
    """About the rate that it takes, in requests per second and GPU, if nobody had to wait."""
    points = [
        steady(setup.costs, kind, rows, k, load.prompt, load.output, cached)
        for rows in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
        for k in kind
        if rows <= setup.rows
    ]
    rates = [p.rate / load.output for p in points if p.ms <= 1e3 * bounds.token]
    return max(rates, default=0.1)
