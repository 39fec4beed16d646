"""How many drafts to verify: as many as give the most tokens per ms, none being one of the choices.

    tokens that a step will give, estimated  /  ms that it takes, measured

Steps come in two forms. A *recorded* step has one K for all its rows, and every row pays for K + 1 tokens:
`choose` picks K before there are drafts. In a *packed* step rows pay for what they verify, so everything
is proposed and `cut` picks row by row, knowing who guessed and how long the match was. Only a model's
guesses cost time, so for how many it is run is picked beforehand, in `passes`, just as K is.

**Estimate.** Text alternates between what drafters do not find and stretches that they copy, so what a step
gives depends on the one before. A row's first draft is right with probability `miss` after a step that was
not accepted in full, and with probability `full` after one that was; every further draft is right with
probability `on` after a right one. The three are counted for each row and drafter, with decay, and mixed
with what all rows have in common *in the same situation*: drafter and length of the match, or, before there
are drafts, the situation UNKNOWN, in which a row without drafts counts as a wrong one.

**Value of K.** The three make a chain of two states, whose long run is a row's tokens per step. A small K so
gets its due: the drafts that it leaves are right in the next step too. Counting only what is accepted
within a step takes too large a K and up to 15 % longer.

**Probes.** What is not drafted teaches nothing. So now and then a step takes a few drafts more than seem to
pay, as often as that costs `probe_budget` of the time. If there were none, accepted ones pay for the next
probe, so that text that becomes repetitive is noticed at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from .kernels.codes import NOBODY

FINE, COARSE = 256, 64  # estimates are rounded to such fractions, so that each curve is computed once
UNKNOWN = (NOBODY, 0)  # the situation before there are drafts; others are (drafter, length of the match)


class StepCosts:
    """Measured ms of a step, smoothed: more rows or tokens never cost less.

    Attributes:
        recorded: ms by captured batch size and K, both ascending. Every batch size has K = 0; larger K may
            be missing where they cannot pay. Empty if steps are packed.
        packed: ms by number of tokens scored, ascending.
        propose: (rows, passes) -> ms that running a model takes; lookup takes none.
    """

    def __init__(
        self,
        recorded: Mapping[int, Mapping[int, float]] | None = None,
        packed: Mapping[int, float] | None = None,
        propose: Callable[[int, int], float] = lambda rows, passes: 0.0,
    ) -> None:
        recorded, packed = recorded or {}, packed or {}
        if bool(recorded) == bool(packed) or any(0 not in by_k for by_k in recorded.values()):
            raise ValueError("Needed are times of either packed or recorded steps, of K=0 for every batch.")
        self.recorded: dict[int, dict[int, float]] = {}
        least: dict[int, float] = {}  # by K, from smaller batches
        for size in sorted(recorded):
            by_k = {k: max(recorded[size][k], least.get(k, 0.0)) for k in sorted(recorded[size])}
            self.recorded[size] = dict(zip(by_k, accumulate(by_k.values(), max)))
            least |= self.recorded[size]
        tokens = sorted(packed)
        self.packed = dict(zip(tokens, accumulate((packed[n] for n in tokens), max)))
        self.propose = propose
        self._sizes, self._tokens, self._ms = list(self.recorded), tokens, list(self.packed.values())

    def report(self) -> dict[str, object]:
        """The times, ready for JSON."""
        if self.recorded:
            return {"step_ms_by_batch_and_k": self.recorded}
        return {"step_ms_by_tokens": self.packed}

    def of_one_row(self) -> dict[int, float]:
        """ms of a step of one row, by the tokens that it scores."""
        return {k + 1: ms for k, ms in self.by_k(1).items()} if self.recorded else self.packed

    def by_k(self, batch: int) -> dict[int, float]:
        """ms by K of a recorded step, in the smallest captured batch that holds so many rows."""
        i = bisect_left(self._sizes, batch)
        if i == len(self._sizes):
            raise ValueError(f"A batch of {batch} exceeds the largest captured one, {self._sizes[-1]}.")
        return self.recorded[self._sizes[i]]

    def cost(self, batch: int, tokens: int) -> float:
        """ms of a step that scores so many tokens of so many rows: K + 1 of each in a recorded one."""
        if self.recorded:
            return self.by_k(batch)[tokens // batch - 1]
        n, ms = self._tokens, self._ms
        i = min(max(bisect_left(n, tokens), 1), len(n) - 1)
        return ms[i - 1] + (tokens - n[i - 1]) * (ms[i] - ms[i - 1]) / (n[i] - n[i - 1])


class Policy:
    """A fixed K: whatever is proposed is verified."""

    costs: StepCosts | None = None  # nothing was measured

    def choose(self, rows: Sequence[int], limits: Sequence[int]) -> int:
        """K of the next step of these request rows, of which each may have so many drafts."""
        return max(limits)

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        """Packed steps: for how many drafts, at most `most`, a model is run in a step of these rows, which
        may draft, and `others` that may not."""
        return most

    def cut(
        self, rows: Sequence[int], drafter: Sequence[int], num_drafts: list[int], match_len: Sequence[int]
    ) -> list[int]:
        """Packed steps: how many of each row's drafts are verified. All of the arguments are by row."""
        return num_drafts

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        """Learn from a row of a step with K > 0."""

    def reset(self, row: int) -> None:
        """A new request took the row."""


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
    """What is known of the drafts of a row, or of all rows; see the module docstring."""

    __slots__ = ("first", "on", "rates")

    def __init__(self, miss: _Rate, full: _Rate, on: _Rate) -> None:
        self.first, self.on = (miss, full), on
        self.rates = (0, 0, 0)  # of a row: mixed with the common ones and rounded

    def add(self, copying: bool, drafted: int, accepted: int, decay: float) -> None:
        self.first[copying].add(accepted > 0, 1, decay)
        if accepted and drafted > 1:
            self.on.add(accepted - 1, min(accepted, drafted - 1), decay)


