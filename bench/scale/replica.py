"""One replica over time: a queue, prompts in pieces, rows that decode, and a cache of prefixes.

It works as the engine does: in a step, a pass over pieces of prompts, up to a budget of tokens, goes ahead
of a step of all rows that decode. A request gets a row if its K/V fit to its end (the engine gives pages as a
text grows, and takes them back if they run out; that is left out), first come first served.

Steps without prompts are alike until a row ends, so they are run as one, which an arrival cuts short at the
end of the step under way. Rows of a kind advance alike (`guessing.py`): `_progress` is what a row of the kind
has emitted since the beginning of time, and a heap has where each row ends.

Invariants: K/V in use, prefixes included, never exceed the cache; a prefix is kept while a request uses it
and until its room is needed, the one longest unused goes first; a request computes its prompt less what was
cached.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from bench.scale.costs import Costs
from bench.scale.guessing import Guessing
from bench.scale.workload import NO_PREFIX, Request

AT_ONCE = 32  # steps, at most: the text grows meanwhile
SLIGHT = 1e-6  # of a token: what sums of floats may be off by


class Cache:
    """The K/V of a replica, in tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._users: dict[int, int] = {}  # of the prefixes that are in use
        self._idle: OrderedDict[int, int] = OrderedDict()  # tokens of the others, the longest unused first
        self._idle_tokens = 0

    def admit(self, request: Request) -> int | None:
        """Take room for a request to its end; how many tokens of its prompt are there. None, and no change,
        if it does not fit."""
        known = request.prefix in self._users or request.prefix in self._idle
        need = request.prompt + request.output - (request.shared if known else 0)
        spare = self._idle_tokens - self._idle.get(request.prefix, 0)
        if self.used + need - spare > self.capacity:
            return None
        if request.prefix in self._idle:
            self._idle_tokens -= self._idle.pop(request.prefix)
        while self.used + need > self.capacity:
            tokens = self._idle.popitem(last=False)[1]
            self.used -= tokens
            self._idle_tokens -= tokens
        self.used += need
        if request.prefix != NO_PREFIX:
            self._users[request.prefix] = self._users.get(request.prefix, 0) + 1
        return min(request.shared, request.prompt - 1) if known else 0

    def release(self, request: Request) -> None:
        """Give back what was its own."""
        self.used -= request.prompt - request.shared + request.output
        if request.prefix != NO_PREFIX:
            self._users[request.prefix] -= 1
            if not self._users[request.prefix]:
                del self._users[request.prefix]
                self._idle[request.prefix] = request.shared
                self._idle_tokens += request.shared


@dataclass
class Run:
    """Steps under way: `steps` of `seconds` each, with K drafts and these pieces of prompts (of one step)."""

    begin: float
    seconds: float
    steps: int
    k: int
    chunks: list[tuple[Request, int]]

    @property
    def end(self) -> float:
        return self.begin + self.steps * self.seconds


@dataclass
class Totals:
    """What a replica did: seconds, row-seconds and K-seconds of its steps, prompt tokens."""

    busy: float = 0.0
    rows: float = 0.0
    decoding: float = 0.0
    guessed: float = 0.0
    computed: int = 0
    cached: int = 0


