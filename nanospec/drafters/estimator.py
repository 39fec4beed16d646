"""How likely drafts are right.

Two shares are counted: of first drafts that are right, and of those behind a right one. Both depend most on
how many tokens matched where a draft was looked up, so they are kept by drafter and length of the match, of
all requests together; a new request starts from them. A text may repeat itself more or less than others: by
what factor a row's first drafts are right more often than expected is counted for each row.

Where nothing has matched (a model guesses, or K is chosen before there are drafts) the row's last step tells
most: whether it was accepted in full takes the place of the length. A row is then a chain of two states, and
`tokens_per_step` is its long run. It gives a small K its due: what that leaves is right in the next step too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

DECAY, ROW_DECAY = 0.995, 0.95  # weight of the past at each observation: of all rows, of a row
PRIOR, ROW_PRIOR = 8.0, 6.0  # how many observations the first values below, and a factor of 1, count for
MISS, FULL = 0, -1  # in place of the length of a match: whether the last step was accepted in full
# First values by that length, up to 8: about the shares of SmolLM2's greedy answers to questions and code
# edits.
FIRST = {FULL: 0.7, MISS: 0.3, 1: 0.2, 2: 0.5, 3: 0.6, 4: 0.7, 5: 0.75, 6: 0.8, 7: 0.85, 8: 0.9}
NEXT = {MISS: 0.75, 1: 0.65, 2: 0.75, 3: 0.8, 4: 0.8, 5: 0.85, 6: 0.85, 7: 0.9, 8: 0.95}


class Rate:
    """How often something happened over how often it could have, or was expected to; the past fades."""

    __slots__ = ("expected", "right")

    def __init__(self, value: float, weight: float) -> None:
        self.right, self.expected = value * weight, weight

    def add(self, right: float, expected: float, decay: float) -> None:
        self.right = decay * self.right + right
        self.expected = decay * self.expected + expected

    @property
    def value(self) -> float:
        return self.right / self.expected


Key = tuple[int, int]  # drafter or row, and length of the match


class Estimator:
    def __init__(self) -> None:
        self._first: dict[Key, Rate] = {}  # by drafter
        self._next: dict[Key, Rate] = {}
        self._factor: dict[Key, Rate] = {}  # by row, for all lengths from 1 on together
        self._state: dict[int, int] = {}  # MISS or FULL, by row

    def gains(self, row: int, drafter: int, num_drafts: int, match_len: int, least: float = 0) -> list[float]:
        """For each of a row's drafts the chance that it and all before it are right, down to `least`."""
        gain, gains = self._chance(row, drafter, match_len or self._state.get(row, MISS)), list[float]()
        further = self._of(self._next, NEXT, drafter, match_len).value
        while len(gains) < num_drafts and gain >= least:
            gains.append(gain)
            gain *= further
        return gains

    def tokens(self, limits: Mapping[int, int], drafter: int, ks: tuple[int, ...]) -> list[float]:
        """What rows give per step together for each K, without a match. `limits`: the most drafts by row."""
        further, total = round(self._of(self._next, NEXT, drafter, MISS).value, 3), [0.0] * len(ks)
        for row, limit in limits.items():  # rounded, so that few curves are computed
            miss, full = (round(self._chance(row, drafter, state), 2) for state in (MISS, FULL))
            total = [a + b for a, b in zip(total, tokens_per_step(miss, full, further, ks, limit))]
        return total

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        """Count what became of a row's drafts in a step; none are a miss."""
        state = match_len or self._state.get(row, MISS)
        first = self._of(self._first, FIRST, drafter, state)
        self._of_row(row, state).add(accepted > 0, first.value, ROW_DECAY)
        first.add(accepted > 0, 1.0, DECAY)
        right, tried = accepted - 1, min(accepted, drafted - 1)
        if state == FULL:  # the first draft goes on from right ones, too
            right, tried = right + 1, tried + 1
        if tried > 0:
            self._of(self._next, NEXT, drafter, match_len).add(right, tried, DECAY**tried)
        self._state[row] = FULL if 0 < drafted == accepted else MISS

    def reset(self, row: int) -> None:
        """Forget the text of a row."""
        self._state.pop(row, None)
        for state in (FULL, MISS, 1):
            self._factor.pop((row, state), None)

    def _chance(self, row: int, drafter: int, state: int) -> float:
        """That the row's first draft is right."""
        return min(self._of(self._first, FIRST, drafter, state).value * self._of_row(row, state).value, 1.0)

    def _of(self, rates: dict[Key, Rate], start: Mapping[int, float], drafter: int, state: int) -> Rate:
        return rates.setdefault((drafter, state), Rate(start[min(state, 8)], PRIOR))

    def _of_row(self, row: int, state: int) -> Rate:
        return self._factor.setdefault((row, min(state, 1)), Rate(1.0, ROW_PRIOR))


@lru_cache(maxsize=1 << 16)
def tokens_per_step(miss: float, full: float, further: float, ks: tuple[int, ...], limit: int) -> list[float]:
    """A row's tokens per step in the long run for each K, of which it drafts at most `limit`. Its first draft
    is right with probability `miss`, or `full` after a step that was accepted in full; one behind a right one
    with `further`."""

    def tokens(k: int) -> float:
        stay = further ** (k - 1) if k else 0.0  # a step that begins right is accepted in full
        share = miss * stay / (1 - full * stay + miss * stay) if miss else 0.0  # of steps after full ones
        run = k if further == 1 else (1 - further**k) / (1 - further)
        return 1 + ((1 - share) * miss + share * full) * run

    return [tokens(min(k, limit)) for k in ks]
