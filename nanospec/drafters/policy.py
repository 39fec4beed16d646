"""Policies that choose how many drafts to verify: by default the number, 0 included, with the most expected
tokens per ms.

Before a step, `choose` returns K, the maximum number of drafts of a row, and what is known about acceptance
and times (`Estimates`). After the drafts are proposed, `trim` selects those to verify from these numbers on
the device, so nothing in a step waits for the host.

Step costs are measured; acceptance is estimated from earlier steps (`estimates.py`). Drafts that are never
verified yield no data, so for OVERHEAD of the time, steps are probes with more drafts than seems best.

While requests wait, maximizing tokens per ms is right: a request that ends early frees its row. While none
wait, drafts of one row must not slow down others. A step may then be longer than one without drafts only by
what its drafts save every row (an accepted draft ends its request a step earlier, so a later step has one row
less), plus what the row with the fewest accepted drafts saves itself, plus MARGIN.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..kernels import MAX_DRAFTS, NO_DRAFTER
from ..kernels.speculation.report import RowReport
from ..kernels.speculation.trim import NUMBERS
from .estimates import LENGTHS, Estimator, StepCosts

ByRow = Mapping[int, int]  # request row -> number of drafts
EXPLORE = 16  # in one of this many steps, matches of any length precede the drafts of a model
OVERHEAD = 0.005  # maximum share of time for probes
MARGIN = 0.01  # maximum slowdown of a row by the drafts of others
CAUTION = 0.75  # discounts the time saved when a row ends, a small and noisy difference of measurements
RECENT = 0.1  # weight of the latest step in a row's accepted drafts per step
UNLIMITED_MS = 1e9


class Choice(NamedTuple):
    """How many drafts each row of a step may have."""

    k: int  # the maximum, of any drafter
    model_k: int = MAX_DRAFTS  # the maximum of the drafter that runs a model
    estimates: Sequence[float] = ()  # the numbers of `Estimates` in order; (): all drafts are verified


class Policy:
    """A fixed K: all drafts are verified."""

    costs: StepCosts | None = None  # None if not measured
    probing = False  # whether the latest step verifies more drafts than seems best

    def choose(self, max_drafts: ByRow, max_from_drafters: ByRow, context: int, waiting: bool) -> Choice:
        """Return the choice for the next step.

        `max_drafts`: maximum number of drafts of each row; `max_from_drafters`: the same, but 0 for rows
        with drafts from an extension; `context`: total number of tokens; `waiting`: whether requests wait for
        a row.
        """
        return Choice(max(max_drafts.values()), max(max_from_drafters.values()))

    def add_time(self, propose_ms: float) -> None:
        """Note the time that proposing took in a step that is not captured, before `observe`."""

    def observe(self, reports: Mapping[int, RowReport]) -> None:
        """Update the estimates from the results of a step with K > 0, by row."""

    def reset(self, row: int) -> None:
        """Forget a row's previous request, when it is assigned to a new one."""


