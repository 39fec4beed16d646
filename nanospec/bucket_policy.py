"""How many drafts the whole batch verifies, when that is chosen before the drafts are known.

A captured step has one K for all its rows, and every row pays for K + 1 tokens whether it drafts or not
(`policy.py` chooses for each row instead, where rows pay for what they draft). The K taken is the one
that should emit the most tokens per ms:

    sum over the rows of 1 + h c^0 + h c^1 + ... + h c^(K-1)
    -------------------------------------------------------        over the captured K, 0 included
                    cost[batch][K] in ms

`h` is a row's *hit rate*: how often there is a first draft and it is right, which is match probability
times acceptance. `c` is how likely a draft is right after a right one. Both are estimated online for
every row with decay, starting from what all rows have in common. A row with nothing to copy has h near 0
whatever the others do, so it neither asks for drafts nor keeps them from rows that gain by them.

With K = 0 nothing would ever be learned, and with K = 1 nothing of c. So now and then a step takes the
next larger K than the best one: as often as that costs at most `probe_budget` of the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


class BucketCosts:
    """Measured ms of every captured (batch size, K), smoothed: more rows or drafts never cost less.

    Every batch size needs K = 0; further K may be missing where they cannot pay.
    """

    def __init__(self, ms: Mapping[int, Mapping[int, float]]) -> None:
        if not ms or any(0 not in by_k for by_k in ms.values()):
            raise ValueError("Every captured batch size needs a time for K=0.")
        self.sizes = sorted(ms)
        self.ms: dict[int, dict[int, float]] = {}
        least: dict[int, float] = {}  # by K, over smaller batches
        for size in self.sizes:
            ks = sorted(ms[size])
            rising = accumulate((max(ms[size][k], least.get(k, 0.0)) for k in ks), max)
            self.ms[size] = dict(zip(ks, rising))
            least |= self.ms[size]

    def of(self, batch: int) -> dict[int, float]:
        """ms by K, ascending, of the smallest captured batch that holds so many rows."""
        i = bisect_left(self.sizes, batch)
        if i == len(self.sizes):
            raise ValueError(f"A batch of {batch} exceeds the largest captured one, {self.sizes[-1]}.")
        return self.ms[self.sizes[i]]


@dataclass
class _Rates:
    """Decayed counts behind h and c: how often tried, how often right."""

    first_right: float = 0.0
    first_tried: float = 0.0
    later_right: float = 0.0
    later_tried: float = 0.0

    def add(self, drafted: int, accepted: int, decay: float) -> None:
        self.first_right = self.first_right * decay + (accepted > 0)
        self.first_tried = self.first_tried * decay + 1.0
        if accepted and drafted > 1:
            self.later_right = self.later_right * decay + (accepted - 1)
            self.later_tried = self.later_tried * decay + min(accepted, drafted - 1)


@dataclass
class BucketPolicy:
    """Chooses K for each step; see the module docstring.

    Attributes:
        costs: of the captured steps.
        decay: weight of a row's past at each of its observations.
        prior: how many observations the common record counts for in a row's own.
        probe_budget: share of the time that may go into trying a larger K than seems best.
        margin: another K must promise so much more than the one in use (no flutter between equals).
    """

    costs: BucketCosts
    decay: float = 0.9
    prior: float = 2.0
    probe_budget: float = 0.01
    margin: float = 0.005
    _shared: _Rates = field(default_factory=lambda: _Rates(1.0, 2.0, 3.0, 4.0))
    _rows: dict[int, _Rates] = field(default_factory=dict)
    _last: int = 0
    _credit: float = 0.0  # ms that may go into probes

    def rates(self, row: int) -> tuple[float, float]:
        """h and c of a request row; see the module docstring."""
        own, all_rows = self._rows.get(row), self._shared
        h = all_rows.first_right / all_rows.first_tried
        c = all_rows.later_right / all_rows.later_tried
        if own is None:
            return h, c
        h = (own.first_right + self.prior * h) / (own.first_tried + self.prior)
        c = (own.later_right + self.prior * c) / (own.later_tried + self.prior)
        return h, c

    def choose(self, rows: Sequence[int], others: int = 0) -> int:
        """The K of the next step over these request rows and `others` that do not speculate."""
        costs = self.costs.of(len(rows) + others)
        gain = [0.0] * (max(costs) + 1)  # gain[j]: expected rows whose j-th draft is accepted
        for row in rows:
            h, c = self.rates(row)
            for j in range(1, len(gain)):
                gain[j] += h
                h *= c
        tokens = list(accumulate(gain, initial=float(len(rows) + others)))[1:]
        rate = {k: tokens[k] / ms for k, ms in costs.items()}
        best = max(rate, key=rate.__getitem__)
        if self._last in rate and rate[best] < rate[self._last] * (1 + self.margin):
            best = self._last
        self._last = best
        return self._probe(best, costs)

    def _probe(self, best: int, costs: dict[int, float]) -> int:
        """`best`, or now and then the next larger K."""
        self._credit += self.probe_budget * costs[best]
        larger = min((k for k in costs if k > best), default=best)
        extra = costs[larger] - costs[best]
        if larger > best and extra <= self._credit:
            self._credit = 0.0
            return larger
        return best

    def observe(self, row: int, match_len: int, drafted: int, accepted: int) -> None:
        """Learn from one row of a step with K > 0; one with K = 0 looks nothing up and tells nothing."""
        self._rows.setdefault(row, _Rates()).add(drafted, accepted, self.decay)
        self._shared.add(drafted, accepted, 0.995)

    def reset(self, row: int) -> None:
        """A new request took the row."""
        self._rows.pop(row, None)
