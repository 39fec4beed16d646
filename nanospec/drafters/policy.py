"""How many drafts to verify: as many as promise the most tokens per ms, none being one of the choices.

Steps come in two forms. A *captured* step has one K for all its rows, chosen before there are drafts
(`choose`). In a *packed* step each row pays for what it verifies, so all lookups are made, and `cut` takes
the likeliest drafts of all rows; only for how many drafts a model is run is chosen beforehand, by `choose`.

What steps cost is measured; what drafts promise is estimated from what became of earlier ones
(`estimates.py`). Drafts that are not made give no data, so some steps are probes: they take more drafts than
seem to pay, for at most SHARE of the time.

Most tokens per ms is best where requests wait for a row: one that ends earlier makes room. Where none waits,
the drafts of one row must not slow another: a packed step spends on drafts what `RowAccounts` allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from ..kernels import NO_DRAFTER
from ..kernels.speculation.report import RowReport
from .estimates import Estimator, Offer, RowAccounts, StepCosts

ByRow = Mapping[int, int]  # numbers of drafts by request row
SHARE = 0.005  # of the time, for probes, and that others' drafts may cost a row


class Policy:
    """A fixed K: all drafts are verified.

    Attributes:
        costs: what steps take, if it was measured.
        promised: by estimate, the tokens per ms of the latest step over those of one without drafts; None
            if nothing was weighed.
    """

    costs: StepCosts | None = None
    promised: float | None = None

    def choose(self, limits: ByRow, of_drafters: ByRow, context: int, waiting: bool) -> tuple[int, int]:
        """Return K of the next step, and the most drafts of the last drafter, which may run a model.

        `limits`: the most drafts of each request row of the step; `of_drafters`: likewise, but 0 where
        drafters make none. The rows' texts have `context` tokens together. `waiting`: whether requests
        wait for a row.
        """
        return max(limits.values()), max(of_drafters.values())

    def cut(self, offers: Sequence[Offer]) -> list[int]:
        """Return how many drafts of each row to verify in a packed step."""
        return [offer.num_drafts for offer in offers]

    def observe(self, row: int, report: RowReport) -> None:
        """Learn from a row of a step with K > 0."""

    def reset(self, row: int) -> None:
        """A new request took the row."""


class AutoPolicy(Policy):
    """What pays, by estimate and measured cost; see the module docstring."""

    def __init__(self, costs: StepCosts, model: int = NO_DRAFTER) -> None:
        """`model`: the drafter that runs a model in packed steps, if one does."""
        self.costs: StepCosts = costs
        self.estimator, self._accounts, self._model = Estimator(), RowAccounts(), model
        self._context, self._waiting, self._probing = 0, True, False  # of the latest step
        self._credit, self._turn = 0.0, 0  # ms that may go into probes; which row gets the next one

    def choose(self, limits: ByRow, of_drafters: ByRow, context: int, waiting: bool) -> tuple[int, int]:
        B, most = len(limits), max(limits.values())
        self._context, self._waiting, self._probing, self.promised = context, waiting, False, 1.0
        plain = self.costs.cost(B, B, context)
        self._credit = min(self._credit + SHARE * plain, plain)
        if self.costs.packed and self._model == NO_DRAFTER:
            return most, most
        weighed = of_drafters if self.costs.packed else limits
        ms = self.costs.by_k(B, max(weighed.values()), context)
        tokens = self.estimator.tokens(weighed, self._model, tuple(ms))
        rates = {k: n / ms[k] for k, n in zip(ms, tokens)}
        best = max(rates, key=rates.__getitem__)
        self.promised = rates[best] / rates[0]
        larger = min((k for k in ms if k > best), default=best)
        self._probing = larger > best and self._affords(ms[larger] - ms[best])
        chosen = larger if self._probing else best
        return (most, chosen) if self.costs.packed else (chosen, chosen)

    def cut(self, offers: Sequence[Offer]) -> list[int]:
        B, cost = len(offers), partial(self.costs.cost, len(offers), context=self._context)
        plain, gains = cost(B), dict[int, list[float]]()
        # The gain of a draft that brings what it costs; drafts of smaller gains are left out.
        least = B / plain * self.costs.least_slope(B, self._context)
        for offer in offers:
            sure = self._probing and offer.drafter == self._model  # a model was run for them
            gains[offer.row] = [1.0] * offer.num_drafts if sure else self.estimator.gains(offer, least)
        alone = self.costs.cost(1, 1, self._context // B)
        allowed = self._accounts.allowed({row: sum(chances) for row, chances in gains.items()}, plain, alone)
        likeliest = sorted(((gain, row) for row, chances in gains.items() for gain in chances), reverse=True)
        total, rates = float(B), [B / plain]  # tokens per ms, by the number of drafts
        for n, (gain, _) in enumerate(likeliest, 1):
            total, ms = total + gain, cost(B + n)
            fits = self._waiting or self._accounts.loss(ms - plain, total - B) <= allowed
            rates.append(total / ms if fits else 0.0)
        number = rates.index(max(rates))
        if not self._probing:
            self.promised = rates[number] / rates[0]
        taken = Counter(row for _, row in likeliest[:number])
        more = [offer.row for offer in offers if offer.num_drafts > taken[offer.row]]
        if more and self._affords(cost(B + number + 1) - cost(B + number)):
            self._turn += 1
            taken[more[self._turn % len(more)]] += 1
        if not self._waiting:
            self._accounts.spend(cost(B + taken.total()) - (1 + SHARE) * plain)
        return [taken[offer.row] for offer in offers]

    def _affords(self, ms: float) -> bool:
        """Return whether the credit holds so much for a probe, and take it."""
        affords = ms <= self._credit
        self._credit -= ms if affords else 0.0
        return affords

    def observe(self, row: int, report: RowReport) -> None:
        drafted, accepted = report.num_drafted, report.num_accepted
        if self.costs.captured:
            self.estimator.observe(row, NO_DRAFTER, 0, drafted, accepted)
        elif drafted:
            self.estimator.observe(row, report.drafter, report.match_len, drafted, accepted)
            if not self._waiting:
                self._accounts.credit(row, accepted)

    def reset(self, row: int) -> None:
        self.estimator.reset(row)
        self._accounts.close(row)
