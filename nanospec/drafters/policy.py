"""Policies that choose how many drafts to verify: by default the number, 0 included, with the most expected
tokens per ms.

A *captured* step has one K for all rows, which `choose` returns before drafts are proposed. The cost of a
*packed* step depends on the number of drafts of each row, so `count_drafts` selects the most likely drafts
of all rows after they are proposed; `choose` limits how many drafts a model generates, and sets the match
length of each row below which they replace n-gram drafts.

Step costs are measured; acceptance is estimated from earlier steps (`estimates.py`). Drafts that are never
verified yield no data, so for OVERHEAD of the time, steps are probes with more drafts than seems best.

While requests wait, maximizing tokens per ms is right: a request that ends early frees its row. While none
wait, drafts of one row must not slow down others: packed steps spend only the time that `RowAccounts` allows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ..kernels import MAX_DRAFTS, NO_DRAFTER
from ..kernels.speculation.report import RowReport
from .estimates import Estimator, RowAccounts, RowProposal, StepCosts

ByRow = Mapping[int, int]  # request row -> number of drafts
EXPLORE = 16  # in one of this many steps, matches of any length precede the drafts of a model
LENGTHS = range(1, 9)  # of the matches that the drafts of a model may replace
OVERHEAD = 0.005  # maximum share of time for probes, and maximum slowdown of a row by the drafts of others


class Choice(NamedTuple):
    """How many drafts each row of a step may have."""

    k: int
    # In packed steps: the maximum for the last drafter, and [B] the match length of each row below which a
    # model replaces n-gram drafts; (): it replaces none.
    model_k: int = MAX_DRAFTS
    min_match: Sequence[int] = ()


class Policy:
    """A fixed K: all drafts are verified."""

    costs: StepCosts | None = None  # None if not measured
    # Estimated tokens per ms of the latest step, relative to a step without drafts; None for a fixed K.
    expected_speedup: float | None = None

    def choose(self, limits: ByRow, drafter_limits: ByRow, context: int, waiting: bool) -> Choice:
        """Return the choice for the next step.

        `limits`: maximum number of drafts of each row; `drafter_limits`: the same, but 0 for rows with drafts
        from an extension; `context`: total number of tokens; `waiting`: whether requests wait for a row.
        """
        return Choice(max(limits.values()), max(drafter_limits.values()))

    def count_drafts(self, proposals: Sequence[RowProposal]) -> list[int]:
        """Return the number of drafts to verify for each row of a packed step."""
        return [each.num_drafts for each in proposals]

    def observe(self, row: int, report: RowReport) -> None:
        """Update the estimates from a row's result of a step with K > 0."""

    def reset(self, row: int) -> None:
        """Forget a row's previous request, when it is assigned to a new one."""


