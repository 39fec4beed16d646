"""The cost of a step, as measured by `device/timing.py`, and its shares of each row."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

SHARE = 0.005  # of the time, that may go into probes, and that a row may lose to drafts of others
CAUTION = 0.75  # of what the end of a row seems to save; it is a small difference of measured times


class StepCosts:
    """Measured ms of a step, smoothed: more rows or tokens never cost less.

    Attributes:
        captured: ms by captured batch size and K, ascending; empty if steps are packed. Every batch size
            has K = 0; larger K may be missing.
        packed: ms by number of tokens scored, ascending; empty if steps are captured.
        propose: (rows, drafts of each) -> ms that a model takes to draft in a packed step. None if drafts
            are looked up, which takes next to nothing. A captured step includes it.
        attention: what a packed step takes beyond that for each cached position of a row: ms, and ms for
            each token that is scored there.
    """

    def __init__(
        self,
        captured: Mapping[int, Mapping[int, float]] | None = None,
        packed: Mapping[int, float] | None = None,
        propose: Callable[[int, int], float] | None = None,
        attention: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.captured: dict[int, dict[int, float]] = {}
        least: dict[int, float] = {}  # by K, of smaller batches
        for size, by_k in sorted((captured or {}).items()):
            self.captured[size] = _rising({k: max(ms, least.get(k, 0.0)) for k, ms in by_k.items()})
            least |= self.captured[size]
        self.packed, self.propose, self.attention = _rising(packed or {}), propose, attention
        self._tokens, self._ms = [*self.packed], [*self.packed.values()]
        self._slopes = [(b - a) / (n - m) for (m, a), (n, b) in pairwise(self.packed.items())]

    def cost(self, batch: int, tokens: float, context: int = 0) -> float:
        """ms of a step that scores so many tokens of so many rows, which have `context` cached positions
        together, without `propose`. Captured: of the next larger batch and K."""
        if self.captured:
            return next(ms for k, ms in self._bucket(batch).items() if batch * (k + 1) >= tokens)
        i, (row, query) = self._segment(tokens), self.attention
        ms = self._ms[i] + (tokens - self._tokens[i]) * self._slopes[i]
        return ms + context * (row + query * tokens / batch)

    def by_k(self, batch: int, most: int, context: int = 0) -> dict[int, float]:
        """ms by K, up to `most`, if every row has K drafts."""
        if self.captured:
            return {k: ms for k, ms in self._bucket(batch).items() if k <= most}
        model = self.propose or (lambda rows, drafts: 0.0)
        return {k: self.cost(batch, batch * (k + 1), context) + model(batch, k) for k in range(most + 1)}

    def least_slope(self, batch: int, context: int = 0) -> float:
        """ms that a further token adds at least to a packed step, whatever else it scores."""
        return min(self._slopes[self._segment(batch + 1) :]) + context * self.attention[1] / batch

    def _bucket(self, batch: int) -> dict[int, float]:
        return next(by_k for size, by_k in self.captured.items() if size >= batch)

    def _segment(self, tokens: float) -> int:
        return min(max(bisect_left(self._tokens, tokens) - 1, 0), len(self._slopes) - 1)

    def report(self) -> dict[str, object]:
        """Return the measured times, for the statistics."""
        if self.captured:
            return {"step_ms_by_batch_and_k": self.captured}
        attention = dict(zip(("per_row", "per_query"), self.attention))
        return {"step_ms_by_tokens": self.packed, "attention_ms_per_position": attention}


def _rising(ms: Mapping[int, float]) -> dict[int, float]:
    """Sort by number, and let no larger number take less; a coarse clock may show 0."""
    return dict(zip(sorted(ms), accumulate((max(ms[n], 1e-6) for n in sorted(ms)), max)))


class RowAccounts:
    """What drafts have saved each row, in ms, less what they have cost all rows.

    Where no request waits, steps are made until the slowest row has ended, and the drafts of a row make each
    step longer for all. An accepted draft takes one step from its row, of `plain` ms. It saves `every` row
    what a step gets shorter by when a row ends, and its own row the rest, so `plain` ms in all.
    """

    def __init__(self) -> None:
        self._every, self._own = 0.0, 0.0  # ms that an accepted draft saves every row, and its own beside
        self._spent = 0.0  # ms that drafts have cost every row, less those that they saved every row
        self._saved: dict[int, float] = {}  # by row: less `_spent`, its account

    def price(self, batch: int, plain: float, alone: float) -> None:
        """Set the savings of a draft from the ms of steps without drafts, of the batch and of one row."""
        self._every = CAUTION * (plain - alone) / max(batch - 1, 1)
        self._own = plain - batch * self._every

    def least(self, rows: Sequence[int], gains: Sequence[float]) -> float:
        """Return the ms that the poorest of the rows may lose in a step: its account, and what its own drafts
        will save it, of which `gains` will be accepted."""
        saved = (self._saved.setdefault(row, self._spent) for row in rows)
        return min(ms + self._own * gain for ms, gain in zip(saved, gains)) - self._spent

    def charge(self, ms: float, gain: float) -> float:
        """Return the ms that each row loses by drafts that add `ms` to a step and bring `gain` tokens."""
        return ms - gain * self._every

    def spend(self, ms: float) -> None:
        """Charge all rows for the drafts of a step."""
        self._spent += ms

    def credit(self, row: int, accepted: int) -> None:
        """Credit a row, and all others, with its accepted drafts."""
        self._spent -= accepted * self._every
        self._saved[row] = self._saved.get(row, self._spent) + accepted * self._own

    def close(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._saved.pop(row, None)
