"""Strategies that choose the number of verified drafts, and the loop that simulates them on traces.

A `Batch` of requests advances through its traces. A `Strategy` plans each step and learns from its result.
Each row costs as much as its own drafts; results of captured steps are known one step later. See
`simulate.py`.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.traces import MAX_DRAFTS, Trace
from nanospec.drafters.estimates import StepCosts
from nanospec.drafters.policy import AutoPolicy, Policy
from nanospec.kernels import NO_DRAFTER, RUNNING
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.report import RowReport
from nanospec.kernels.speculation.trim import Estimates, trim
from nanospec.kernels.table import Table

NGRAM = 0  # the only drafter


class Batch:
    """The running requests and their positions in their traces.

    Attributes:
        rows, traces, at: row, trace and position of each running request.
        waiting: whether more requests are waiting for a row.
    """

    waiting = True

    def __init__(self, source: Sequence[Trace], size: int, seed: int = 0) -> None:
        if not any(len(trace) for trace in source):
            raise ValueError("All traces are empty.")
        self._rng = random.Random(seed)
        self._requests = self._endless(source)
        self.rows = list(range(size))
        self.traces = [next(self._requests) for _ in self.rows]
        self.at = [self._rng.randrange(len(trace)) for trace in self.traces]  # staggered

    def _endless(self, source: Sequence[Trace]) -> Iterator[Trace]:
        while True:
            yield from self._rng.sample(source, len(source))

    def __len__(self) -> int:
        return len(self.traces)

    def match(self) -> list[int]:
        return [trace.match[at] for trace, at in zip(self.traces, self.at)]

    def offered(self, k: int = MAX_DRAFTS) -> list[int]:
        """Return the number of drafts that lookup proposes for each row, at most `k`."""
        return [trace.drafts(at, k) for trace, at in zip(self.traces, self.at)]

    def right(self) -> list[int]:
        """Return the number of these drafts that would be accepted, per row."""
        return [min(n, t.run[at]) for n, t, at in zip(self.offered(), self.traces, self.at)]

    def advance(self, emitted: Sequence[int]) -> list[int]:
        """Advance each row by its emitted tokens. Return the rows whose request finished and was replaced."""
        ended = []
        for b, count in enumerate(emitted):
            self.at[b] += count
            if self.at[b] >= len(self.traces[b]):
                self.traces[b], self.at[b] = next(self._requests), 0
                ended.append(b)
        return ended


class Wave(Batch):
    """Requests that start together. The row of a finished request stays empty, since none are waiting."""

    waiting = False

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.rows, self.traces, self.at = list(range(len(traces))), list(traces), [0] * len(traces)

    def advance(self, emitted: Sequence[int]) -> list[int]:
        found = zip(self.rows, self.traces, (at + n for at, n in zip(self.at, emitted)))
        left = [(row, trace, at) for row, trace, at in found if at < len(trace)]
        ended = [row for row in self.rows if all(row != other for other, _, _ in left)]
        self.rows, self.traces, self.at = ([one[i] for one in left] for i in range(3))  # type: ignore
        return ended


class Strategy(ABC):
    """Chooses the number of drafts that each row verifies."""

    @abstractmethod
    def plan(self, batch: Batch) -> tuple[list[int], float]:
        """Return the number of verified drafts per row, and the cost of the step in ms."""

    def observe(  # noqa: B027
        self, rows: list[int], drafted: list[int], accepted: list[int], ended: list[int]
    ) -> None:
        """Learn from the result of a step. Does nothing by default."""


def step_ms(costs: StepCosts, drafts: Sequence[int]) -> float:
    """Return the cost in ms of a step that verifies `drafts` per row."""
    return costs.cost(len(drafts), len(drafts) + sum(drafts))


@dataclass
class Fixed(Strategy):
    k: int
    costs: StepCosts

    def plan(self, batch: Batch) -> tuple[list[int], float]:
        drafts = batch.offered(self.k)
        return drafts, step_ms(self.costs, drafts)


class Auto(Strategy):
    def __init__(self, policy: Policy, costs: StepCosts) -> None:
        self.policy, self.costs = policy, costs
        self.lag = int(costs.captured)
        self.seen: list[tuple[dict[int, RowReport], list[int]]] = []

    def plan(self, batch: Batch) -> tuple[list[int], float]:
        limits = dict.fromkeys(batch.rows, MAX_DRAFTS)
        choice = self.policy.choose(limits, limits, 0, batch.waiting)
        self.k, self.match = choice.k, batch.match()
        self.offers = drafts = batch.offered(self.k)
        if self.k:
            drafts = verified(choice.estimates, drafts, self.match)
        return drafts, step_ms(self.costs, drafts)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int], ended: list[int]) -> None:
        drafter = (NGRAM if n else NO_DRAFTER for n in self.offers)
        columns = zip(rows, drafted, accepted, drafter, self.match, strict=True)
        reports = {row: RowReport([], n, right, by, m, RUNNING, []) for row, n, right, by, m in columns}
        self.seen.append((reports if self.k else {}, ended))
        if len(self.seen) > self.lag:
            reports, ended = self.seen.pop(0)
            self.policy.observe(reports)
            for row in ended:
                self.policy.reset(row)


def verified(estimates: Sequence[float], drafts: Sequence[int], match: Sequence[int]) -> list[int]:
    """Return how many of the `drafts` of each row the step verifies."""
    B = len(drafts)
    table = Table.empty(B, 2, 16, 1, "cpu")._replace(max_len=torch.full((B,), 1000, dtype=torch.int32))
    counts, lengths = torch.tensor([drafts, match], dtype=torch.int32)
    ids, rows = torch.zeros(B, MAX_DRAFTS, dtype=torch.int32), torch.arange(B, dtype=torch.int32)
    proposal = Proposal(ids, counts, ids, lengths, torch.zeros_like(counts))
    return (trim(table, rows, proposal, Estimates.of(torch.tensor(estimates), 1)) - 1).tolist()


def automatic(costs: StepCosts) -> Auto:
    return Auto(AutoPolicy(costs), costs)


@dataclass(frozen=True)
class Outcome:
    """The result of a run of one strategy."""

    tokens: int
    ms: float
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """The number of tokens per ms."""
        return self.tokens / self.ms


def simulate(source: Sequence[Trace], B: int, strategy: Strategy, tokens: int) -> Outcome:
    """Run B requests at once until `tokens` tokens are generated."""
    return run(Batch(source, B), strategy, tokens)


def last_done(source: Sequence[Trace], B: int, strategy: Strategy) -> float:
    """Return the ms to run all traces in waves of B requests, each until its last request has finished."""
    return sum(run(Wave(source[i : i + B]), strategy).ms for i in range(0, len(source), B))


def run(batch: Batch, strategy: Strategy, tokens: float = math.inf) -> Outcome:
    """Step until `tokens` tokens are generated or no request is running."""
    ms = 0.0
    out = steps = drafted = accepted = 0
    while batch.rows and out < tokens:
        right, count = batch.right(), len(batch)
        drafts, cost = strategy.plan(batch)
        taken = [min(a, b) for a, b in zip(drafts, right)]
        rows = batch.rows
        strategy.observe(rows, drafts, taken, batch.advance([n + 1 for n in taken]))
        out, steps, ms = out + count + sum(taken), steps + 1, ms + cost
        drafted, accepted = drafted + sum(drafts), accepted + sum(taken)
    return Outcome(out, ms, steps, drafted, accepted)