@dataclass
class Replica:
    """`rows` at most run at once; `chunk` prompt tokens are computed in a step at most. `prefills`: it
    computes prompts only, and hands requests on with their first token."""

    costs: Costs
    guessing: Guessing
    rows: int = 256
    chunk: int = 2048
    prefills: bool = False
    run: Run | None = None
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.cache = Cache(self.costs.kv_tokens)
        self.waiting: deque[Request] = deque()
        self._prompts: list[Request] = []
        kinds = len(self.guessing.kinds)
        self._progress = [0.0] * kinds
        self._ends: list[list[tuple[float, int, Request]]] = [[] for _ in range(kinds)]
        self._decoding = [0] * kinds  # rows of each kind
        self._context = 0.0  # cached positions of the rows that decode
        self._number = 0

    def add(self, request: Request, now: float) -> None:
        """Queue a request. `plan` says when the next thing happens."""
        if request.prompt + request.output > self.cache.capacity:
            raise ValueError(
                f"A request of {request.prompt} and {request.output} tokens is beyond a replica's cache of "
                f"{self.cache.capacity}."
            )
        self.waiting.append(request)
        if self.run and len(self.waiting) == 1 and self._running < self.rows:
            done = int((now - self.run.begin) / self.run.seconds) + 1
            self.run.steps = min(self.run.steps, done)

    @property
    def _running(self) -> int:
        return len(self._prompts) + sum(self._decoding)

    def plan(self, now: float) -> None:
        """Begin the next steps, if there is anything to do."""
        while self.waiting and self._running < self.rows:
            if (cached := self.cache.admit(self.waiting[0])) is None:
                break
            self._start(self.waiting.popleft(), cached, now)
        chunks, budget = [], self.chunk
        for request in self._prompts:
            if not budget:
                break
            chunks.append((request, min(request.left, budget)))
            budget -= chunks[-1][1]
        total = sum(self._decoding)
        if not chunks and not total:
            return
        ms, k, steps = 0.0, 0, 1
        if chunks:
            ms += self.costs.prompts([(n, r.prompt - r.left) for r, n in chunks])
        if total:
            k = self.guessing.choose(self.costs, self._decoding, self._context)
            ms += self.costs.step(total, k, self._context)
            steps = 1 if chunks else self._steps(k)
        self.run = Run(now, ms / 1e3, steps, k, chunks)

    def _start(self, request: Request, cached: int, now: float) -> None:
        if request.start < 0:
            request.start, request.cached, request.left = now, cached, request.prompt - cached
            self.totals.cached += request.cached
        if request.left:
            self._prompts.append(request)
        else:  # prefilled elsewhere
            self._decode(request)

    def _decode(self, request: Request) -> None:
        """From its second token on."""
        kind = request.kind
        self._number += 1
        ends = self._progress[kind] + request.output - 1
        heapq.heappush(self._ends[kind], (ends, self._number, request))
        self._decoding[kind] += 1
        self._context += request.prompt + 1

    def _steps(self, k: int) -> int:
        """Until the next row ends."""
        left = AT_ONCE
        for kind, ends in enumerate(self._ends):
            if ends:
                tokens = ends[0][0] - self._progress[kind]
                left = min(left, math.ceil(tokens / self.guessing.tokens[k][kind] - SLIGHT))
        return max(left, 1)

    def finish(self) -> list[Request]:
        """End the steps under way; the requests that leave: they have all tokens, or are to be handed on."""
        assert self.run
        run, self.run = self.run, None
        self._count(run)
        left = self._emit(run) if any(self._decoding) else []
        for request, n in run.chunks:
            request.left -= n
            if not request.left:
                request.first = run.end
                self._prompts.remove(request)
                if request.output == 1 or self.prefills:
                    left.append(request)
                else:
                    self._decode(request)
        for request in left:
            self.cache.release(request)
            if request.output == 1 or not self.prefills:
                request.end = run.end
        return left

    def _count(self, run: Run) -> None:
        seconds, decoding = run.steps * run.seconds, sum(self._decoding)
        self.totals.busy += seconds
        self.totals.rows += self._running * seconds
        self.totals.decoding += decoding * seconds
        self.totals.guessed += run.k * decoding * seconds
        self.totals.computed += sum(n for _, n in run.chunks)

    def _emit(self, run: Run) -> list[Request]:
        """What the rows that decode emit; those that end."""
        ended = []
        for kind, tokens in enumerate(self.guessing.tokens[run.k]):
            if self._decoding[kind]:
                self._progress[kind] += tokens * run.steps
                self._context += tokens * run.steps * self._decoding[kind]
            ends = self._ends[kind]
            while ends and ends[0][0] <= self._progress[kind] + SLIGHT:
                at, _, request = heapq.heappop(ends)
                self._decoding[kind] -= 1
                self._context -= request.prompt + request.output + self._progress[kind] - at
                ended.append(request)
        return ended