class AutoPolicy(Policy):
    """Maximizes the expected tokens per ms; see the module docstring."""

    def __init__(self, costs: StepCosts, model_drafter: int = NO_DRAFTER) -> None:
        """`model_drafter` is the index of the drafter that runs a model in packed steps."""
        self.costs: StepCosts = costs
        self.estimator, self._accounts, self._model_drafter = Estimator(), RowAccounts(), model_drafter
        self._context, self._waiting, self._probing = 0, True, False  # of the latest step
        self._num_steps = 0  # packed steps with a model
        self._drafting = set[int]()  # rows for which the model drafts in the latest of these
        self._credit, self._turn = 0.0, 0  # ms available for probes; selects the row of the next probe

    def choose(self, limits: ByRow, drafter_limits: ByRow, context: int, waiting: bool) -> Choice:
        B, max_k = len(limits), max(limits.values())
        self._context, self._waiting, self._probing, self.expected_speedup = context, waiting, False, 1.0
        plain = self.costs.cost(B, B, context)
        self._credit = min(self._credit + OVERHEAD * plain, plain)
        if not waiting:
            self._accounts.spend(-OVERHEAD * plain)
        if self.costs.packed and self._model_drafter == NO_DRAFTER:
            return Choice(max_k)
        weighed = drafter_limits if self.costs.packed else limits
        ms = self.costs.by_k(B, max(weighed.values()), context)
        tokens = self.estimator.tokens(weighed, self._model_drafter, tuple(ms))
        rates = {k: n / ms[k] for k, n in zip(ms, tokens)}
        best = max(rates, key=rates.__getitem__)
        self.expected_speedup = rates[best] / rates[0]
        larger = min((k for k in ms if k > best), default=best)
        self._probing = larger > best and self._spend_credit(ms[larger] - ms[best])
        chosen = larger if self._probing else best
        if self.costs.captured:
            return Choice(chosen)
        self._num_steps += 1
        self._drafting = {row for row, limit in drafter_limits.items() if min(limit, chosen)}
        has_lookup = self._model_drafter > 0
        if not has_lookup:  # fewer columns, unless an extension may draft more
            return Choice(chosen if limits == drafter_limits else max_k, chosen)
        if not chosen or self._num_steps % EXPLORE == 0:
            return Choice(max_k, chosen)
        cost = self.costs.propose(B, chosen) / plain
        return Choice(max_k, chosen, [self._min_match(row, n, chosen, cost) for row, n in limits.items()])

    def _min_match(self, row: int, k: int, model_k: int, cost: float) -> int:
        """Return the minimum match length at which n-gram drafts yield more tokens per ms than those of the
        model. `cost`: time of drafting with the model, relative to a step without drafts."""

        def tokens(drafter: int, num_drafts: int, match_len: int) -> float:
            return 1 + sum(self.estimator.gains(RowProposal(row, drafter, num_drafts, match_len)))

        code = self._model_drafter  # that of lookup is taken to be the one before
        least = tokens(code, model_k, 0) / (1 + cost)
        return next((n for n in LENGTHS if tokens(code - 1, k, n) >= least), LENGTHS.stop)

    def count_drafts(self, proposals: Sequence[RowProposal]) -> list[int]:
        B, cost = len(proposals), partial(self.costs.cost, len(proposals), context=self._context)
        for each in proposals:
            if each.row in self._drafting and not each.num_drafts:  # the model had no drafts
                self.estimator.observe(each.row, self._model_drafter, 0, 0, 0)
        plain, gains = cost(B), dict[int, list[float]]()
        # A draft less likely than this cannot raise the tokens per ms of any step, so it is not considered.
        min_gain = B / plain * self.costs.min_slope(B, self._context)
        for each in proposals:
            verify_all = self._probing and each.drafter == self._model_drafter  # the drafts of a probe
            gains[each.row] = [1.0] * each.num_drafts if verify_all else self.estimator.gains(each, min_gain)
        alone = self.costs.cost(1, 1, self._context // B)
        allowed = self._accounts.allowed({row: sum(chances) for row, chances in gains.items()}, plain, alone)
        likeliest = sorted(((gain, row) for row, chances in gains.items() for gain in chances), reverse=True)
        total, rates = float(B), [B / plain]  # expected tokens; tokens per ms by number of drafts
        for n, (gain, _) in enumerate(likeliest, 1):
            total, ms = total + gain, cost(B + n)
            fits = self._waiting or self._accounts.loss(ms - plain, total - B) <= allowed
            rates.append(total / ms if fits else 0.0)
        number = rates.index(max(rates))
        if not self._probing:
            self.expected_speedup = rates[number] / rates[0]
        num_kept = Counter(row for _, row in likeliest[:number])
        more = [each.row for each in proposals if each.num_drafts > num_kept[each.row]]
        if more and self._spend_credit(cost(B + number + 1) - cost(B + number)):
            self._turn += 1
            num_kept[more[self._turn % len(more)]] += 1
        if not self._waiting:
            self._accounts.spend(cost(B + num_kept.total()) - plain)
        return [num_kept[each.row] for each in proposals]

    def _spend_credit(self, ms: float) -> bool:
        """Take the cost of a probe from the credit; return False if the credit is too small."""
        affordable = ms <= self._credit
        self._credit -= ms if affordable else 0.0
        return affordable

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
