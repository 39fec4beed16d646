"""How many drafts to verify: as many as promise the most tokens per ms, none being one of the choices.

Steps come in two forms. A *recorded* step has one K for all its rows, and each pays for K + 1 tokens:
`choose` takes K before there are drafts. In a *packed* step rows pay for what they verify, so all drafts
are made, and `cut` takes some of each row's, knowing who guessed and how long the match was. Only a model's
guesses cost time by themselves; for how many it is run is chosen beforehand, as K is (`passes`).

**Estimate.** Text alternates between what drafters do not find and stretches that they copy, so what a step
gives depends on the one before. A row's first draft is right with probability `miss` after a step that was
not accepted in full, and with probability `full` after one that was; every further draft is right with
probability `on` after a right one. The three are counted with decay for each row and drafter, and mixed with
those of all rows in the same *situation*: the drafter and the length of its match, or UNKNOWN while there
are no drafts yet (then a row that gets none counts as a wrong one).

**Value of K.** The three make a chain of two states, whose long run is a row's tokens per step. A small K so
gets its due: the drafts that it leaves are right in the next step too. Counting only what is accepted
within a step takes too large a K and up to 15 % longer.

**Probes.** What is not drafted teaches nothing. So now and then a step takes more drafts than seem to pay, as
often as that costs PROBE_BUDGET of the time. If a row had none, accepted ones pay for the next probe, so
that text that becomes repetitive is noticed at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, repeat

from .costs import StepCosts
from .kernels.codes import NOBODY

DECAY, COMMON_DECAY = 0.9, 0.995  # weight of the past at each observation: of a row, of all rows
# How many of a row's own trials the common record counts for: first drafts in the situation UNKNOWN and in
# others, which tell more than the row does, and further drafts.
PRIOR_BEFORE, PRIOR_AFTER, PRIOR_ON = 4.0, 12.0, 16.0
PROBE_BUDGET = 0.005  # share of the time that may go into probes
MOST_SAVED = 4.0  # steps without drafts that a probe may cost; one that costs more cannot pay
MARGIN = 0.002  # another K must promise so much more than the one in use: no flutter between equals
COARSE, FINE = 64, 256  # miss and full, on are rounded to such parts: small hopes to 0, few curves to compute

Situation = tuple[int, int]  # drafter, length of its match (0 for a model)
UNKNOWN = (NOBODY, 0)
Chances = tuple[float, float, float]  # miss, full, on


class Policy:
    """A fixed K: whatever is proposed is verified."""

    costs: StepCosts | None = None  # nothing has to be measured

    def choose(self, rows: Sequence[int], limits: Sequence[int]) -> int:
        """K of the next step of these request rows, which may have so many drafts each."""
        return max(limits)

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        """Packed steps: for how many drafts, at most `most`, a model is run in a step of these rows, which
        may draft, and `others` that may not."""
        return most

    def cut(
        self, rows: Sequence[int], drafter: Sequence[int], num_drafts: Sequence[int], match_len: Sequence[int]
    ) -> list[int]:
        """Packed steps: how many of each row's drafts to verify. Every argument is by row."""
        return list(num_drafts)

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        """Learn from a row of a step with K > 0, of which `drafted` drafts were verified."""

    def reset(self, row: int) -> None:
        """A new request took the row."""


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
    chances: Chances | None = None  # of a row when it was last observed

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
        miss, full, on = self._own[row, situation[0]].over(self._of_all(situation))
        return full if row in self._copying else miss, on

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


class AutoPolicy(Policy):
    """What pays, by estimate and measured cost; see the module docstring."""

    def __init__(self, costs: StepCosts, model: int = NOBODY) -> None:
        """`model`: the drafter that `passes` runs."""
        self.costs: StepCosts = costs
        self._model = model
        self.estimator = Estimator()
        self._best = 0  # what `_pick` found, without the probe
        self._probing = False  # it took more
        self._probed: set[int] = set()  # rows that draft as a probe only
        self._turn = 0  # rows are probed in turn
        self._token_ms = 0.0  # without drafts
        self._credit = 0.0  # ms that may go into probes

    def choose(self, rows: Sequence[int], limits: Sequence[int]) -> int:
        B, most = len(rows), max(limits)
        plain = self.costs.cost(B, B)
        self._token_ms = plain / B
        self._credit = min(self._credit + PROBE_BUDGET * plain, MOST_SAVED * plain)
        if not self.costs.recorded:
            return most
        k = self._pick(rows, limits, UNKNOWN, {k: ms for k, ms in self.costs.by_k(B).items() if k <= most})
        if k and not self._best:
            self._probed.update(rows)
        return k

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        B, running, costs = len(rows), len(rows) + others, self.costs
        ms = {k: costs.cost(running, running + B * k) + costs.propose(B, k) for k in range(most + 1)}
        return self._pick([*rows, *[NOBODY] * others], [most] * B + [0] * others, (self._model, 0), ms)

    def _pick(
        self, rows: Sequence[int], limits: Sequence[int], situation: Situation, ms: Mapping[int, float]
    ) -> int:
        """The K that promises most, of those with a time, or now and then the next larger one as a probe."""
        ks = tuple(ms)
        tokens = self.estimator.tokens(rows, limits, situation, ks)
        rate = {k: total / ms[k] for k, total in zip(ks, tokens)}
        best = max(rate, key=rate.__getitem__)
        if self._best in rate and rate[best] < rate[self._best] * (1 + MARGIN):
            best = self._best
        self._best = best
        larger = min((k for k in ks if k > best), default=best)
        self._probing = larger > best and self._affords(ms[larger] - ms[best])
        return larger if self._probing else best

    def cut(
        self, rows: Sequence[int], drafter: Sequence[int], num_drafts: Sequence[int], match_len: Sequence[int]
    ) -> list[int]:
        B, cost = len(rows), self.costs.cost
        taken = [n if self._probing and d == self._model else 0 for n, d in zip(num_drafts, drafter)]
        if not self._best:
            self._probed.update(row for row, n in zip(rows, taken) if n)
        gains: list[tuple[float, int]] = []  # probability that a draft and all before it are right; its row
        for b, row in enumerate(rows):
            if num_drafts[b] > taken[b]:
                first, on = self.estimator.chances(row, (drafter[b], match_len[b]))
                gains += [(first * on**j, b) for j in range(num_drafts[b])]
        gains.sort(reverse=True)  # whatever their number, the best drafts are those likeliest to be right
        least = B + sum(taken)
        totals = accumulate((gain for gain, _ in gains), initial=float(least))
        rate = [total / cost(B, least + n) for n, total in enumerate(totals)]
        number = rate.index(max(rate))
        for _, b in gains[:number]:
            taken[b] += 1
        idle = [b for b in range(B) if num_drafts[b] and not taken[b]]
        if idle and self._affords(cost(B, least + number + 1) - cost(B, least + number)):
            self._turn += 1
            b = idle[self._turn % len(idle)]
            taken[b] = 1
            self._probed.add(rows[b])
        return taken

    def _affords(self, ms: float) -> bool:
        """Whether the budget holds so much for a probe; takes it."""
        if ms > self._credit:
            return False
        self._credit -= ms
        return True

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        if drafted or self.costs.recorded:
            situation = UNKNOWN if self.costs.recorded else (drafter, match_len)
            self.estimator.observe(row, situation, drafted, accepted)
        if row in self._probed:
            self._probed.remove(row)
            self._credit += accepted * self._token_ms

    def reset(self, row: int) -> None:
        self.estimator.reset(row)
        self._probed.discard(row)
