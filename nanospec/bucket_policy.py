"""How many drafts the whole batch verifies, when that is chosen before the drafts are known.

A captured step has one K for all its rows, and every row pays for K + 1 tokens whether it drafts or not
(`policy.py` chooses for each row instead, where rows pay for what they draft). The K taken promises the
most tokens per ms, K = 0 being one of them:

    sum over the rows of their tokens per step with K drafts  /  cost[batch][K] in ms

A row's text alternates between what lookup does not find and stretches that it copies. Let a draft be
right with probability h after a miss (which includes that there is a draft at all), and with probability
c after a right one, also across steps. From one miss to the next the row then emits 1 + h / (1 - c)
tokens whatever K is, in 1 + h c^K / (1 - c^(K+1)) steps, as every K + 1 right tokens end a step; the
ratio is its tokens per step. A small K so gets its due: the drafts that it leaves are right in the next
step too. Counting the drafts accepted within a step instead takes too large a K and up to 15 % longer.

h and c are estimated online for every row with decay, starting from what all rows have in common. A row
with nothing to copy has h near 0 whatever the others do: it neither asks for drafts nor keeps them from
rows that gain by them. With K = 0 nothing would ever be learned, and with K = 1 little of c. So now and
then a step takes the next larger K than the best one, as often as that costs `probe_budget` of the time;
drafts accepted by a probe pay for the next one, so that text that becomes repetitive is noticed at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

STEPS = 256  # estimates are rounded to 1/256, so that each curve is computed once


class BucketCosts:
    """Measured ms of every captured (batch size, K), smoothed: more rows or drafts never cost less.

    Every batch size needs K = 0; larger K may be missing where they cannot pay.
    """

    def __init__(self, ms: Mapping[int, Mapping[int, float]]) -> None:
        if not ms or any(0 not in by_k for by_k in ms.values()):
            raise ValueError("Every captured batch size needs a time for K=0.")
        self.sizes = sorted(ms)
        self.ms: dict[int, dict[int, float]] = {}
        least: dict[int, float] = {}  # by K, from smaller batches
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


@dataclass(slots=True)
class _Record:
    """Decayed counts behind h (after a miss) and c (after a right draft)."""

    first_right: float = 0.0
    first_tried: float = 0.0
    next_right: float = 0.0
    next_tried: float = 0.0
    copying: bool = False  # all drafts of the last step were right
    rates: tuple[int, int] = (0, 0)  # h and c in units of 1 / STEPS, the common record mixed in

    def add_first(self, right: bool, decay: float) -> None:
        self.first_right = self.first_right * decay + right
        self.first_tried = self.first_tried * decay + 1.0

    def add_next(self, right: int, tried: int, decay: float) -> None:
        self.next_right = self.next_right * decay + right
        self.next_tried = self.next_tried * decay + tried


@lru_cache(maxsize=STEPS * STEPS)
def tokens_per_step(rates: tuple[int, int], ks: tuple[int, ...]) -> tuple[float, ...]:
    """A row's tokens per step for each K; h and c in units of 1 / STEPS, c below 1."""
    h, c = rates[0] / STEPS, rates[1] / STEPS
    return tuple((1 + h / (1 - c)) / (1 + h * c**k / (1 - c ** (k + 1))) for k in ks)


@dataclass
class BucketPolicy:
    """Chooses K for each step; see the module docstring.

    Attributes:
        costs: of the captured steps.
        decay: weight of a row's past at each of its observations; of the common one, 0.995.
        first_prior, next_prior: how many observations the common record counts for in a row's own h, c.
        probe_budget: share of the time that may go into trying a larger K than seems best.
        margin: another K must promise so much more than the one in use (no flutter between equals).
    """

    costs: BucketCosts
    decay: float = 0.9
    first_prior: float = 4.0
    next_prior: float = 16.0
    probe_budget: float = 0.005
    margin: float = 0.002
    _shared: _Record = field(default_factory=lambda: _Record(1.0, 2.0, 3.0, 4.0))
    _rows: dict[int, _Record] = field(default_factory=dict)
    _best: int = 0
    _credit: float = 0.0  # ms that may go into probes
    _token_ms: float = 0.0  # ms per token without drafts

    def choose(self, rows: Sequence[int], others: int = 0) -> int:
        """The K of the next step over these request rows and `others` that do not speculate."""
        costs = self.costs.of(len(rows) + others)
        ks, records, new = tuple(costs), self._rows, self._rates(_Record())
        curves = [tokens_per_step(records[row].rates if row in records else new, ks) for row in rows]
        tokens = map(sum, zip(*curves)) if curves else (0.0 for _ in ks)
        rate = {k: (n + others) / ms for (k, ms), n in zip(costs.items(), tokens)}
        best = max(rate, key=rate.__getitem__)
        if self._best in rate and rate[best] < rate[self._best] * (1 + self.margin):
            best = self._best
        self._best, self._token_ms = best, costs[0] / max(len(rows) + others, 1)
        return self._probe(costs)

    def _rates(self, own: _Record) -> tuple[int, int]:
        """h and c of a row with this record."""
        shared, a, b = self._shared, self.first_prior, self.next_prior
        h = (own.first_right + a * shared.first_right / shared.first_tried) / (own.first_tried + a)
        c = (own.next_right + b * shared.next_right / shared.next_tried) / (own.next_tried + b)
        return round(h * STEPS), min(round(c * STEPS), STEPS - 1)

    def _probe(self, costs: dict[int, float]) -> int:
        """The best K, or now and then the next larger one."""
        best = self._best
        self._credit = min(self._credit + self.probe_budget * costs[best], costs[best])
        larger = min((k for k in costs if k > best), default=best)
        extra = costs[larger] - costs[best]
        if larger == best or extra > self._credit:
            return best
        self._credit -= extra
        return larger

    def observe(self, row: int, match_len: int, drafted: int, accepted: int) -> None:
        """Learn from one row of a step with K > 0; one with K = 0 looks nothing up and tells nothing."""
        own = self._rows.setdefault(row, _Record())
        tried, right = min(accepted + 1, drafted), accepted
        if not (own.copying and drafted):  # the first draft comes after a miss
            own.add_first(right > 0, self.decay)
            self._shared.add_first(right > 0, 0.995)
            tried, right = max(tried - 1, 0), max(right - 1, 0)
        if tried:
            own.add_next(right, tried, self.decay)
            self._shared.add_next(right, tried, 0.995)
        own.copying = 0 < drafted == accepted
        own.rates = self._rates(own)
        if not self._best:
            self._credit += accepted * self._token_ms

    def reset(self, row: int) -> None:
        """A new request took the row."""
        self._rows.pop(row, None)
