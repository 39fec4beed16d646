"""What the policy weighs: what steps and drafting cost, as measured, and how likely drafts are right."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

LATEST, ENOUGH = 32, 3  # calls that tell what drafting takes, and the fewest that do
FADE = 0.999  # of the times of drafting at each step: what seemed too slow is tried again some time
CAUTION = 0.75  # of what the end of a row seems to save; it is a small difference of measured times
DECAY, ROW_DECAY = 0.995, 0.95  # weight of the past at each observation: of all rows, of a row
PRIOR, ROW_PRIOR = 8.0, 6.0  # how many observations the first values below, and a factor of 1, count for
MISS, FULL = 0, -1  # in place of the length of a match: whether the last step was accepted in full
# First values by that length, up to 8: about the shares of SmolLM2's greedy answers to questions and code
# edits.
FIRST = {FULL: 0.7, MISS: 0.3, 1: 0.2, 2: 0.5, 3: 0.6, 4: 0.7, 5: 0.75, 6: 0.8, 7: 0.85, 8: 0.9}
NEXT = {MISS: 0.75, 1: 0.65, 2: 0.75, 3: 0.8, 4: 0.8, 5: 0.85, 6: 0.85, 7: 0.9, 8: 0.95}


class StepCosts:
    """Measured ms of a step, smoothed: more drafts never cost less.

    Attributes:
        captured: ms by captured batch size and K, ascending; empty if steps are packed. Every batch size
            has K = 0; larger K may be missing.
        packed: ms by number of tokens scored, ascending; empty if steps are captured.
        propose: (rows, drafts of each) -> ms that a model takes to draft in a packed step; lookup takes next
            to nothing. A captured step includes it.
        attention: what a packed step takes beyond that for each cached position of a row: ms, and ms for
            each token that is scored there.
    """

    def __init__(
        self,
        captured: Mapping[int, Mapping[int, float]] | None = None,
        packed: Mapping[int, float] | None = None,
        propose: Callable[[int, int], float] = lambda rows, drafts: 0.0,
        attention: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.captured = {size: _rising(by_k) for size, by_k in sorted((captured or {}).items())}
        self.packed, self.propose, self.attention = _rising(packed or {}), propose, attention
        self._tokens, self._ms = [*self.packed], [*self.packed.values()]
        self._slopes = [(b - a) / (n - m) for (m, a), (n, b) in pairwise(self.packed.items())]

    def cost(self, B: int, tokens: float, context: int = 0) -> float:
        """Return the ms of a step that scores so many tokens of B rows, which have `context` cached
        positions together, without `propose`. Captured: of the next larger batch and K."""
        if self.captured:
            return next(ms for k, ms in self._bucket(B).items() if B * (k + 1) >= tokens)
        i, (row, query) = self._segment(tokens), self.attention
        ms = self._ms[i] + (tokens - self._tokens[i]) * self._slopes[i]
        return ms + context * (row + query * tokens / B)

    def by_k(self, B: int, most: int, context: int = 0) -> dict[int, float]:
        """Return ms by K, up to `most`, if every row has K drafts."""
        if self.captured:
            return {k: ms for k, ms in self._bucket(B).items() if k <= most}
        return {k: self.cost(B, B * (k + 1), context) + self.propose(B, k) for k in range(most + 1)}

    def least_slope(self, B: int, context: int) -> float:
        """Return the ms that a further token adds at least to a packed step, whatever else it scores."""
        return min(self._slopes[self._segment(B + 1) :]) + context * self.attention[1] / B

    def _bucket(self, B: int) -> dict[int, float]:
        return next(by_k for size, by_k in self.captured.items() if size >= B)

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


class DraftTimes:
    """ms that a drafter takes, from its latest calls, by the rows of the step and the drafts of each."""

    def __init__(self) -> None:
        self._calls: defaultdict[tuple[int, int], deque[tuple[float, float]]]
        self._calls = defaultdict(lambda: deque(maxlen=LATEST))
        self._ms: dict[tuple[int, int], float] = {}

    def add(self, rows: int, k: int, ms: float, fraction: float) -> None:
        """Count a call that made drafts for a `fraction` of the rows that it was asked for."""
        key = rows.bit_length(), k
        self._calls[key].append((ms, fraction))
        times, fractions = zip(*self._calls[key])
        if len(times) >= ENOUGH:  # calls without drafts count to those with some
            self._ms[key] = median(times) * (len(fractions) + 1) / (sum(fractions) + 1)

    def fade(self) -> None:
        """Forget a little of all times; those of calls that are made are counted anew."""
        self._ms = {key: FADE * ms for key, ms in self._ms.items()}

    def __call__(self, rows: int, k: int) -> float:
        """Return the ms of a call; where too few were made, what others show it to take at least."""
        size = rows.bit_length()
        least = [ms * min(k / n, 1.0) for (s, n), ms in self._ms.items() if s <= size]
        return self._ms.get((size, k), max(least, default=0.0))


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

    def allowed(self, gains: Mapping[int, float], plain: float, alone: float) -> float:
        """Return the ms that the poorest row may lose in a step: its account, and what its own drafts will
        save it. `gains`: of the drafts of each row, how many will be accepted. `plain`, `alone`: ms of a step
        without drafts, of all the rows and of one."""
        self._every = CAUTION * (plain - alone) / max(len(gains) - 1, 1)
        self._own = plain - len(gains) * self._every
        saved = (self._saved.setdefault(row, self._spent) + self._own * gain for row, gain in gains.items())
        return min(saved) - self._spent

    def loss(self, ms: float, gain: float) -> float:
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


class Offer(NamedTuple):
    """What was drafted for a row; see `Proposal`."""

    row: int
    drafter: int
    num_drafts: int
    match_len: int


class Rate:
    """How often something happened over how often it could have, or was expected to; the past fades."""

    def __init__(self, value: float, weight: float) -> None:
        self.right, self.expected = value * weight, weight

    def add(self, right: float, expected: float, decay: float) -> None:
        self.right = decay * self.right + right
        self.expected = decay * self.expected + expected

    @property
    def value(self) -> float:
        return self.right / self.expected


Key = tuple[int, int]  # drafter, and length of the match


class Estimator:
    """How likely drafts are right.

    Two shares are counted: of first drafts that are right, and of those behind a right one. Both depend most
    on how many tokens matched where a draft was looked up, so they are kept by drafter and length of the
    match, of all requests together; a new request starts from them. A text may repeat itself more or less
    than others: by what factor a row's first drafts are right more often is counted for each row.

    Where nothing has matched (a model guesses, or K is chosen before there are drafts) the row's last step
    tells most: whether it was accepted in full takes the place of the length. A row is then a chain of two
    states, and `tokens_per_step` is its long run. It gives a small K its due: what that leaves is right in
    the next step too.
    """

    def __init__(self) -> None:
        self._first: dict[Key, Rate] = {}  # by drafter
        self._next: dict[Key, Rate] = {}
        self._factor: dict[int, dict[int, Rate]] = {}  # by row, for all lengths from 1 on together
        self._state: dict[int, int] = {}  # MISS or FULL, by row

    def gains(self, offer: Offer, least: float = 0) -> list[float]:
        """Return the chance of each draft of a row that it and all before it are right, down to `least`."""
        row, drafter, num_drafts, match_len = offer
        gain, gains = self._chance(row, drafter, match_len or self._state.get(row, MISS)), list[float]()
        further = self._of(self._next, NEXT, drafter, match_len).value
        while len(gains) < num_drafts and gain >= least:
            gains.append(gain)
            gain *= further
        return gains

    def tokens(self, limits: Mapping[int, int], drafter: int, ks: tuple[int, ...]) -> list[float]:
        """Return what rows give per step together for each K, without a match. `limits`: the most drafts by
        row."""
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
        self._factor.pop(row, None)

    def _chance(self, row: int, drafter: int, state: int) -> float:
        """Return the chance that the row's first draft is right."""
        return min(self._of(self._first, FIRST, drafter, state).value * self._of_row(row, state).value, 1.0)

    def _of(self, rates: dict[Key, Rate], start: Mapping[int, float], drafter: int, state: int) -> Rate:
        return rates.setdefault((drafter, state), Rate(start[min(state, 8)], PRIOR))

    def _of_row(self, row: int, state: int) -> Rate:
        return self._factor.setdefault(row, {}).setdefault(min(state, 1), Rate(1.0, ROW_PRIOR))


@lru_cache(maxsize=1 << 16)
def tokens_per_step(miss: float, full: float, further: float, ks: tuple[int, ...], limit: int) -> list[float]:
    """Return a row's tokens per step in the long run for each K, of which it drafts at most `limit`.

    Its first draft is right with probability `miss`, or `full` after a step that was accepted in full; one
    behind a right one with `further`.
    """

    def tokens(k: int) -> float:
        stay = further ** (k - 1) if k else 0.0  # a step that begins right is accepted in full
        share = miss * stay / (1 - full * stay + miss * stay) if miss else 0.0  # of steps after full ones
        run = k if further == 1 else (1 - further**k) / (1 - further)
        return 1 + ((1 - share) * miss + share * full) * run

    return [tokens(min(k, limit)) for k in ks]