@lru_cache(maxsize=1 << 16)
def tokens_per_step(rates: tuple[int, int, int], ks: tuple[int, ...], limit: int) -> tuple[float, ...]:
    """A row's tokens per step for each K, of which it takes at most `limit`; `miss` and `full` in units of
    1 / COARSE, `on` of 1 / FINE."""
    miss, full, on = rates[0] / COARSE, rates[1] / COARSE, rates[2] / FINE
    curve = []
    for k in (min(k, limit) for k in ks):
        if not k:
            curve.append(1.0)
            continue
        stay = on ** (k - 1)  # a step goes on to be accepted in full
        share = miss * stay / (1 - full * stay + miss * stay) if miss else 0.0  # of steps after full ones
        run = k if on == 1 else (1 - on**k) / (1 - on)
        curve.append(1 + ((1 - share) * miss + share * full) * run)
    return tuple(curve)


@dataclass
class AutoPolicy(Policy):
    """See the module docstring.

    Attributes:
        costs: of the steps.
        model: the drafter that `passes` is about.
        decay: weight of a row's past at each of its observations; of the common one, `common_decay`.
        prior: how many steps the common record counts for in a row's own, and how many drafts in `on`.
        probe_budget: share of the time that may go into probes.
        margin: another K must promise so much more than the one in use (no flutter between equals).
    """

    costs: StepCosts
    model: int = NOBODY
    decay: float = 0.9
    common_decay: float = 0.995
    prior: tuple[float, float] = (4.0, 16.0)
    probe_budget: float = 0.005
    margin: float = 0.002
    _common: dict[tuple[int, int], _Record] = field(default_factory=dict)  # by situation
    _own: dict[tuple[int, int], _Record] = field(default_factory=dict)  # by row and drafter
    _copying: set[int] = field(default_factory=set)  # rows whose last step was accepted in full
    _best: int = 0  # what `_pick` found, without the probe
    _probing: bool = False  # it took more
    _probed: set[int] = field(default_factory=set)  # rows that draft as a probe only
    _turn: int = 0  # the request row that `cut` probes next, or one after it
    _plain_ms: float = 0.0  # of a step without drafts
    _token_ms: float = 0.0  # of one of its tokens
    _credit: float = 0.0  # ms that may go into probes

    def choose(self, rows: Sequence[int], limits: Sequence[int]) -> int:
        B, most = len(rows), max(limits)
        self._plain_ms = self.costs.cost(B, B)
        self._token_ms = self._plain_ms / B
        self._credit += self.probe_budget * self._plain_ms
        if not self.costs.recorded:
            return most
        ms = {k: ms for k, ms in self.costs.by_k(B).items() if k <= most}
        return self._pick(rows, limits, UNKNOWN, ms)

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        B, every, costs = len(rows), len(rows) + others, self.costs
        ms = {k: costs.cost(every, every + B * k) + costs.propose(B, k) for k in range(most + 1)}
        return self._pick([*rows, *[NOBODY] * others], [most] * B + [0] * others, (self.model, 0), ms)

    def _pick(
        self, rows: Sequence[int], limits: Sequence[int], situation: tuple[int, int], ms: Mapping[int, float]
    ) -> int:
        """Of the K that `ms` has times of, the one that promises most; or the next larger one, as a probe."""
        ks, common, curves = tuple(ms), self._in_common(situation), []
        new = self._mix(_new(), common)
        for row, limit in zip(rows, limits):
            own = self._own.get((row, situation[0]))
            curves.append(tokens_per_step(own.rates if own else new, ks, min(limit, ks[-1])))
        rate = {k: sum(tokens) / ms[k] for k, tokens in zip(ks, zip(*curves))}
        best = max(rate, key=rate.__getitem__)
        if self._best in rate and rate[best] < rate[self._best] * (1 + self.margin):
            best = self._best
        self._best = best
        larger = min((k for k in ks if k > best), default=best)
        self._probing = larger > best and self._affords(ms[larger] - ms[best])
        if self._probing and not best:
            self._probed.update(rows)
        return larger if self._probing else best

    def cut(
        self, rows: Sequence[int], drafter: Sequence[int], num_drafts: list[int], match_len: Sequence[int]
    ) -> list[int]:
        taken = [n if self._probing and d == self.model else 0 for n, d in zip(num_drafts, drafter)]
        gains = []  # (probability that a draft and all before it are right, its place in the batch)
        for b, row in enumerate(rows):
            if num_drafts[b] > taken[b]:
                right, on = self._chances(row, drafter[b], match_len[b])
                for _ in range(num_drafts[b]):
                    gains.append((right, b))
                    right *= on
        gains.sort(reverse=True)  # whatever their number, the best drafts are those likeliest to be accepted
        B, first = len(rows), len(rows) + sum(taken)
        tokens = accumulate((right for right, _ in gains), initial=float(first))
        rate = [t / self.costs.cost(B, first + n) for n, t in enumerate(tokens)]
        number = rate.index(max(rate))
        for _, b in gains[:number]:
            taken[b] += 1
        self._probe_row(rows, num_drafts, taken)
        return taken

    def _probe_row(self, rows: Sequence[int], num_drafts: Sequence[int], taken: list[int]) -> None:
        """Now and then give a draft more to a row that has one or none; two teach all there is to know."""
        few = [(row < self._turn, row, b) for b, row in enumerate(rows) if taken[b] < min(num_drafts[b], 2)]
        if few:
            _, row, b = min(few)
            tokens = len(rows) + sum(taken)
            cost = self.costs.cost
            if self._affords(cost(len(rows), tokens + 1) - cost(len(rows), tokens)):
                if not taken[b]:
                    self._probed.add(row)
                taken[b] += 1
                self._turn = row + 1

    def _affords(self, price: float) -> bool:
        """Whether a probe of `price` ms is paid for."""
        self._credit = min(self._credit, max(self._plain_ms, price))
        paid = price <= self._credit
        if paid:
            self._credit -= price
        return paid

    def _in_common(self, situation: tuple[int, int]) -> _Record:
        if situation not in self._common:  # a priori a match of n tokens goes on with (n + 1) / (n + 2)
            n = situation[1] + 1.0
            self._common[situation] = _Record(_Rate(n, n+1), _Rate(n,n+1), _Rate(n,n+1))
            if situation == UNKNOWN: self._common[situation] = _Record(_Rate(1,2), _Rate(3,4), _Rate(3,4))
        return self._common[situation]

    def _mix(self, own: _Record, common: _Record) -> tuple[int, int, int]:
        steps, drafts = self.prior
        miss, full = (o.over(c, steps) for o, c in zip(own.first, common.first))
        return round(miss * COARSE), round(full * COARSE), round(own.on.over(common.on, drafts) * FINE)

    def _chances(self, row: int, drafter: int, match_len: int) -> tuple[float, float]:
        """That a row's first draft is right, and every further one after a right one."""
        own, common = self._own.get((row, drafter)) or _new(), self._in_common((drafter, match_len))
        copying = row in self._copying
        first = own.first[copying].over(common.first[copying], self.prior[0])
        return first, own.on.over(common.on, self.prior[1])

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        situation = UNKNOWN if self.costs.recorded else (drafter, match_len)
        copying = row in self._copying
        if drafted or self.costs.recorded:
            own = self._own.setdefault((row, situation[0]), _new())
            own.add(copying, drafted, accepted, self.decay)
            common = self._in_common(situation)
            common.add(copying, drafted, accepted, self.common_decay)
            own.rates = self._mix(own, common)
        if copying != (0 < drafted == accepted):
            self._copying ^= {row}
        if row in self._probed:
            self._probed.remove(row)
            self._credit += accepted * self._token_ms

    def reset(self, row: int) -> None:
        for key in [key for key in self._own if key[0] == row]:
            del self._own[key]
        self._copying.discard(row)
        self._probed.discard(row)


def _new() -> _Record:
    return _Record(_Rate(), _Rate(), _Rate())
