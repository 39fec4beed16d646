"""How many drafts to verify: as many as promise the most tokens per ms, none being one of the choices.

Steps come in two forms. A *captured* step has one K for all its rows, and each pays for K + 1 tokens:
`choose` takes K before there are drafts. In a *packed* step rows pay for what they verify, so all drafts
are made, and `cut` takes some of each row's, knowing who guessed and how long the match was. Only a model's
guesses cost time by themselves; for how many it is run is chosen beforehand, as K is (`passes`).

Most tokens per ms is best where requests wait for a row: one that ends earlier makes room. Where none waits,
steps are made until the slowest row has ended, and what makes them longer for the sake of others is lost to
it. Then looked-up drafts may delay it by OTHERS_BUDGET, by estimate (in packed steps; captured ones have one
K for all, and a model's drafts are paid for before it is known whose they are).

What drafts promise is estimated from what became of earlier ones (`estimator.py`), and costs are measured
(`costs.py`). What is not drafted teaches nothing. So now and then a step takes more drafts than seem to pay,
as often as that costs PROBE_BUDGET of the time. If a row had none, accepted ones pay for the next probe, so
that text that becomes repetitive is noticed at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..kernels.codes import NOBODY
from .costs import StepCosts
from .estimator import UNKNOWN, Estimator, Situation

PROBE_BUDGET = 0.005  # share of the time that may go into probes
OTHERS_BUDGET = 0.005  # share of the time that the slowest row may lose to drafts of others
CAUTION = 0.75  # of what a row's end seems to save; it is a small difference of measured times
PROMISES_DECAY, ENOUGH = 0.98, 0.75  # for a row to be believed that its drafts keep what they promise
MOST_SAVED = 4.0  # steps without drafts that a probe may cost; one that costs more cannot pay
MARGIN = 0.002  # another K must promise so much more than the one in use: no flutter between equals


class Policy:
    """A fixed K: whatever is proposed is verified."""

    costs: StepCosts | None = None  # nothing has to be measured

    def choose(
        self, rows: Sequence[int], limits: Sequence[int], context: int = 0, queue: bool = True
    ) -> int:
        """K of the next step of these request rows, which may have so many drafts each; their texts have
        `context` tokens together. `queue`: whether requests wait for a row."""
        return max(limits)

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        """Packed steps: for how many drafts, at most `most`, a model is run in a step of these rows, which
        may draft, and `others` that may not."""
        return most

    def cut(
        self, rows: Sequence[int], drafter: Sequence[int], num_drafts: Sequence[int],
        match_len: Sequence[int],
    ) -> list[int]:  # fmt: skip
        """Packed steps: how many of each row's drafts to verify. Every argument is by row."""
        return list(num_drafts)

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        """Learn from a row of a step with K > 0, of which `drafted` drafts were verified."""

    def reset(self, row: int) -> None:
        """A new request took the row."""


@dataclass
class _Promises:
    """What a row's drafts promised, in tokens, and what became of it; earlier steps count less. (An estimate
    has the record of all rows in it: where nothing is ever accepted it promises something all the same.)"""

    open: float = 0.0  # of the step under way
    promised: float = 0.0
    accepted: float = 0.0

    def settle(self, accepted: int) -> None:
        self.promised = PROMISES_DECAY * self.promised + self.open
        self.accepted = PROMISES_DECAY * self.accepted + accepted
        self.open = 0.0

    @property
    def kept(self) -> float:
        """The share that was kept, all of it if it was nearly so, or if that is long ago."""
        return min((self.accepted + 1) / (self.promised + 1) / ENOUGH, 1.0)


class _Slowest:
    """What the row that ends last loses to the drafts of a step: what the step takes longer, less what they
    save: a token more in a row its share of a later step, one more in every row all of a step. To be sure of
    that, rows are believed as far as they kept their promises."""

    def __init__(self, rows: int, plain: float, alone: float) -> None:
        """ms of a step without drafts, of these rows and of one row."""
        self._plain, self._share = plain, CAUTION * (plain - alone) / max(rows - 1, 1)
        self._common = plain - rows * self._share
        self._tokens: dict[int, float] = {}
        self._rows = rows
        self._saved = 0.0

    def loses(self, row: int, tokens: float, kept: float, ms: float) -> float:
        """ms, with one more draft, of this row, that promises so many tokens; the step takes `ms` then."""
        self._tokens[row] = self._tokens.get(row, 0.0) + tokens * kept
        self._saved += tokens * self._share
        of_all = min(self._tokens.values()) if len(self._tokens) == self._rows else 0.0
        return ms - self._plain - self._saved - of_all * self._common


