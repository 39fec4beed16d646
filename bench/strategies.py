"""Who decides how many drafts are verified, and the loop that runs them against traces.

A `Batch` of requests steps through its traces; a `Strategy` plans each step and learns from it. In packed
steps every row pays for its own drafts, in recorded ones all rows pay for K + 1 tokens and what a step
gave is known one step late; see `simulate.py`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.traces import MAX_DRAFTS, Trace
from nanospec.drafters.costs import StepCosts
from nanospec.drafters.policy import AutoPolicy, Policy
from nanospec.kernels.codes import NOBODY

NGRAM = 0  # the only drafter


class Batch:
    """The rows that run: each has a trace and a place in it."""

    def __init__(self, source: Sequence[Trace], size: int, seed: int = 0) -> None:
        if not any(len(trace) for trace in source):
            raise ValueError("There is no trace to run.")
        self._rng = random.Random(seed)
        self._requests = self._endless(source)
        self.traces = [next(self._requests) for _ in range(size)]
        self.at = [self._rng.randrange(len(trace)) for trace in self.traces]  # not in step

    def _endless(self, source: Sequence[Trace]) -> Iterator[Trace]:
        while True:
            yield from self._rng.sample(source, len(source))

    def __len__(self) -> int:
        return len(self.traces)

    def match(self) -> list[int]:
        return [trace.match[at] for trace, at in zip(self.traces, self.at)]

    def offered(self, k: int = MAX_DRAFTS) -> list[int]:
        """Drafts that lookup makes for each row when `k` are asked for."""
        return [trace.drafts(at, k) for trace, at in zip(self.traces, self.at)]

    def right(self) -> list[int]:
        """How many of them would be accepted."""
        return [min(n, t.run[at]) for n, t, at in zip(self.offered(), self.traces, self.at)]

    def advance(self, emitted: Sequence[int]) -> list[int]:
        """Returns the rows whose request ended, which the next one took."""
        ended = []
        for b, count in enumerate(emitted):
            self.at[b] += count
            if self.at[b] >= len(self.traces[b]):
                self.traces[b], self.at[b] = next(self._requests), 0
                ended.append(b)
        return ended


class Strategy(ABC):
    """How many drafts each row verifies, and what the step costs."""

    @abstractmethod
    def plan(self, batch: Batch) -> tuple[list[int], float]:
        """Drafts verified per row, and ms."""

    def observe(self, match: list[int], drafted: list[int], accepted: list[int], ended: list[int]) -> None:  # noqa: B027
        """What the step gave, by row. Not every strategy learns."""


def step_ms(costs: StepCosts, k: int, drafts: Sequence[int]) -> float:
    """What a step of speculation length `k` costs that verifies so many drafts of each row."""
    B = len(drafts)
    return costs.cost(B, B * (k + 1) if costs.captured else B + sum(drafts))


@dataclass
class Fixed(Strategy):
    k: int
    costs: StepCosts

    def plan(self, batch: Batch) -> tuple[list[int], float]:
        drafts = batch.offered(self.k)
        return drafts, step_ms(self.costs, self.k, drafts)


class Auto(Strategy):
    def __init__(self, policy: Policy, costs: StepCosts) -> None:
        self.policy, self.costs = policy, costs
        self.lag = int(bool(costs.captured))
        self.seen: list[tuple[int, list[int], list[int], list[int], list[int], list[int]]] = []
        self.k = 0
        self.drafter: list[int] = []

    def plan(self, batch: Batch) -> tuple[list[int], float]:
        rows = range(len(batch))
        self.k = self.policy.choose(rows, [MAX_DRAFTS] * len(batch))
        drafts = batch.offered(self.k)
        self.drafter = [NGRAM if n else NOBODY for n in drafts]
        if self.costs.packed:
            drafts = self.policy.cut(rows, self.drafter, drafts, batch.match())
        return drafts, step_ms(self.costs, self.k, drafts)

    def observe(self, match: list[int], drafted: list[int], accepted: list[int], ended: list[int]) -> None:
        self.seen.append((self.k, self.drafter, match, drafted, accepted, ended))
        if len(self.seen) > self.lag:
            k, *columns, ended = self.seen.pop(0)
            for row, seen in enumerate(zip(*columns, strict=True) if k else ()):
                self.policy.observe(row, *seen)
            for row in ended:
                self.policy.reset(row)


def automatic(costs: StepCosts) -> Auto:
    return Auto(AutoPolicy(costs), costs)


@dataclass
class Oracle(Strategy):
    """Knows which drafts are right, and verifies as many as pay at the rate (tokens per ms) that it
    achieves: of a packed step right ones only, of a recorded one as many for every row."""

    costs: StepCosts
    rate: float

    def plan(self, batch: Batch) -> tuple[list[int], float]:
        return (self._recorded if self.costs.captured else self._packed)(batch)

    def _packed(self, batch: Batch) -> tuple[list[int], float]:
        B, right = len(batch), batch.right()
        step = [self.costs.cost(B, B + n) for n in range(sum(right) + 1)]
        number = max(range(len(step)), key=lambda n: n - self.rate * step[n])
        drafts, left = [0] * B, number
        for b, n in enumerate(right):
            drafts[b] = min(n, left)
            left -= drafts[b]
        return drafts, step[number]

    def _recorded(self, batch: Batch) -> tuple[list[int], float]:
        right, ms = batch.right(), self.costs.by_k(len(batch))
        k = max(ms, key=lambda k: sum(min(n, k) for n in right) - self.rate * ms[k])
        return batch.offered(k), ms[k]


@dataclass(frozen=True)
class Outcome:
    """What a run of one strategy gave."""

    tokens: int
    ms: float
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per ms."""
        return self.tokens / self.ms


def simulate(source: Sequence[Trace], B: int, strategy: Strategy, tokens: int) -> Outcome:
    """Run B requests at once until so many tokens are out."""
    batch, ms = Batch(source, B), 0.0
    out = steps = drafted = accepted = 0
    while out < tokens:
        match, right = batch.match(), batch.right()
        drafts, cost = strategy.plan(batch)
        taken = [min(a, b) for a, b in zip(drafts, right)]
        strategy.observe(match, drafts, taken, batch.advance([n + 1 for n in taken]))
        out, steps, ms = out + B + sum(taken), steps + 1, ms + cost
        drafted, accepted = drafted + sum(drafts), accepted + sum(taken)
    return Outcome(out, ms, steps, drafted, accepted)
