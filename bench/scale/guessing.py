"""How many drafts a replica verifies, and what they bring.

What K drafts bring is measured: `brought` replays lookup over real texts (`bench/traces.py`) and gives the
tokens per step of each kind of text by K. With it a fleet needs no tokens: a row of a kind emits its kind's
mean in every step. The automatic choice takes the K of most tokens per ms for all rows of the step, which is
what `AutoPolicy` finds online and without knowing the kinds; `questions.py` runs it on the same texts and
says how much of this it reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.scale.costs import Costs
from bench.strategies import Fixed, simulate
from bench.traces import Trace
from nanospec.device.graphs import MAX_STEP_TOKENS
from nanospec.drafters.costs import StepCosts

KS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
ALIKE = 64  # tokens by which the mean text of the rows may change until K is chosen anew
Brought = Mapping[int, float]
"""Tokens per step by K."""


def brought(source: Sequence[Trace], tokens: int = 40_000) -> dict[int, float]:
    """What K drafts bring to one row of these texts, for every K."""
    found = {}
    for k in KS:
        outcome = simulate(source, 8, Fixed(k, StepCosts({8: {0: 1.0, k: 1.0}})), tokens)
        found[k] = round(outcome.tokens / outcome.steps / 8, 4)
    return found


def captured(rows: int) -> tuple[int, ...]:
    """The K for which a step of so many rows is captured (`nanospec/device/graphs.py`)."""
    return tuple(k for k in KS if k == 0 or rows * (k + 1) <= MAX_STEP_TOKENS)


class Guessing:
    """A fixed K, or as many as are captured; the automatic one if none is given."""

    def __init__(self, kinds: Sequence[Brought], k: int | None = None) -> None:
        if k is not None and k not in KS:
            raise ValueError(f"K={k} is not one of those that were replayed: {', '.join(map(str, KS))}.")
        self.kinds, self.k = kinds, k
        self.tokens = {k: [kind[k] for kind in kinds] for k in KS}  # per step, by kind
        self._chosen: dict[tuple[Any, ...], int] = {}

    def choose(self, costs: Costs, rows: Sequence[int], context: float) -> int:
        """K of a step of so many rows of each kind, whose texts have `context` tokens together. It stays the
        same while the mean text does, to `ALIKE` tokens."""
        total = sum(rows)
        mean = round(context / total / ALIKE) * ALIKE
        key = (costs, *rows, mean)
        if key not in self._chosen:
            self._chosen[key] = self._best(costs, rows, total * mean)
        return self._chosen[key]

    def _best(self, costs: Costs, rows: Sequence[int], context: float) -> int:
        total = sum(rows)
        ks = captured(total)
        if self.k is not None:
            return max(k for k in ks if k <= self.k)
        return max(ks, key=lambda k: self._emitted(rows, k) / costs.step(total, k, context))

    def _emitted(self, rows: Sequence[int], k: int) -> float:
        return sum(n * tokens for n, tokens in zip(rows, self.tokens[k]))
