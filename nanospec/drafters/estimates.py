"""Estimates for the policy: measured costs of steps and drafting, and acceptance probabilities of drafts."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median
from typing import NamedTuple

LATEST, ENOUGH = 32, 3  # maximum and minimum number of calls from which drafting times are computed
FADE = 0.999  # decay per step of measured drafting times, so that a drafter that seemed too slow is retried
CAUTION = 0.75  # discounts the time saved when a row ends, a small and noisy difference of measurements
DECAY, ROW_DECAY = 0.995, 0.95  # decay of old observations per new one: of all rows, of one row
PRIOR, ROW_PRIOR = 8.0, 6.0  # prior weight, in observations: of the rates below, of a row factor of 1
MISS, FULL = 0, -1  # match length of rows without a match: FULL if the last step accepted all drafts
# Initial values by match length, up to 8: roughly those of SmolLM2's greedy answers to questions and code
# edits.
FIRST = {FULL: 0.7, MISS: 0.3, 1: 0.2, 2: 0.5, 3: 0.6, 4: 0.7, 5: 0.75, 6: 0.8, 7: 0.85, 8: 0.9}
NEXT = {MISS: 0.75, 1: 0.65, 2: 0.75, 3: 0.8, 4: 0.8, 5: 0.85, 6: 0.85, 7: 0.9, 8: 0.95}


class StepCosts:
    """Measured step times in ms, made monotonic: more drafts never cost less."""

    def __init__(
        self,
        # By batch size and K, if steps are captured. Every batch size has K = 0; larger K may be missing.
        captured: Mapping[int, Mapping[int, float]] | None = None,
        packed: Mapping[int, float] | None = None,  # by number of tokens scored, if steps are packed
        # The time a model takes to draft in a packed step, by number of rows and of drafts per row. Captured
        # steps include it; that of n-gram lookup is negligible.
        propose: Callable[[int, int], float] = lambda rows, drafts: 0.0,
        # Additional time of a packed step per cached position: for each row, and each token the row scores.
        attention: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.captured = {size: _rising(by_k) for size, by_k in sorted((captured or {}).items())}
        self.packed, self.propose, self.attention = _rising(packed or {}), propose, attention
        self._tokens, self._ms = [*self.packed], [*self.packed.values()]
        self._slopes = [(b - a) / (n - m) for (m, a), (n, b) in pairwise(self.packed.items())]

    def cost(self, B: int, tokens: float, context: int = 0) -> float:
        """Return the ms of a step, without `propose`, that scores `tokens` tokens of B rows with `context`
        cached positions in total. For captured steps, this is the time of the smallest bucket that fits."""
        if self.captured:
            return next(ms for k, ms in self._bucket(B).items() if B * (k + 1) >= tokens)
        i, (row, query) = self._segment(tokens), self.attention
        ms = self._ms[i] + (tokens - self._tokens[i]) * self._slopes[i]
        return ms + context * (row + query * tokens / B)

    def by_k(self, B: int, most: int, context: int = 0) -> dict[int, float]:
        """Return the ms for each K up to `most`, with K drafts in every row."""
        if self.captured:
            return {k: ms for k, ms in self._bucket(B).items() if k <= most}
        return {k: self.cost(B, B * (k + 1), context) + self.propose(B, k) for k in range(most + 1)}

    def min_slope(self, B: int, context: int) -> float:
        """Return the minimum ms that one more token adds to a packed step of B rows of any size."""
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
    """Sort by key and make the values non-decreasing and positive (a coarse clock may measure 0)."""
    return dict(zip(sorted(ms), accumulate((max(ms[n], 1e-6) for n in sorted(ms)), max)))


class DraftTimes:
    """Measured ms per call of a drafter, by number of rows (in powers of two) and of drafts per row."""

    def __init__(self) -> None:
        self._calls = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=LATEST))
        self._ms: dict[tuple[int, int], float] = {}

    def add(self, rows: int, k: int, ms: float) -> None:
        """Record the time of a call."""
        times = self._calls[key := (rows.bit_length(), k)]
        times.append(ms)
        if len(times) >= ENOUGH:
            self._ms[key] = median(times)

    def fade(self) -> None:
        """Reduce all times a little, so that those no longer measured are tried again."""
        self._ms = {key: FADE * ms for key, ms in self._ms.items()}

    def __call__(self, rows: int, k: int) -> float:
        """Return the ms of a call; if too few were measured, a lower bound from other sizes."""
        size = rows.bit_length()
        bounds = [ms * min(k / n, 1.0) for (s, n), ms in self._ms.items() if s <= size]
        return self._ms.get((size, k), max(bounds, default=0.0))


class RowAccounts:
    """Balance of each row in ms: the time that drafts have saved it, minus the time that they have cost it.

    Drafts of one row lengthen the steps of all rows. `plain`: ms of a step without drafts. An accepted draft
    ends its request a step earlier, so a later step lacks that row, which saves each of B rows `_shared` ms.
    The draft's own row saves another `plain - B * _shared` ms.
    """

    def __init__(self) -> None:
        self._shared, self._own = 0.0, 0.0  # ms an accepted draft saves every row, and its own row on top
        self._spent = 0.0  # ms that drafts have cost each row, minus the shared savings
        self._saved: dict[int, float] = {}  # ms saved by row; the balance is this minus `_spent`

    def allowed(self, gains: Mapping[int, float], plain: float, alone: float) -> float:
        """Return the ms by which drafts may lengthen a step: the minimum over rows of the balance plus what
        the row's own drafts are expected to save. `gains` is the expected number of accepted drafts of each
        row; `plain` and `alone` are the ms of a step without drafts, for all rows and for one row alone."""
        self._shared = CAUTION * (plain - alone) / max(len(gains) - 1, 1)
        self._own = plain - len(gains) * self._shared
        saved = (self._saved.setdefault(row, self._spent) + self._own * gain for row, gain in gains.items())
        return min(saved) - self._spent

    def loss(self, ms: float, gain: float) -> float:
        """Return the net ms that each row loses by drafts that add `ms` to a step and yield `gain` tokens."""
        return ms - gain * self._shared

    def spend(self, ms: float) -> None:
        """Charge every row the `ms` that the drafts of a step added."""
        self._spent += ms

    def credit(self, row: int, accepted: int) -> None:
        """Credit the savings of a row's accepted drafts to all rows and to the row itself."""
        self._spent -= accepted * self._shared
        self._saved[row] = self._saved.get(row, self._spent) + accepted * self._own

    def close(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._saved.pop(row, None)


class RowProposal(NamedTuple):
    """The drafts proposed for a row; see `Proposal` for the fields."""

    row: int
    drafter: int
    num_drafts: int
    match_len: int


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
        self._factor: dict[int, dict[int, Rate]] = {}  # by row; one for all match lengths of at least 1
        self._state: dict[int, int] = {}  # MISS or FULL, by row

    def gains(self, proposal: RowProposal, min_gain: float = 0) -> list[float]:
        """Return, for each draft of a row, the probability that it and all previous ones are accepted, ending
        before the first that is below `min_gain`."""
        row, drafter, num_drafts, match_len = proposal
        gain, gains = self._chance(row, drafter, match_len or self._state.get(row, MISS)), list[float]()
        further = self._of(self._next, NEXT, drafter, match_len).value
        while len(gains) < num_drafts and gain >= min_gain:
            gains.append(gain)
            gain *= further
        return gains

    def tokens(self, limits: Mapping[int, int], drafter: int, ks: tuple[int, ...]) -> list[float]:
        """Return the expected tokens per step of all rows together for each K, without matches. `limits` is
        the maximum number of drafts of each row."""
        further, total = round(self._of(self._next, NEXT, drafter, MISS).value, 3), [0.0] * len(ks)
        for row, limit in limits.items():  # rounded for hits in the cache of `tokens_per_step`
            miss, full = (round(self._chance(row, drafter, state), 2) for state in (MISS, FULL))
            total = [a + b for a, b in zip(total, tokens_per_step(miss, full, further, ks, limit))]
        return total

    def observe(self, row: int, drafter: int, match_len: int, drafted: int, accepted: int) -> None:
        """Update the rates with the drafts and accepted drafts of a row; 0 drafts count as a rejection."""
        state = match_len or self._state.get(row, MISS)
        first = self._of(self._first, FIRST, drafter, state)
        self._of_row(row, state).add(accepted > 0, first.value, ROW_DECAY)
        first.add(accepted > 0, 1.0, DECAY)
        observed, tried = accepted - 1, min(accepted, drafted - 1)
        if state == FULL:  # the first draft follows accepted ones, too
            observed, tried = observed + 1, tried + 1
        if tried > 0:
            self._of(self._next, NEXT, drafter, match_len).add(observed, tried, DECAY**tried)
        self._state[row] = FULL if 0 < drafted == accepted else MISS

    def reset(self, row: int) -> None:
        """Forget the request of a row."""
        self._state.pop(row, None)
        self._factor.pop(row, None)

    def _chance(self, row: int, drafter: int, state: int) -> float:
        """Return the probability that the row's first draft is accepted."""
        return min(self._of(self._first, FIRST, drafter, state).value * self._of_row(row, state).value, 1.0)

    def _of(self, rates: dict[Key, Rate], start: Mapping[int, float], drafter: int, state: int) -> Rate:
        return rates.setdefault((drafter, state), Rate(start[min(state, 8)], PRIOR))

    def _of_row(self, row: int, state: int) -> Rate:
        return self._factor.setdefault(row, {}).setdefault(min(state, 1), Rate(1.0, ROW_PRIOR))


@lru_cache(maxsize=1 << 16)
def tokens_per_step(miss: float, full: float, further: float, ks: tuple[int, ...], limit: int) -> list[float]:
    """Return a row's mean tokens per step for each K, if it has at most `limit` drafts.

    The first draft is accepted with probability `full` after a step whose drafts were all accepted, else
    `miss`; a draft after an accepted one with probability `further`.
    """

    def tokens(k: int) -> float:
        stay = further ** (k - 1) if k else 0.0  # P(all accepted | the first is accepted)
        share = miss * stay / (1 - full * stay + miss * stay) if miss else 0.0  # of steps in state FULL
        run = k if further == 1 else (1 - further**k) / (1 - further)
        return 1 + ((1 - share) * miss + share * full) * run

    return [tokens(min(k, limit)) for k in ks]
