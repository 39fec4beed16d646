"""What a step costs, measured (by `timing.py`). Needs no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate


def lookup_ms(rows: int, passes: int) -> float:
    """ms of guessing by lookup, beyond what the step takes."""
    return 0.0


class StepCosts:
    """Measured ms of a step, smoothed: more rows or tokens never cost less.

    Attributes:
        captured: ms by captured batch size and K, ascending; empty if steps are packed. Every batch size
            needs K = 0; larger K may be missing where they cannot pay.
        packed: ms by number of tokens scored, ascending; empty if steps are captured.
        propose: (rows, passes) -> ms that running a model takes. Lookup takes none.
    """

    def __init__(
        self,
        captured: Mapping[int, Mapping[int, float]] | None = None,
        packed: Mapping[int, float] | None = None,
        propose: Callable[[int, int], float] = lookup_ms,
    ) -> None:
        captured, packed = captured or {}, packed or {}
        if bool(captured) == bool(packed) or any(0 not in by_k for by_k in captured.values()):
            raise ValueError("Give the times of packed steps, or of captured ones with K=0 for every batch.")
        self.captured: dict[int, dict[int, float]] = {}
        least: dict[int, float] = {}  # by K, of smaller batches
        for size in sorted(captured):
            self.captured[size] = _rising({k: max(ms, least.get(k, 0.0)) for k, ms in captured[size].items()})
            least |= self.captured[size]
        self.packed = _rising(packed)
        self.propose = propose
        self._sizes, self._tokens, self._ms = [*self.captured], [*self.packed], [*self.packed.values()]

    def by_k(self, batch: int) -> dict[int, float]:
        """ms by K of a captured step, in the smallest captured batch that holds so many rows."""
        i = bisect_left(self._sizes, batch)
        if i == len(self._sizes):
            raise ValueError(f"A batch of {batch} exceeds the largest captured one, {self._sizes[-1]}.")
        return self.captured[self._sizes[i]]

    def cost(self, batch: int, tokens: int) -> float:
        """ms of a step that scores so many tokens of so many rows, K + 1 of each if it is captured; of
        packed steps interpolated."""
        if self.captured:
            return self.by_k(batch)[tokens // batch - 1]
        n, ms = self._tokens, self._ms
        i = min(max(bisect_left(n, tokens), 1), len(n) - 1)
        return ms[i - 1] + (tokens - n[i - 1]) * (ms[i] - ms[i - 1]) / (n[i] - n[i - 1])

    def of_one_row(self) -> dict[int, float]:
        """ms of a step of one request by the number of tokens it scores, as far as measured."""
        return {k + 1: ms for k, ms in self.by_k(1).items()} if self.captured else self.packed

    def report(self) -> dict[str, object]:
        """For the statistics."""
        if self.captured:
            return {"step_ms_by_batch_and_k": self.captured}
        return {"step_ms_by_tokens": self.packed}


def _rising(ms: Mapping[int, float]) -> dict[int, float]:
    return dict(zip(sorted(ms), accumulate((ms[n] for n in sorted(ms)), max)))
