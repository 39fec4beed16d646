"""Why a step verified as many guesses as it did: a policy that watches another one.

What the other decides is not changed. Beside it is kept what each number of drafts promised, in tokens per
ms: for all rows of the step together, as that is what is weighed; the row's own number is varied and those
of the others are as they were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ...drafters.costs import StepCosts
from ...drafters.policy import AutoPolicy, Policy

Rates = dict[int, float]  # tokens per ms, by the row's number of drafts


@dataclass
class Weighed:
    """What was weighed for a step.

    Attributes:
        ms, plain_ms: what it takes as it is, and without drafts, as steps were timed at the start.
        common: rates for all rows, where they share one K.
        by_row: rates by request row, where they do not.
        probes: rows that got drafts, or more of them, only to learn what they are worth.
    """

    ms: float
    plain_ms: float
    common: Rates = field(default_factory=dict)
    by_row: dict[int, Rates] = field(default_factory=dict)
    probes: set[int] = field(default_factory=set)

    def rates(self, row: int) -> Rates:
        return self.by_row.get(row, self.common)


class WatchedPolicy(Policy):
    """Decides what `inner` does, and keeps in `weighed` what it had to choose from in the latest step."""

    def __init__(self, inner: Policy, costs: StepCosts) -> None:
        """`costs`: measured, whether or not `inner` needs them."""
        self.inner = inner
        self.costs: StepCosts = costs
        self.weighed = Weighed(1.0, 1.0)
        self._context = 0

    @property
    def is_auto(self) -> bool:
        return isinstance(self.inner, AutoPolicy)

    def choose(
        self, rows: Sequence[int], limits: Sequence[int], context: int = 0, queue: bool = True
    ) -> int:
        k = self.inner.choose(rows, limits, context, queue)
        self._context = context
        B = len(rows)
        plain = ms = self.costs.cost(B, B, context)
        if self.costs.captured:
            ms = max(ms for j, ms in self.costs.by_k(B).items() if j <= k)
        self.weighed = Weighed(ms, plain)
        if self.costs.captured and isinstance(self.inner, AutoPolicy):
            self.weighed.common = dict(self.inner.rates)
            self.weighed.probes = {row for row in rows if k and self.inner.probes(row)}
        return k

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        n = self.inner.passes(rows, others, most)
        if isinstance(self.inner, AutoPolicy):
            self.weighed.common = dict(self.inner.rates)
        return n

    def cut(
        self, rows: Sequence[int], drafter: Sequence[int], num_drafts: Sequence[int],
        match_len: Sequence[int],
    ) -> list[int]:  # fmt: skip
        taken = self.inner.cut(rows, drafter, num_drafts, match_len)
        B = len(rows)
        self.weighed.ms = self.costs.cost(B, B + sum(taken), self._context)
        if not isinstance(self.inner, AutoPolicy):
            return taken
        estimates = [self.inner.estimator.chances(row, (d, n)) for row, d, n in zip(rows, drafter, match_len)]
        hopes = [_hopes(*of_row, n) for of_row, n in zip(estimates, num_drafts)]
        total = B + sum(hope[n] for hope, n in zip(hopes, taken))
        tokens = B + sum(taken)
        for row, hope, n in zip(rows, hopes, taken):
            if len(hope) > 1:
                self.weighed.by_row[row] = {
                    j: (total - hope[n] + more) / self.costs.cost(B, tokens - n + j, self._context)
                    for j, more in enumerate(hope)
                }
        probed = (row for row, d, n in zip(rows, drafter, taken) if n and self.inner.probes(row, d))
        self.weighed.probes = set(probed)
        return taken

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        self.inner.observe(row, drafter, match_len, drafted, accepted)

    def reset(self, row: int) -> None:
        self.inner.reset(row)


def _hopes(first: float, further: float, most: int) -> list[float]:
    """How many of a row's first n drafts are right by expectation, for n = 0 .. `most`."""
    return list(accumulate((first * further**i for i in range(most)), initial=0.0))
