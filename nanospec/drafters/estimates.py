"""Estimates for the policy: measured costs of steps and drafting, and acceptance probabilities of drafts."""

from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate, pairwise

from ..kernels.speculation.trim import LONGEST, NUM_COSTS

FADE = 0.999  # decay per step of drafting times, so that a drafter that seemed too slow is retried
WEIGHT = 0.2  # of the latest drafting time
DECAY, ROW_DECAY = 0.995, 0.95  # decay of old observations per new one: of all rows, of one row
PRIOR, ROW_PRIOR = 8.0, 6.0  # prior weight, in observations: of the rates below, of a row factor of 1
MISS, FULL = 0, -1  # match length of rows without a match: FULL if the last step accepted all drafts
# Initial values by match length, up to 8: roughly those of SmolLM2's greedy answers to questions and code
# edits.
FIRST = {FULL: 0.7, MISS: 0.3, 1: 0.2, 2: 0.5, 3: 0.6, 4: 0.7, 5: 0.75, 6: 0.8, 7: 0.85, 8: 0.9}
NEXT = {MISS: 0.75, 1: 0.65, 2: 0.75, 3: 0.8, 4: 0.8, 5: 0.85, 6: 0.85, 7: 0.9, 8: 0.95}
LENGTHS = range(LONGEST.value + 1)  # of matches; 0 is MISS


