"""How many drafts the whole batch verifies, when that is chosen before the drafts are known.

A captured step has one K for all its rows, and every row pays for K + 1 tokens whether it drafts or not
(`policy.py` chooses for each row instead, where rows pay for what they draft). The K taken promises the
most tokens per ms, K = 0 being one of them:

    sum over the rows of their tokens per step with K drafts  /  cost[batch][K] in ms

Text alternates between what lookup does not find and stretches that it copies, so what a step gives
depends on the one before. A row's first draft is there and right with probability `miss` after a step
that was not accepted in full, and with probability `full` after one that was; every further draft is
right with probability `on` after a right one. These make a chain of two states, whose long run is a
row's tokens per step. A small K so gets its due: the drafts that it leaves are right in the next step
too. Counting only what is accepted within a step takes too large a K and up to 15 % longer.

The three are estimated online for every row with decay, starting from what all rows have in common. A
row with nothing to copy neither asks for drafts nor keeps them from rows that gain by them. With K = 0
nothing would ever be learned, and with K = 1 little. So now and then a step takes the next larger K than
the best one, as often as that costs `probe_budget` of the time; drafts accepted by a probe pay for the
next one, so that text that becomes repetitive is noticed at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from torch import Tensor

from .kernels.speculation.proposal import Proposal

FINE, COARSE = 256, 64  # estimates are rounded to such fractions, so that each curve is computed once


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


class _Rate:
    """How often something was right, with decay."""

    __slots__ = ("right", "tried")

    def __init__(self, right: float = 0.0, tried: float = 0.0) -> None:
        self.right, self.tried = right, tried

    def add(self, right: int, tried: int, decay: float) -> None:
        self.right = self.right * decay + right
        self.tried = self.tried * decay + tried

    def over(self, prior: _Rate, weight: float) -> float:
        """The rate, with `prior`'s counted as so many trials."""
        return (self.right + weight * prior.right / prior.tried) / (self.tried + weight)


class _Record:
    """What is known of a row's drafts; the names are those of the module docstring."""

    __slots__ = ("copying", "full", "miss", "on", "rates")

    def __init__(self, miss: _Rate, full: _Rate, on: _Rate) -> None:
        self.miss, self.full, self.on = miss, full, on
        self.copying = False  # the last step was accepted in full
        self.rates = (0, 0, 0)  # in units of 1 / COARSE and 1 / FINE, the common record mixed in


@lru_cache(maxsize=1 << 16)
def tokens_per_step(rates: tuple[int, int, int], ks: tuple[int, ...]) -> tuple[float, ...]:
    """A row's tokens per step for each K; `miss` and `full` in units of 1 / COARSE, `on` of 1 / FINE."""
    miss, full, on = rates[0] / COARSE, rates[1] / COARSE, rates[2] / FINE
    curve = []
    for k in ks:
        if not k:
            curve.append(1.0)
            continue
        stay = on ** (k - 1)  # a step goes on to be accepted in full
        share = miss * stay / (1 - full * stay + miss * stay) if miss else 0.0  # of steps after full ones
        run = k if on == 1 else (1 - on**k) / (1 - on)
        curve.append(1 + ((1 - share) * miss + share * full) * run)
    return tuple(curve)


@dataclass
class BucketPolicy:
    """Chooses K for each step; see the module docstring.

    Attributes:
        costs: of the captured steps.
        decay: weight of a row's past at each of its observations; of the common one, 0.995.
        prior: how many steps the common record counts for in a row's own, and how many drafts in `on`.
        probe_budget: share of the time that may go into trying a larger K than seems best.
        margin: another K must promise so much more than the one in use (no flutter between equals).
    """

    costs: BucketCosts
    decay: float = 0.9
    prior: tuple[float, float] = (4.0, 16.0)
    probe_budget: float = 0.005
    margin: float = 0.002
    _shared: _Record = field(default_factory=lambda: _Record(_Rate(1, 2), _Rate(3, 4), _Rate(3, 4)))
    _rows: dict[int, _Record] = field(default_factory=dict)
    _best: int = 0
    _credit: float = 0.0  # ms that may go into probes
    _token_ms: float = 0.0  # ms per token without drafts

    def choose(self, rows: Sequence[int], most: int) -> int:
        """The captured K, at most `most`, of the next step of these request rows."""
        costs = {k: ms for k, ms in self.costs.of(len(rows)).items() if k <= most}
        ks, records, new = tuple(costs), self._rows, self._rates(_new())
        curves = [tokens_per_step(records[row].rates if row in records else new, ks) for row in rows]
        rate = {k: sum(tokens) / costs[k] for k, tokens in zip(ks, zip(*curves))}
        best = max(rate, key=rate.__getitem__)
        if self._best in rate and rate[best] < rate[self._best] * (1 + self.margin):
            best = self._best
        self._best, self._token_ms = best, costs[0] / len(rows)
        return self._probe(costs)

    def _rates(self, own: _Record) -> tuple[int, int, int]:
        shared, (steps, drafts) = self._shared, self.prior
        return (
            round(own.miss.over(shared.miss, steps) * COARSE),
            round(own.full.over(shared.full, steps) * COARSE),
            round(own.on.over(shared.on, drafts) * FINE),
        )

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

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        """A recorded step runs its model for every draft."""
        return most

    def limit(self, rows: Tensor, proposal: Proposal) -> Tensor:
        """Every draft is verified: its place is paid for."""
        return proposal.num_drafts

    def observe(self, row: int, match_len: int, drafted: int, accepted: int) -> None:
        """Learn from one row of a step with K > 0; one with K = 0 looks nothing up and tells nothing."""
        own = self._rows.setdefault(row, _new())
        for record, decay in ((own, self.decay), (self._shared, 0.995)):
            first = record.full if own.copying else record.miss
            first.add(accepted > 0, 1, decay)
            if accepted and drafted > 1:
                record.on.add(accepted - 1, min(accepted, drafted - 1), decay)
        own.copying = 0 < drafted == accepted
        own.rates = self._rates(own)
        if not self._best:
            self._credit += accepted * self._token_ms

    def reset(self, row: int) -> None:
        """A new request took the row."""
        self._rows.pop(row, None)


def _new() -> _Record:
    return _Record(_Rate(), _Rate(), _Rate())
