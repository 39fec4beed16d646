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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .costs import CostTable
from .kernels.speculation.proposal import Proposal


class Policy(Protocol):
    """Decides how many drafts are verified: at most `choose` in the whole step, before there are any;
    then, in packed steps, `limit` of those proposed for each row. There it also decides for how many of
    them a model is run, in `passes`."""

    def choose(self, rows: list[int], most: int) -> int:
        """K of the next step of these rows, at most `most`."""
        ...

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        """The most drafts a model may be run for in a step of these rows, which may draft, and `others`
        that may not; at most `most`."""
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

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        return most

    def limit(self, rows: Tensor, proposal: Proposal) -> Tensor:
        return proposal.num_drafts

    def observe(self, row: int, match_len: int, drafted: int, accepted: int) -> None:
        pass

    def reset(self, row: int) -> None:
        pass


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
        max_match: longest n-gram match. Drafts of models count as matches of length 0.
        propose_ms: (rows, passes) -> measured ms that running a model takes; 0 for n-gram lookup.
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
    propose_ms: Callable[[int, int], float] = lambda rows, passes: 0.0
    _by_row: dict[tuple[int, bool], _Estimate] = field(default_factory=dict)  # with and without a match
    _by_match: list[_Estimate] = field(default_factory=list)
    _skipped: dict[int, int] = field(default_factory=dict)
    _credit: float = 0.0  # ms that may go into probes
    _pass_credit: float = 0.0  # the same for running models
    _probing: bool = False  # a model runs in this step although it does not seem to pay

    def __post_init__(self) -> None:
        # A priori a match of n tokens continues with probability (n + 1) / (n + 2).
        self._by_match = [_Estimate(n + 1.0, n + 2.0) for n in range(self.max_match + 1)]

    def choose(self, rows: list[int], most: int) -> int:
        return most

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        """Guesses of a model cost time before anybody knows what they are worth: those are made that pay
        if every row takes them, or now and then one as a probe."""
        B, all_rows = len(rows), len(rows) + others
        plain = self.cost.step(all_rows)
        chances = [self.acceptance(row, 0) for row in rows]
        expected, best, number = float(all_rows), all_rows / plain, 0
        for k in range(1, most + 1):
            expected += sum(a**k for a in chances)
            rate = expected / (self.cost.step(all_rows + B * k) + self.propose_ms(B, k))
            if rate > best:
                best, number = rate, k
        self._probing = not number
        if number:
            return number
        price = self.cost.step(all_rows + B) + self.propose_ms(B, 1) - plain
        self._pass_credit = min(self._pass_credit + self.probe_budget * plain, max(plain, price))
        self._probing = price <= self._pass_credit
        if self._probing:
            self._pass_credit -= price
        return int(self._probing)

    def acceptance(self, row: int, match_len: int) -> float:
        """Estimated probability that a draft is accepted, given that those before it were."""
        shared, own = self._by_match[match_len], self._by_row.get((row, match_len > 0))
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
        if self._probing:  # it is paid for
            for b, match in enumerate(matches):
                taken[b] = max(taken[b], min(drafts[b], 1) if not match else 0)
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
            own = self._by_row.setdefault((row, match_len > 0), _Estimate(0.0, 0.0))
            own.add(tried, accepted, self.decay**tried)
            self._by_match[match_len].add(tried, accepted, 0.99)
            if self._probing and not match_len:  # what was right pays for the next probe
                self._pass_credit += accepted * self.cost.step(1)

    def reset(self, row: int) -> None:
        for matched in (False, True):
            self._by_row.pop((row, matched), None)
        self._skipped.pop(row, None)
