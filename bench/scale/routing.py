"""Which replica gets a request: at random, the least loaded, or one that has its prefix.

Load is the number of requests a replica has. By prefix, every prefix has a home, and a request goes to the
first replica from there on whose load is not above `bound` times the mean (consistent hashing with bounded
loads, Mirrokni, Thorup and Zadimoghaddam 2018). So a prefix that is asked for more often than one replica can
answer spreads over as many as it needs, which a hash alone would not do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from bench.scale.workload import NO_PREFIX, Request

Router = Callable[[Request, Sequence[int]], int]
"""A request and the load of every replica -> its replica."""
BOUND = 1.25


def at_random(seed: int = 0) -> Router:
    draw = random.Random(seed)
    return lambda request, loads: draw.randrange(len(loads))


def least_loaded() -> Router:
    """Of several in turn."""
    last = -1

    def choose(request: Request, loads: Sequence[int]) -> int:
        nonlocal last
        least = min(loads)
        try:
            last = loads.index(least, last + 1)
        except ValueError:
            last = loads.index(least)
        return last

    return choose


def by_prefix(bound: float = BOUND) -> Router:
    """With an infinite bound: by a hash of the prefix alone. Who has no prefix goes to the least loaded."""
    others, homes = least_loaded(), dict[int, int]()

    def choose(request: Request, loads: Sequence[int]) -> int:
        if request.prefix == NO_PREFIX:
            return others(request, loads)
        home = homes.get(request.prefix, -1)
        if home < 0:
            home = homes[request.prefix] = random.Random(request.prefix).randrange(len(loads))
        if bound == float("inf"):
            return home
        most = bound * (sum(loads) + 1) / len(loads)
        return next(i for at in range(home, home + len(loads)) if loads[i := at % len(loads)] < max(most, 1))

    return choose


ROUTERS: dict[str, Callable[[], Router]] = {
    "random": at_random,
    "least loaded": least_loaded,
    "hash": lambda: by_prefix(float("inf")),
    "prefix": by_prefix,
}
