"""What a step costs, measured (by `timing.py`). Needs no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

LEAST_MS = 1e-6


def lookup_ms(rows: int, passes: int) -> float:
    """ms of guessing by lookup, beyond what the step takes."""
    return 0.0


class Attention(NamedTuple):
    """ms that attention takes for each cached position of a row: `row`, and `query` for every token that is
    scored there. Long rows and short ones cost in proportion, and no row anything by itself."""

    row: float = 0.0
    query: float = 0.0

    @classmethod
    def fit(cls, ms: Mapping[int, float]) -> Attention:
        """From the ms per position of rows that score few and many tokens."""
        (few, low), (many, high) = sorted(ms.items())
        query = min(max((high - low) / (many - few), 0.0), max(high, 0.0) / many)
        return cls(max(low - few * query, 0.0), query)


class StepCosts:
    """Measured ms of a step, smoothed: more rows or tokens never cost less.

    Attributes:
        captured: ms by captured batch size and K, ascending; empty if steps are packed. Every batch size
            needs K = 0; larger K may be missing where they cannot pay.
        packed: ms by number of tokens scored, ascending; empty if steps are captured.
        attention: what packed steps take beyond that for the rows' texts. (Captured steps are timed with a
            context, and of all K with the same.)
        propose: (rows, passes) -> ms that running a model takes. Lookup takes none.
    """

    def __init__(
        self,
        captured: Mapping[int, Mapping[int, float]] | None = None,
        packed: Mapping[int, float] | None = None,
        propose: Callable[[int, int], float] = lookup_ms,
        attention: Attention | None = None,
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
        self.propose, self.attention = propose, attention or Attention()
        self._sizes, self._tokens, self._ms = [*self.captured], [*self.packed], [*self.packed.values()]
        points = [*self.packed.items()]
        self._slopes = [(b - a) / (n - m) for (m, a), (n, b) in pairwise(points)]

    def by_k(self, batch: int) -> dict[int, float]:
        """ms by K of a captured step, in the smallest captured batch that holds so many rows."""
        i = bisect_left(self._sizes, batch)
        if i == len(self._sizes):
            raise ValueError(f"A batch of {batch} exceeds the largest captured one, {self._sizes[-1]}.")
        return self.captured[self._sizes[i]]

    def cost(self, batch: int, tokens: int, context: int = 0) -> float:
        """ms of a step that scores so many tokens of so many rows, which have `context` cached positions
        together. Captured: K + 1 of each row. Packed: interpolated, as if every row had the same share."""
        if self.captured:
            return self.by_k(batch)[tokens // batch - 1]
        i = self._segment(tokens)
        row, query = self.attention
        ms = self._ms[i] + (tokens - self._tokens[i]) * self._slopes[i]
        return ms + context * (row + query * tokens / batch)

    def rising(self, batch: int, tokens: int, context: int = 0) -> Iterator[float]:
        """Packed: `cost` with one token more, with two more, and so on, without end."""
        ms, more = self.cost(batch, tokens, context), context * self.attention.query / batch
        for i in range(self._segment(tokens), len(self._slopes) - 1):
            for _ in range(tokens, self._tokens[i + 1]):
                ms += self._slopes[i] + more
                yield ms
            tokens = self._tokens[i + 1]
        while True:
            ms += self._slopes[-1] + more
            yield ms

    def least_slope(self, batch: int, tokens: int, context: int = 0) -> float:
        """ms that every token beyond so many adds to a packed step at least."""
        return min(self._slopes[self._segment(tokens + 1) :]) + context * self.attention.query / batch

    def _segment(self, tokens: int) -> int:
        return min(max(bisect_left(self._tokens, tokens) - 1, 0), len(self._slopes) - 1)

    def of_one_row(self) -> dict[int, float]:
        """ms of a step of one request by the number of tokens it scores, as far as measured."""
        return {k + 1: ms for k, ms in self.by_k(1).items()} if self.captured else self.packed

    def report(self) -> dict[str, object]:
        """For the statistics."""
        if self.captured:
            return {"step_ms_by_batch_and_k": self.captured}
        per_position = {f"per_{name}": ms for name, ms in self.attention._asdict().items()}
        return {"step_ms_by_tokens": self.packed, "attention_ms_per_position": per_position}


def _rising(ms: Mapping[int, float]) -> dict[int, float]:
    """None of them 0, as a clock that is coarse or stands still would have it."""
    return dict(zip(sorted(ms), accumulate((max(ms[n], LEAST_MS) for n in sorted(ms)), max)))
