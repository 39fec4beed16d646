"""What trees are worth, where their drafters say how likely each node is (`Proposal.chances`).

A row's tokens per step with k nodes are 1 and the sum of the chances of the best k. The chances of the next
step's nodes are not known when its K is chosen, so they are estimated: for each place in the order of nodes,
the mean of what was said of it in the row's steps, with decay. A place that no recent step of the row has
reached is expected to be worth what it is to all rows, times what the last one that was reached is worth to
this row over what it is to all.
`ModelInTrees` is for packed steps, whose nodes are known before any is verified, but not what they would be
without a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..kernels.codes import MAX_DRAFTS

DECAY, COMMON_DECAY = 0.8, 0.99  # of what was said before: of a row, of all rows
# Before anything is known: half a token for the first node, falling as 1 / n. (On real text, trees of 4, 8,
# 16 and 32 nodes give 1.0, 1.3, 1.5 and 1.7 tokens more than one: `bench/recycle.py`.)
EXPECTED = 0.5


class TreeEstimator:
    """See the module docstring."""

    def __init__(self) -> None:
        self._common = [EXPECTED / (i + 1) for i in range(MAX_DRAFTS)]
        self._own: defaultdict[int, list[float]] = defaultdict(list)  # by row, of the places that it reached

    def __bool__(self) -> bool:
        return bool(self._own)

    def __contains__(self, row: int) -> bool:
        return row in self._own

    def observe(self, row: int, chances: Sequence[float], asked: int = 0) -> None:
        """What a step said of its nodes; where it was `asked` for more, there were none."""
        own, chances = self._own[row], [*chances, *[0.0] * (asked - len(chances))]
        for i, chance in enumerate(chances):
            self._common[i] += (1 - COMMON_DECAY) * (chance - self._common[i])
            if i < len(own):
                own[i] += (1 - DECAY) * (chance - own[i])
            else:
                own.append(chance)
        del own[len(chances) :]

    def tokens(self, rows: Sequence[tuple[int, int]], ks: Sequence[int]) -> list[float]:
        """What all rows, each with its limit, give per step together, for each K."""
        sums = [(list(accumulate(self._gains(row), initial=1.0)), limit) for row, limit in rows]
        return [sum(own[min(k, limit)] for own, limit in sums) for k in ks]

    def reset(self, row: int) -> None:
        self._own.pop(row, None)

    def _gains(self, row: int) -> list[float]:
        own = self._own.get(row, [])
        n = len(own)
        share = min(own[-1] / max(self._common[n - 1], 1e-6), 2.0) if n else 1.0
        return own + [share * chance for chance in self._common[n:]]


GAIN_DECAY, ENOUGH = 0.95, 4  # steps of either kind, before they are compared


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = GAIN_DECAY * self.weight + 1
        self.value += (value - self.value) / self.weight


class ModelInTrees:
    """Whether it pays to run a model whose guesses join those of others in a tree.

    What is accepted tells little of that, since the others may have guessed the same. So the trees of late
    steps with it and without are compared by their gain: tokens per ms, over those of a step without drafts.
    """

    def __init__(self) -> None:
        self._gains = {True: _Mean(), False: _Mean()}

    def observe(self, ran: bool, model_ms: float, gain: float, ms: float) -> None:
        """Of a step: whether the model was run, `model_ms` of it beside `ms`; the gain, were they free."""
        self._gains[ran].add(gain * ms / (ms + model_ms))

    def prefers(self) -> tuple[bool, float]:
        """Whether it should be run, and the share of the gain that is lost by doing otherwise."""
        ran, left = self._gains[True], self._gains[False]
        if min(ran.weight, left.weight) < ENOUGH:
            return ran.weight <= left.weight, 1.0
        return ran.value > left.value, abs(ran.value - left.value) / max(ran.value, left.value)