class AutoPolicy(Policy):
    """What pays, by estimate and measured cost; see the module docstring."""

    def __init__(self, costs: StepCosts, model: int = NOBODY) -> None:
        """`model`: the drafter that `passes` runs."""
        self.costs: StepCosts = costs
        self._model = model
        self.estimator = Estimator()
        self.rates: dict[int, float] = {}  # tokens per ms by K, as `_pick` weighed them last
        self._best = 0  # what `_pick` found, without the probe
        self._probing = False  # it took more
        self._probed: set[int] = set()  # rows that draft as a probe only
        self._context = 0  # of the rows of this step
        self._turn = 0  # rows are probed in turn
        self._token_ms = 0.0  # without drafts
        self._credit = 0.0  # ms that may go into probes
        self._allowance = 0.0  # ms that the slowest row may lose
        self._fair = False  # it may lose no more
        self._promises: defaultdict[int, _Promises] = defaultdict(_Promises)  # by row

    def choose(
        self, rows: Sequence[int], limits: Sequence[int], context: int = 0, queue: bool = True
    ) -> int:
        B, most = len(rows), max(limits)
        self._context, self._fair = context, not queue and self._model == NOBODY
        plain = self.costs.cost(B, B, context)
        self._token_ms = plain / B
        self._credit = min(self._credit + PROBE_BUDGET * plain, MOST_SAVED * plain)
        self._allowance = min(self._allowance + OTHERS_BUDGET * plain, plain)
        if not self.costs.captured:
            return most
        k = self._pick(rows, limits, UNKNOWN, {k: ms for k, ms in self.costs.by_k(B).items() if k <= most})
        if k and not self._best:
            self._probed.update(rows)
        return k

    def passes(self, rows: Sequence[int], others: int, most: int) -> int:
        B, running, propose = len(rows), len(rows) + others, self.costs.propose
        cost = partial(self.costs.cost, running, context=self._context)
        ms = {k: cost(running + B * k) + propose(B, k) for k in range(most + 1)}
        n = self._pick(rows, [most] * B, (self._model, 0), ms, others)
        return n

    def _pick(
        self,
        rows: Sequence[int],
        limits: Sequence[int],
        situation: Situation,
        ms: Mapping[int, float],
        others: int = 0,
    ) -> int:
        """The K that promises most, of those with a time, or now and then the next larger one as a probe;
        `others` are rows without drafts."""
        ks = tuple(ms)
        tokens = self.estimator.tokens(rows, limits, situation, ks)
        self.rates = rate = {k: (total + others) / ms[k] for k, total in zip(ks, tokens)}
        best = max(rate, key=rate.__getitem__)
        if self._best in rate and rate[best] < rate[self._best] * (1 + MARGIN):
            best = self._best
        self._best = best
        larger = min((k for k in ks if k > best), default=best)
        self._probing = larger > best and self._affords(ms[larger] - ms[best])
        return larger if self._probing else best

    def cut(
        self, rows: Sequence[int], drafter: Sequence[int], num_drafts: Sequence[int],
        match_len: Sequence[int],
    ) -> list[int]:  # fmt: skip
        B, context = len(rows), self._context
        cost = partial(self.costs.cost, B, context=context)
        taken = [0] * B
        if self._probing:
            taken = [n if d == self._model else 0 for n, d in zip(num_drafts, drafter)]
        if not self._best:
            self._probed.update(row for row, n in zip(rows, taken) if n)
        least = B + sum(taken)
        total, best, number, lost, loss = float(least), least / cost(least), 0, 0.0, 0.0
        # A draft that is less likely to be right would cost more than it brings, whatever else is taken.
        likely = best * self.costs.least_slope(B, least, context)
        gains: list[tuple[float, int]] = []  # probability that a draft and all before it are right; its row
        for b, (row, n, situation) in enumerate(zip(rows, num_drafts, zip(drafter, match_len))):
            own = self.estimator.of_drafts(row, situation, n, likely)
            gains += [(gain, b) for gain in own[taken[b] : n] if gain >= likely]
        gains.sort(reverse=True)  # whatever their number, the best drafts are those likeliest to be right
        slowest = _Slowest(B, cost(B), self.costs.cost(1, 1, context // B)) if self._fair else None
        kept = {b: self._promises[rows[b]].kept for _, b in gains} if slowest else {}
        for n, ((gain, b), ms) in enumerate(zip(gains, self.costs.rising(B, least, context)), 1):
            total += gain
            if slowest:
                loss = slowest.loses(b, gain, kept[b], ms)
            if (rate := total / ms) > best and loss <= self._allowance:
                best, number, lost = rate, n, loss
        self._allowance -= lost
        for gain, b in gains[:number]:
            taken[b] += 1
            self._promises[rows[b]].open += gain
        known = {b for _, b in gains} if self._fair else set()  # to pay, if not for whom
        idle = [b for b in range(B) if num_drafts[b] and not taken[b] and b not in known]
        if idle and self._affords(cost(least + number + 1) - cost(least + number)):
            taken[self._in_turn(rows, idle)] = 1
        return taken

    def _in_turn(self, rows: Sequence[int], idle: Sequence[int]) -> int:
        """Which of the idle ones is to be probed."""
        self._turn += 1
        b = idle[self._turn % len(idle)]
        self._probed.add(rows[b])
        return b

    def _affords(self, ms: float) -> bool:
        """Whether the budget holds so much for a probe; takes it."""
        if ms > self._credit:
            return False
        self._credit -= ms
        return True

    def probes(self, row: int, drafter: int = NOBODY) -> bool:
        """Whether a row that this drafter guesses for drafts, or drafts more, as a probe."""
        return row in self._probed or (self._probing and drafter in (self._model, NOBODY))

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        self._promises[row].settle(accepted)
        if drafted or self.costs.captured:
            situation = UNKNOWN if self.costs.captured else (drafter, match_len)
            self.estimator.observe(row, situation, drafted, accepted)
        if row in self._probed:
            self._probed.remove(row)
            self._credit += accepted * self._token_ms

    def reset(self, row: int) -> None:
        self.estimator.reset(row)
        self._promises.pop(row, None)
        self._probed.discard(row)
