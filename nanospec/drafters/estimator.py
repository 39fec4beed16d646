"""How likely drafts are right.

Text alternates between what drafters do not find and stretches that they copy, so what a step gives depends
on the one before. A row's first draft is right with probability `miss` after a step that was not accepted
in full, and with probability `full` after one that was; every further draft is right with probability `on`
after a right one. The three are counted with decay for each row and drafter, and mixed with those of all
rows in the same *situation*: the drafter and the length of its match, or UNKNOWN while there are no drafts
yet (then a row that gets none counts as a wrong one).

The three make a chain of two states, whose long run is a row's tokens per step. A small K so gets its due:
the drafts that it leaves are right in the next step too. Counting only what is accepted within a step takes
too large a K and up to 15 % longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat

from ..kernels.codes import NOBODY

DECAY, COMMON_DECAY = 0.9, 0.995  # weight of the past at each observation: of a row, of all rows
# How many of a row's own trials the common record counts for: first drafts in the situation UNKNOWN and in
# others, which tell more than the row does, and further drafts.
PRIOR_BEFORE, PRIOR_AFTER, PRIOR_ON = 4.0, 12.0, 16.0
COARSE, FINE = 64, 256  # miss and full, on are rounded to such parts: small hopes to 0, few curves to compute

Situation = tuple[int, int]  # drafter, length of its match (0 for a model)
UNKNOWN = (NOBODY, 0)
Chances = tuple[float, float, float]  # miss, full, on


@dataclass(slots=True)
class _Rate:
    """How often something was right, with decay."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: int, tried: int, decay: float) -> None:
        self.right = self.right * decay + right
        self.tried = self.tried * decay + tried

    def over(self, prior: _Rate, weight: float, parts: int) -> float:
        """The rate, with `prior`'s counted as so many trials, rounded to 1 / `parts`."""
        rate = (self.right + weight * prior.right / prior.tried) / (self.tried + weight)
        return round(rate * parts) / parts


@dataclass(slots=True)
class _Record:
    """What is known of the drafts of a row, or of all rows."""

    miss: _Rate = field(default_factory=_Rate)
    full: _Rate = field(default_factory=_Rate)
    on: _Rate = field(default_factory=_Rate)
    weight: float = 0.0  # of a common record: how many of a row's first drafts it counts for
    chances: Chances | None = None  # of a row when it was last observed, without a match

    def add(self, copying: bool, drafted: int, accepted: int, decay: float) -> None:
        (self.full if copying else self.miss).add(accepted > 0, 1, decay)
        if accepted and drafted > 1:
            self.on.add(accepted - 1, min(accepted, drafted - 1), decay)

    def over(self, common: _Record) -> Chances:
        """The chances of a row with this record, those of all rows mixed in."""
        miss = self.miss.over(common.miss, common.weight, COARSE)
        full = self.full.over(common.full, common.weight, COARSE)
        return miss, full, self.on.over(common.on, PRIOR_ON, FINE)


class Estimator:
    """How likely drafts are right; see the module docstring."""

    def __init__(self) -> None:
        self._common = {UNKNOWN: _Record(_Rate(1, 2), _Rate(3, 4), _Rate(3, 4), PRIOR_BEFORE)}
        self._own: defaultdict[tuple[int, int], _Record] = defaultdict(_Record)  # by row and drafter
        self._copying: set[int] = set()  # rows whose last step was accepted in full

    def chances(self, row: int, situation: Situation) -> tuple[float, float]:
        """Of the row's first draft in this step, and of every further one after a right one."""
        own, common = self._own[row, situation[0]], self._of_all(situation)
        if row in self._copying:
            first = own.full.over(common.full, common.weight, COARSE)
        else:
            first = own.miss.over(common.miss, common.weight, COARSE)
        return first, own.on.over(common.on, PRIOR_ON, FINE)

    def of_drafts(self, row: int, situation: Situation, n: int, least: float) -> list[float]:
        """Of the first n drafts of a row: that each and all before it are right, down to `least`."""
        (gain, on), gains = self.chances(row, situation), list[float]()
        while len(gains) < n and gain >= least:
            gains.append(gain)
            gain *= on
        return gains

    def tokens(
        self, rows: Sequence[int], limits: Sequence[int], situation: Situation, ks: tuple[int, ...]
    ) -> list[float]:
        """What all rows together give per step, for each K."""
        drafter, own, new = situation[0], self._own, _Record().over(self._of_all(situation))
        chances = [own[row, drafter].chances or new for row in rows]
        return [sum(tokens) for tokens in zip(*map(tokens_per_step, chances, repeat(ks), limits))]

    def observe(self, row: int, situation: Situation, drafted: int, accepted: int) -> None:
        own, common, copying = self._own[row, situation[0]], self._of_all(situation), row in self._copying
        own.add(copying, drafted, accepted, DECAY)
        common.add(copying, drafted, accepted, COMMON_DECAY)
        if not situation[1]:  # of others nobody asks for `tokens`
            own.chances = own.over(common)
        (self._copying.add if 0 < drafted == accepted else self._copying.discard)(row)

    def reset(self, row: int) -> None:
        self._copying.discard(row)
        for key in [key for key in self._own if key[0] == row]:
            del self._own[key]

    def _of_all(self, situation: Situation) -> _Record:
        if situation not in self._common:
            n = situation[1]  # a priori n tokens go on with (n + 1) / (n + 2); accepted drafts make them more
            first, further = _Rate((n + 1) / (n + 2), 1), (n + 3) / (n + 4)
            self._common[situation] = _Record(first, _Rate(further, 1), _Rate(further, 1), PRIOR_AFTER)
        return self._common[situation]


@lru_cache(maxsize=1 << 16)
def tokens_per_step(chances: Chances, ks: tuple[int, ...], limit: int) -> tuple[float, ...]:
    """A row's tokens per step in the long run for each K, of which it drafts at most `limit`."""
    miss, full, on = chances

    def tokens(k: int) -> float:
        stay = on ** (k - 1) if k else 0.0  # a step goes on to be accepted in full
        share = miss * stay / (1 - full * stay + miss * stay) if miss else 0.0  # of steps after full ones
        run = k if on == 1 else (1 - on**k) / (1 - on)
        return 1 + ((1 - share) * miss + share * full) * run

    return tuple(tokens(min(k, limit)) for k in ks)