class AutoPolicy(Policy):
    """Maximizes the expected tokens per ms; see the module docstring."""

    def __init__(self, costs: StepCosts, num_drafters: int = 1, model_drafter: int = NO_DRAFTER) -> None:
        """`num_drafters`: drafters and extensions that draft. `model_drafter`: the index of the drafter that
        runs a model."""
        self.costs: StepCosts = costs
        self.estimator, self._num_drafters, self._model_drafter = Estimator(), num_drafters, model_drafter
        # The estimates by which K is chosen, before drafts are proposed: of all drafters together in captured
        # steps, else of the model.
        self._of_all = Estimator() if costs.captured else None
        self._chooses_k = costs.captured or model_drafter != NO_DRAFTER  # before drafts are proposed
        self._accepted: dict[int, float] = {}  # drafts accepted per step, by row
        self._num_steps = 0
        # Of the latest step that is not captured: the number of drafts of the model, the rows that it may
        # draft for, and the time that proposing took.
        self._model_k, self._drafting, self._propose_ms = 0, frozenset[int](), 0.0
        self._credit, self._turn = 0.0, 0  # ms available for probes; their number so far

    def choose(self, max_drafts: ByRow, max_from_drafters: ByRow, context: int, waiting: bool) -> Choice:
        B, max_k, costs = len(max_drafts), max(max_drafts.values()), self.costs
        plain = costs.cost(B, B, context)
        costs.fade_drafting(OVERHEAD * plain)  # retries of a slow drafter are probes, too
        self._credit = min(self._credit + OVERHEAD * plain, plain)
        self._num_steps += 1
        self.probing, chosen = False, max_k
        if self._chooses_k:
            chosen = self._choose_k(max_drafts if costs.captured else max_from_drafters, context)
        only_model = self._model_drafter == 0 and max_drafts == max_from_drafters
        k = chosen if costs.captured or only_model else max_k  # on a CPU, unused columns cost nothing
        self._model_k = 0 if costs.captured or self._model_drafter == NO_DRAFTER else chosen
        self._drafting = frozenset(row for row, n in max_from_drafters.items() if min(n, self._model_k))
        if not k:
            return Choice(0, 0)
        # A captured step has room for k drafts in each row, and its time includes that of drafting them, so
        # the drafts of a model cost little more.
        drafted = costs.captured and self._model_drafter != NO_DRAFTER
        forced = chosen if self.probing or drafted else 0
        numbers = {
            "keep_unmatched": forced,
            "keep_matched": forced if costs.captured else 0,
            "probe": self._row_to_probe(B, costs.cost(B, B + 1, context) - plain),
            "min_match": self._min_match(B, max_k, chosen, plain),
            **self._allowance(B, plain, costs.cost(1, 1, context // B), unlimited=waiting or self.probing),
        }
        return Choice(k, chosen, self._estimates(max_drafts, context, numbers))

    def _row_to_probe(self, B: int, ms: float) -> int:
        """Return the batch row from which on a row verifies one more draft, which costs `ms`, or -1. These
        probes and those of a larger K take turns."""
        if self.probing or (self._chooses_k and self._turn % 2 == 0) or not self._spend_credit(ms):
            return -1
        return self._turn // (1 + self._chooses_k) % B

    def _allowance(self, B: int, plain: float, alone: float, unlimited: bool) -> dict[str, float]:
        """Return how much longer drafts may make a step of B rows. `plain` and `alone`: ms of a step without
        drafts, for all rows and for one row alone."""
        if unlimited:
            return {"shared": 0.0, "own": 0.0, "margin": UNLIMITED_MS}
        shared = CAUTION * (plain - alone) / max(B - 1, 1)
        return {"shared": shared, "own": plain - B * shared, "margin": MARGIN * plain}

    def _choose_k(self, max_drafts: ByRow, context: int) -> int:
        """Return the K with the most expected tokens per ms for drafts without a match, or a larger one as a
        probe."""
        ms = self.costs.by_k(len(max_drafts), max(max_drafts.values()), context)
        if self._of_all is None:
            tokens = self.estimator.tokens(max_drafts, self._model_drafter, tuple(ms))
        else:
            tokens = self._of_all.tokens(max_drafts, NO_DRAFTER, tuple(ms))
        rates = {k: n / ms[k] for k, n in zip(ms, tokens)}
        best = max(rates, key=rates.__getitem__)
        larger = min((k for k in ms if k > best), default=best)
        due = larger > best and (best == 0 or self._turn % 2 == 0)
        self.probing = due and self._spend_credit(ms[larger] - ms[best])
        return larger if self.probing else best

    def _min_match(self, B: int, k: int, model_k: int, plain: float) -> int:
        """Return the minimum match length at which the k drafts of lookup yield more tokens per ms than the
        drafts of the model."""
        if self._model_drafter < 1 or not model_k or self._num_steps % EXPLORE == 0:
            return 0
        drafting = 0.0 if self.costs.captured else self.costs.drafting(B, model_k) / plain
        least = self.estimator.tokens_by_length(self._model_drafter, model_k)[0] / (1 + drafting)
        lookup = self._model_drafter - 1  # taken to be the drafter before
        tokens = self.estimator.tokens_by_length(lookup, k)
        return next((n for n in LENGTHS[1:] if tokens[n] >= least), LENGTHS.stop)

    def _estimates(self, max_drafts: ByRow, context: int, numbers: Mapping[str, float]) -> list[float]:
        """Return the values of `Estimates`, in order."""
        base, at, slope = self.costs.segments(len(max_drafts), context)
        named = [numbers.get(name, base) for name in NUMBERS]
        first, further = self.estimator.chances(self._num_drafters)
        rows = list[float]()
        for row in max_drafts:
            rows += self.estimator.factors(row, max(self._model_drafter, 0))
            rows.append(self._accepted.get(row, 0.0))
        return [*named, *at, *slope, *first, *further, *rows]

    def _spend_credit(self, ms: float) -> bool:
        """Take the cost of a probe from the credit; return False if the credit is too small."""
        if ms > self._credit:
            return False
        self._credit, self._turn = self._credit - ms, self._turn + 1
        return True

    def add_time(self, propose_ms: float) -> None:
        self._propose_ms = propose_ms

    def observe(self, reports: Mapping[int, RowReport]) -> None:
        drafting = self._drafting & reports.keys()
        by_model = [row for row in drafting if reports[row].drafter in (NO_DRAFTER, self._model_drafter)]
        if by_model:
            self.costs.add_drafting(len(by_model), self._model_k, self._propose_ms)
        for row, report in reports.items():
            drafted, accepted = report.num_drafted, report.num_accepted
            self._accepted[row] = (1 - RECENT) * self._accepted.get(row, 0.0) + RECENT * accepted
            if self._of_all is not None:
                self._of_all.observe(row, NO_DRAFTER, 0, drafted, accepted)
            if drafted:
                self.estimator.observe(row, report.drafter, report.match_len, drafted, accepted)
            elif row in self._drafting and report.drafter == NO_DRAFTER:  # the model had no drafts
                self.estimator.observe(row, self._model_drafter, 0, 0, 0)

    def reset(self, row: int) -> None:
        for estimator in filter(None, (self.estimator, self._of_all)):
            estimator.reset(row)
        self._accepted.pop(row, None)