class StepCosts:
    """Measured step times in ms, made monotonic: more tokens never cost less."""

    def __init__(
        self,
        ms: Mapping[int, Mapping[int, float]],  # by the largest batch size that they hold for, and tokens
        captured: bool = False,  # steps are captured: K is limited to (tokens / batch size - 1) of `ms`
        # Additional time of a step per cached position: for each row, and each token the row scores.
        attention: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.ms = {size: _rising(by_tokens) for size, by_tokens in sorted(ms.items())}
        self.captured, self.attention = captured, attention
        # ms by bit length of the rows, and K: as measured, and reduced by `fade_drafting`.
        self._measured: dict[tuple[int, int], float] = {}
        self._drafting: dict[tuple[int, int], float] = {}

    def cost(self, B: int, tokens: float, context: int = 0) -> float:
        """Return the ms of a step that scores `tokens` tokens of B rows with `context` cached positions in
        total, without the time that a model takes to draft."""
        points = self._points(B)
        i = min(max(bisect_left(points, (tokens, 0.0)) - 1, 0), max(len(points) - 2, 0))
        (at, ms), (end, last) = points[i], points[min(i + 1, len(points) - 1)]
        ms += max(tokens - at, 0) * (last - ms) / max(end - at, 1)
        return ms + context * (self.attention[0] + self.attention[1] * tokens / B)

    def segments(self, B: int, context: int) -> tuple[float, list[float], list[float]]:
        """Return `cost` as base_ms, cost_at and cost_slope of `Estimates`."""
        points, per_token = self._points(B), context * self.attention[1] / B
        slopes = [(b - a) / (n - m) for (m, a), (n, b) in pairwise(points)] or [0.0]
        changes = [new - old for old, new in pairwise([-per_token, *slopes])]
        at, unused = [float(n) for n, _ in points[: len(slopes)]], NUM_COSTS.value - len(slopes)
        base = points[0][1] + context * self.attention[0] + per_token * at[0]
        return base, at + [0.0] * unused, changes + [0.0] * unused

    def by_k(self, B: int, most: int, context: int = 0) -> dict[int, float]:
        """Return the ms for each K up to `most`, with K drafts in every row and the time to draft them."""
        if self.captured:  # those of whole buckets, since drafting takes as long for fewer rows
            size, ms = next((size, ms) for size, ms in self.ms.items() if size >= B)
            return {n // size - 1: ms[n] for n in ms if n // size - 1 <= most}
        ks = range(most + 1)
        return {k: self.cost(B, B * (k + 1), context) + self.drafting(B, k) for k in ks}

    def drafting(self, B: int, k: int) -> float:
        """Return the ms that a model takes to draft k tokens for B rows, if steps are not captured (captured
        ones include it); where it was not measured, a lower bound from other sizes."""
        size = B.bit_length()
        bounds = [ms * min(k / n, 1.0) for (s, n), ms in self._drafting.items() if s <= size]
        return self._drafting.get((size, k), max(bounds, default=0.0))

    def add_drafting(self, B: int, k: int, ms: float) -> None:
        """Record that a model took `ms` to draft k tokens for B rows."""
        key = B.bit_length(), k
        old = self._drafting.get(key, ms)
        if ms > old:  # a retry that is slow again does not count as a single outlier
            old = self._measured.get(key, old)
        self._drafting[key] = self._measured[key] = old + WEIGHT * (ms - old)

    def fade_drafting(self, most: float) -> None:
        """Reduce drafting times a little, by up to `most` ms, so that those no longer measured are tried
        again."""
        self._drafting = {key: ms - min((1 - FADE) * ms, most) for key, ms in self._drafting.items()}

    def report(self) -> dict[str, object]:
        """Return the measured times, for the statistics."""
        attention = dict(zip(("per_row", "per_query"), self.attention))
        return {"step_ms_by_batch_and_tokens": self.ms, "attention_ms_per_position": attention}

    def _points(self, B: int) -> list[tuple[int, float]]:
        return [*next(ms for size, ms in self.ms.items() if size >= B).items()]


def _rising(ms: Mapping[int, float]) -> dict[int, float]:
    """Sort by key and make the values non-decreasing and positive (a coarse clock may measure 0)."""
    return dict(zip(sorted(ms), accumulate((max(ms[n], 1e-6) for n in sorted(ms)), max)))


class Rate:
    """The ratio of observed to expected (or possible) events, both with exponentially decaying weights."""

    def __init__(self, value: float, weight: float) -> None:
        self.observed, self.expected = value * weight, weight

    def add(self, observed: float, expected: float, decay: float) -> None:
        self.observed = decay * self.observed + observed
        self.expected = decay * self.expected + expected

    @property
    def value(self) -> float:
        return self.observed / self.expected


Key = tuple[int, int]  # drafter, match length (or MISS, FULL)


class Estimator:
    """Online estimates of the probability that drafts are accepted.

    Two rates are tracked over all requests: how often a row's first draft is accepted, and how often a draft
    is accepted after an accepted one. Both depend mostly on the length of the n-gram match, so they are kept
    per drafter and match length. A factor per row tracks how its first drafts compare with that average.

    Without a match (a model drafts, or K is chosen before drafts are proposed) the best predictor is the last
    step: whether all drafts of the row were accepted takes the place of the match length. The row is then a
    Markov chain of two states, and `tokens_per_step` is its stationary mean. This does not underestimate a
    small K, whose cut-off drafts are likely to be accepted in the next step.
    """

    def __init__(self) -> None:
        self._first: dict[Key, Rate] = {}
        self._next: dict[Key, Rate] = {}
        self._factor: dict[tuple[int, int], Rate] = {}  # by row, and match length, where 1 is any match
        self._state: dict[int, int] = {}  # MISS or FULL, by row

    def chances(self, num_drafters: int) -> tuple[list[float], list[float]]:
        """Return `first` and `further` of `kernels/speculation/trim.py:Estimates`."""
        keys = [(drafter, length) for drafter in range(num_drafters) for length in LENGTHS]
        first = [self._of(self._first, FIRST, *key).value for key in keys]
        return first, [self._of(self._next, NEXT, *key).value for key in keys]

    def factors(self, row: int, drafter: int) -> tuple[float, float]:
        """Return `factor` of a row in `Estimates`. `drafter`: the one that drafts without matches."""
        without = self._chance(row, drafter, self._state.get(row, MISS))
        of_all = self._of(self._first, FIRST, drafter, MISS).value
        return without / max(of_all, 1e-6), self._of_row(row, 1).value

    def tokens(self, max_drafts: Mapping[int, int], drafter: int, ks: tuple[int, ...]) -> list[float]:
        """Return the expected tokens per step of all rows together for each K, without matches. `max_drafts`
        is the maximum number of drafts of each row."""
        further, total = round(self._of(self._next, NEXT, drafter, MISS).value, 3), [0.0] * len(ks)
        for row, most in max_drafts.items():  # rounded for hits in the cache of `tokens_per_step`
            miss, full = (round(self._chance(row, drafter, state), 2) for state in (MISS, FULL))
            total = [a + b for a, b in zip(total, tokens_per_step(miss, full, further, ks, most))]
        return total

    def tokens_by_length(self, drafter: int, k: int) -> list[float]:
        """Return the expected tokens per step of a row with k drafts, for each match length."""
        rates = [
            (self._of(self._first, FIRST, drafter, n), self._of(self._next, NEXT, drafter, n))
            for n in LENGTHS
        ]
        return [1 + sum(first.value * further.value**i for i in range(k)) for first, further in rates]

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        """Update the rates with the drafts and accepted drafts of a row; 0 drafts count as a rejection."""
        state = min(match_len, LENGTHS[-1]) or self._state.get(row, MISS)
        first = self._of(self._first, FIRST, drafter, state)
        self._of_row(row, state).add(accepted > 0, first.value, ROW_DECAY)
        first.add(accepted > 0, 1.0, DECAY)
        observed, tried = accepted - 1, min(accepted, drafted - 1)
        if state == FULL:  # the first draft follows accepted ones, too
            observed, tried = observed + 1, tried + 1
        if tried > 0:
            self._of(self._next, NEXT, drafter, max(state, MISS)).add(observed, tried, DECAY**tried)
        self._state[row] = FULL if 0 < drafted == accepted else MISS

    def reset(self, row: int) -> None:
        """Forget the request of a row."""
        self._state.pop(row, None)
        for state in (FULL, MISS, 1):
            self._factor.pop((row, state), None)

    def _chance(self, row: int, drafter: int, state: int) -> float:
        """Return the probability that the row's first draft is accepted."""
        return min(self._of(self._first, FIRST, drafter, state).value * self._of_row(row, state).value, 1.0)

    def _of(self, rates: dict[Key, Rate], start: Mapping[int, float], drafter: int, state: int) -> Rate:
        if (drafter, state) not in rates:
            rates[drafter, state] = Rate(start[state], PRIOR)
        return rates[drafter, state]

    def _of_row(self, row: int, state: int) -> Rate:
        key = row, min(state, 1)
        if key not in self._factor:
            self._factor[key] = Rate(1.0, ROW_PRIOR)
        return self._factor[key]


@lru_cache(maxsize=1 << 16)
def tokens_per_step(miss: float, full: float, further: float, ks: tuple[int, ...], most: int) -> list[float]:
    """Return a row's mean tokens per step for each K, if it has at most `most` drafts.

    The first draft is accepted with probability `full` after a step whose drafts were all accepted, else
    `miss`; a draft after an accepted one with probability `further`.
    """

    def tokens(k: int) -> float:
        stay = further ** (k - 1) if k else 0.0  # P(all accepted | the first is accepted)
        share = miss * stay / (1 - full * stay + miss * stay) if miss else 0.0  # of steps in state FULL
        run = k if further == 1 else (1 - further**k) / (1 - further)
        return 1 + ((1 - share) * miss + share * full) * run

    return [tokens(min(k, most)) for k in ks]
