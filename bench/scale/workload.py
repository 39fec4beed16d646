"""What is asked of a fleet: when requests come, which of them begin alike, how long they are.

A seed gives the same requests. Arrivals are random at a rate that is constant (`poisson`), follows a day
(`day`, one over the whole run), or jumps (`bursts`); its mean is the rate that is asked for.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

SHAPES = ("poisson", "day", "bursts")
SWING = 0.6  # of a day: the rate goes from 0.4 to 1.6 of its mean
BURST, QUIET, EVERY, LASTS = 4.6, 0.6, 10.0, 1.0  # rates of their mean; seconds
LONGEST = 8  # times the mean length
NO_PREFIX = -1


@dataclass(slots=True, eq=False)
class Request:
    """One request, and what became of it.

    Attributes:
        at: seconds when it came.
        prefix: which beginning it shares with others, of `shared` tokens; NO_PREFIX if none.
        prompt: tokens, the shared ones included; `output` tokens follow, at least one.
        kind: of text, which decides what drafts bring.
        cached: prompt tokens that it did not compute; `left`: those it still has to.
        start, first, end: seconds when it got a row, its first token, its last one; -1 before.
    """

    at: float
    prefix: int
    shared: int
    prompt: int
    output: int
    kind: int
    cached: int = 0
    left: int = 0
    start: float = -1.0
    first: float = -1.0
    end: float = -1.0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.at

    @property
    def tpot(self) -> float:
        """Seconds per token behind the first."""
        return (self.end - self.first) / max(self.output - 1, 1)


@dataclass(frozen=True)
class Workload:
    """A load.

    Attributes:
        rate: requests per second on average, for so many `seconds`.
        prompt, output: mean tokens; `spread` is the deviation of their logarithm, 0 for all alike.
        shared: tokens of a prompt that may be shared. A share `sharing` of the requests begins with one of
            `prefixes` texts of that length, the n-th of which is asked for as often as n^-skew.
        copying: share of the requests whose text is of kind 1.
    """

    rate: float
    seconds: float
    prompt: int = 1024
    output: int = 256
    spread: float = 0.6
    shared: int = 0
    sharing: float = 1.0
    prefixes: int = 1
    skew: float = 0.8
    copying: float = 0.0
    shape: str = "poisson"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape={self.shape!r} is none of {', '.join(SHAPES)}.")
        if not 0 <= self.shared < self.prompt:
            raise ValueError(f"shared={self.shared} must be less than the prompt of {self.prompt} tokens.")

    def requests(self, seed: int = 0) -> list[Request]:
        """All of them, by arrival."""
        draw = random.Random(seed)
        total = list(accumulate(n**-self.skew for n in range(1, self.prefixes + 1)))
        found = []
        for at in self._times(draw):
            prefix, shared = NO_PREFIX, 0
            if self.shared and draw.random() < self.sharing:
                prefix = min(bisect(total, draw.random() * total[-1]), self.prefixes - 1)
                shared = self.shared
            own = self._length(draw, self.prompt - self.shared)
            output, kind = self._length(draw, self.output), int(draw.random() < self.copying)
            rest = self.shared - shared  # who shares nothing has as long a prompt
            found.append(Request(at, prefix, shared, shared + rest + own, output, kind))
        return found

    def _length(self, draw: random.Random, mean: int) -> int:
        if not self.spread:
            return mean
        length = draw.lognormvariate(math.log(mean) - self.spread**2 / 2, self.spread)
        return min(max(round(length), 1), LONGEST * mean)

    def _times(self, draw: random.Random) -> Iterator[float]:
        """Thinned from those at the highest rate."""
        most = {"poisson": 1.0, "day": 1 + SWING, "bursts": BURST}[self.shape]
        at = draw.expovariate(self.rate * most)
        while at < self.seconds:
            if draw.random() * most < self.relative(at):
                yield at
            at += draw.expovariate(self.rate * most)

    def relative(self, at: float) -> float:
        """The rate at a time, as a multiple of its mean. A day begins at its quietest hour."""
        if self.shape == "day":
            return 1 - SWING * math.cos(2 * math.pi * at / self.seconds)
        if self.shape == "bursts":
            return BURST if at % EVERY < LASTS else QUIET
        return 1.0
