"""How many of the proposed drafts to verify.

A step should emit as many tokens per ms as possible:

    (1 per request + sum over the drafts taken of P(the draft and all before it are accepted))
      / cost of a step that scores so many tokens (ms)

The probability of a request's j-th draft is a^j, with the acceptance `a` estimated per request from
its recent drafts; for n-gram lookup also by match length, shared by all requests, since long matches
are right far more often. The cost comes from a table measured on this machine. A request whose drafts
keep failing ends at zero drafts; now and then it gets one as a probe, so that text that becomes
repetitive is noticed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .kernels.ngram import Proposal


class Policy(Protocol):
    """Decides how many drafts are verified: at most `choose` in the whole step, before there are any;
    then, in packed steps, `limit` of those proposed for each row."""

    def choose(self, rows: list[int], most: int) -> int:
        """K of the next step of these rows, at most `most`."""
        ...

    def limit(self, rows: Tensor, proposal: Proposal) -> Tensor:
        """[B] int32, at most `proposal.num_drafts`."""
        ...

    def observe(self, row: int, match_len: int, drafted: int, accepted: int) -> None:
        """Learn from one row of a step."""
        ...

    def reset(self, row: int) -> None:
        """A new request took the row."""
        ...


class FixedPolicy:
    """Verify whatever was proposed: a fixed K."""

    def choose(self, rows: list[int], most: int) -> int:
        return most

    def limit(self, rows: Tensor, proposal: Proposal) -> Tensor:
        return proposal.num_drafts

    def observe(self, row: int, match_len: int, drafted: int, accepted: int) -> None:
        pass

    def reset(self, row: int) -> None:
        pass


@dataclass
class CostTable:
    """Milliseconds of a step by the number of tokens it scores, in ascending order of tokens."""

    tokens: list[int]
    ms: list[float]

    def __post_init__(self) -> None:
        for i in range(1, len(self.ms)):  # more tokens never cost less: smooth measurement noise away
            self.ms[i] = max(self.ms[i], self.ms[i - 1])

    def step(self, tokens: int) -> float:
        """ms of a step of `tokens` tokens, interpolated."""
        i = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        slope = (self.ms[i] - self.ms[i - 1]) / (self.tokens[i] - self.tokens[i - 1])
        return self.ms[i - 1] + (tokens - self.tokens[i - 1]) * slope


@dataclass
class _Estimate:
    """Acceptance of a draft given that those before it were accepted, with decay."""

    accepted: float
    tried: float

    def add(self, tried: int, accepted: int, decay: float) -> None:
        self.accepted = self.accepted * decay + accepted
        self.tried = self.tried * decay + tried

    @property
    def value(self) -> float:
        return self.accepted / self.tried


@dataclass
class AutoPolicy:
    """Chooses per row and step; see the module docstring.

    Attributes:
        cost: measured step times.
        max_match: longest n-gram match.
        decay: weight of a request's past per draft tried.
        prior: how many drafts the record shared by match length counts for in a request's own. The match
            length tells more than the request does.
        probe_every: a row at zero drafts gets one draft after this many matches, if that keeps within
        probe_budget: the share of the time that may go into such drafts.
    """

    cost: CostTable
    max_match: int
    decay: float = 0.97
    prior: float = 12.0
    probe_every: int = 4
    probe_budget: float = 0.01
    _by_row: dict[int, _Estimate] = field(default_factory=dict)
    _by_match: list[_Estimate] = field(default_factory=list)
    _skipped: dict[int, int] = field(default_factory=dict)
    _credit: float = 0.0  # ms that may go into probes

    def __post_init__(self) -> None:
        # A priori a match of n tokens continues with probability (n + 1) / (n + 2).
        self._by_match = [_Estimate(n + 1.0, n + 2.0) for n in range(self.max_match + 1)]

    def choose(self, rows: list[int], most: int) -> int:
        return most

    def acceptance(self, row: int, match_len: int) -> float:
        """Estimated probability that a draft is accepted, given that those before it were."""
        shared, own = self._by_match[match_len], self._by_row.get(row)
        if own is None:
            return shared.value
        return (own.accepted + self.prior * shared.value) / (own.tried + self.prior)

    def limit(self, rows: Tensor, proposal: Proposal) -> Tensor:
        drafts = proposal.num_drafts.tolist()
        if not any(drafts):
            return proposal.num_drafts
        names, matches = rows.tolist(), proposal.match_len.tolist()
        chances = [self.acceptance(r, m) for r, m in zip(names, matches, strict=True)]
        # Whatever their number, the best drafts are those likeliest to be accepted.
        gains = [(a**j, b) for b, a in enumerate(chances) for j in range(1, drafts[b] + 1)]
        gains.sort(reverse=True)
        expected, best, number = float(len(names)), 0.0, 0
        for n, gain in enumerate([0.0, *(gain for gain, _ in gains)]):
            expected += gain
            rate = expected / self.cost.step(len(names) + n)
            if rate > best:
                best, number = rate, n
        taken = [0] * len(names)
        for _, b in gains[:number]:
            taken[b] += 1
        self._probe([b for b in range(len(names)) if drafts[b] and not taken[b]], names, taken)
        return torch.tensor(taken, dtype=torch.int32, device=rows.device)

    def _probe(self, skipped: list[int], names: list[int], taken: list[int]) -> None:
        """Give a draft to those that went without one for longest, as far as the budget reaches."""
        scored = len(names) + sum(taken)
        step = self.cost.step(scored)
        self._credit = min(self._credit + self.probe_budget * step, step)
        for b in skipped:
            self._skipped[names[b]] = self._skipped.get(names[b], 0) + 1
        for b in sorted(skipped, key=lambda b: -self._skipped[names[b]]):
            price = self.cost.step(scored + 1) - self.cost.step(scored)
            if self._skipped[names[b]] < self.probe_every or price > self._credit:
                break
            taken[b] = 1
            self._skipped[names[b]] = 0
            self._credit -= price
            scored += 1

    def observe(self, row: int, match_len: int, drafted: int, accepted: int) -> None:
        if drafted:
            tried = min(accepted + 1, drafted)
            own = self._by_row.setdefault(row, _Estimate(0.0, 0.0))
            own.add(tried, accepted, self.decay**tried)
            self._by_match[match_len].add(tried, accepted, 0.99)

    def reset(self, row: int) -> None:
        self._by_row.pop(row, None)
        self._skipped.pop(row, None)
