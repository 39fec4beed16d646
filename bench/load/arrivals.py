"""When the requests of a load are sent: at random at a rate, or many at once. A seed gives the same times."""

from __future__ import annotations

import random
from typing import NamedTuple

KINDS = ("poisson", "burst")
BURSTS_SHARE = 0.6  # of the capacity, which bursts take on average


class Load(NamedTuple):
    """`poisson:0.6`: at random, at 0.6 of the capacity. `burst:16`: 16 at once, as often as makes
    `BURSTS_SHARE` of it."""

    kind: str
    size: float

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.size:g}"

    def rate(self, capacity: float) -> float:
        """Requests a second on average, to servers that are taken to answer `capacity` a second."""
        return capacity * (BURSTS_SHARE if self.kind == "burst" else self.size)

    def times(self, capacity: float, most: int, seconds: float, seed: int) -> list[float]:
        """Seconds from the start at which requests are sent: `most` of them, or as many as come in so many
        `seconds` on average, whole bursts and one at least."""
        count, rate = min(most, max(round(self.rate(capacity) * seconds), 1)), self.rate(capacity)
        if self.kind == "poisson":
            return poisson(rate, count, seed)
        size = int(self.size)
        return bursts(size, size / rate, max(count // size, 1) * size)


def parse_load(text: str) -> Load:
    """The load of that name. ValueError if there is none."""
    kind, _, size = text.partition(":")
    try:
        load = Load(kind, float(size))
    except ValueError:
        load = Load("", 0)
    if load.kind not in KINDS or not 0 < load.size <= 1000 or (kind == "burst" and load.size % 1):
        raise ValueError(f"{text!r} is no load; poisson:SHARE and burst:REQUESTS are, such as poisson:0.6.")
    return load


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """`count` times, `rate` a second on average, the waits between them exponential; the first is 0."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(at)
        at += draw.expovariate(rate)
    return found


def bursts(size: int, every: float, count: int) -> list[float]:
    """`size` at once every `every` seconds, `count` in all."""
    return [i // size * every for i in range(count)]
