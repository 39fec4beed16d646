"""Choose the requests of the next step, and their numbers of tokens.

Running requests that are prefilled all decode in every step. What is left of the token budget goes to
prompts, first come first served and in chunks, so that a long prompt never stalls a running request for
longer than one chunk. If a prompt does not fit the rest of the budget and another can follow, it takes half
of it, so that a short one's first token does not wait for a long one's end. When blocks run out, the last
admitted request is preempted: it gives its blocks back and later recomputes its K/V, mostly from the cache.

A prompt's blocks are named in the cache when its chunk is scheduled, not when it is computed: within one
forward pass all K/V of a layer are written before they are read, so a request scheduled behind it in the same
pass may already share them, as the `n` samples of one prompt do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from .blocks import BlockPool
from .request import Request


@dataclass
class Plan:
    """One engine step.

    Attributes:
        prefill: (request, first token, number of tokens) of each prompt chunk.
        decode: the requests that decode.
        admitted: requests that got a row, and how many of their blocks hold their K/V already.
        grown: requests that got blocks, and how many they had before.
        preempted: the rows taken from preempted requests.
    """

    prefill: list[tuple[Request, int, int]] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    admitted: dict[Request, int] = field(default_factory=dict)
    grown: dict[Request, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)


class Scheduler:
    """Owns the queues, the rows and the blocks of all requests."""

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int, lookahead: int, lag: int
    ) -> None:
        """`max_tokens` per step; `lookahead` K: drafts for which slots are allocated ahead; `lag`: steps
        that are queued before their results are known, each of which may add K + 1 tokens."""
        self.block_size, self.max_tokens, self.lookahead = block_size, max_tokens, lookahead
        self.slots_ahead = lookahead + lag * (lookahead + 1)  # its own drafts, and K + 1 per step in flight
        self._num_blocks, self._num_rows = num_blocks, num_rows
        self.reset()

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, held: Collection[Request] = ()) -> Plan:
        """Decide the next step and allocate its blocks. Those that are `held` do not decode in it."""
        plan = Plan()
        budget = self.max_tokens
        for request in list(self.running):
            if request.row < 0 or not request.is_prefilled or request in held:  # no row: preempted just now
                continue
            if self._extend(request, plan):
                plan.decode.append(request)
                budget -= 1 + self.lookahead
        if plan.decode:
            budget = max(budget, self.block_size)  # prompts never starve
        prompts = [request for request in self.running if not request.is_prefilled]
        for i, request in enumerate(prompts, 1):
            if budget > 0:
                more = i < len(prompts) or self._next(plan) is not None
                budget -= self._chunk(request, budget, more, plan)
        while budget > 0 and (candidate := self._next(plan)) is not None:
            request, cached = candidate
            self._admit(request, cached)
            self.waiting.remove(request)  # after `_admit`: an interrupt must not lose it
            plan.admitted[request] = len(cached)
            if not request.is_prefilled:
                budget -= self._chunk(request, budget, self._next(plan) is not None, plan)
        return plan

    def reset(self) -> None:
        """Drop all requests; every row and block is free again and nothing is cached."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.pool = BlockPool(self._num_blocks)
        self._free_rows = list(range(self._num_rows - 1, -1, -1))

    def finish(self, request: Request) -> None:
        """Give back everything a finished or aborted request holds."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def register(self, request: Request) -> None:
        """Name the request's blocks whose K/V are all computed, or will be in this pass."""
        for i in range(request.num_registered, request.num_computed // self.block_size):
            self.pool.register(request.blocks[i], request.hashes(self.block_size)[i])
            request.num_registered = i + 1

    def forget_unwritten(self, plan: Plan) -> list[Request]:
        """Forget the blocks that a failed prefill was to fill. Return the requests that have some of them."""
        lost = {block for r, start, _ in plan.prefill for block in r.blocks[start // self.block_size :]}
        self.pool.forget(lost)
        return [request for request in self.running if not lost.isdisjoint(request.blocks)]

    def _next(self, plan: Plan) -> tuple[Request, list[int]] | None:
        """Return the first waiting request and its cached blocks, if there are a row and blocks for it.

        A request whose next block a running prompt will compute is skipped until it can share that block.
        Returns None after a preemption, as its blocks are for running requests.
        """
        if not self.waiting or not self._free_rows or plan.preempted:
            return None
        begun = [request for request in self.running if not request.is_prefilled]
        for request in self.waiting:
            reusable = request.hashes(self.block_size)[: (request.num_tokens - 1) // self.block_size]
            cached = self.pool.match(reusable)
            if not any(self._will_share(request, len(cached), other) for other in begun):
                missing = self._blocks_ahead(request) - len(cached)
                return (request, cached) if missing <= self.pool.num_available(cached) else None
        return None

    def _will_share(self, request: Request, i: int, other: Request) -> bool:
        """Return whether both prompts have the same full block `i`, and it is not the request's last."""
        hashes, others = request.hashes(self.block_size), other.hashes(self.block_size)
        in_both = i < min(len(others), (request.num_tokens - 1) // self.block_size)
        return in_both and hashes[i] == others[i]

    def _admit(self, request: Request, cached: list[int]) -> None:
        """Give a waiting request a row and its blocks, the `cached` ones first."""
        self.pool.share(cached)
        missing = self._blocks_ahead(request) - len(cached)
        request.blocks = cached + (self.pool.allocate(missing) or [])  # enough are free: `_next` has counted
        request.num_registered = len(cached)
        request.num_computed = len(cached) * self.block_size
        if not request.num_preemptions:  # else the cached blocks are its own
            request.num_cached_tokens = request.num_computed
        request.row = self._free_rows.pop()
        request.start_time = request.start_time or time.perf_counter()
        self.running.append(request)

    def _chunk(self, request: Request, budget: int, more: bool, plan: Plan) -> int:
        """Schedule the next chunk of a prompt; return its length. `more`: other prompts follow, so one that
        does not fit into the budget takes half of it."""
        start = request.num_computed
        count = request.num_tokens - 1 - start
        if count > budget:
            count = max(budget // 2, min(self.block_size, budget)) if more else budget
        plan.prefill.append((request, start, count))
        request.num_computed += count
        self.register(request)
        return count

    def _blocks_ahead(self, request: Request) -> int:
        """Return the number of blocks for the request's text and what may be added until its results are
        known."""
        return -(-min(request.num_tokens + self.slots_ahead, request.max_len) // self.block_size)

    def _extend(self, request: Request, plan: Plan) -> bool:
        """Allocate the slots of the next step, preempting later requests if need be."""
        missing = self._blocks_ahead(request) - len(request.blocks)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return False
        plan.grown[request] = len(request.blocks)
        request.blocks += blocks
        return True

    def _preempt(self, request: Request, plan: Plan) -> None:
        # Queued first, so that it is in a queue whatever interrupts this; behind those that came earlier.
        earlier = sum(other.arrival_time < request.arrival_time for other in self.waiting)
        self.waiting.insert(earlier, request)
        self.running.remove(request)
        plan.preempted.append(request.row)
        self._release(request)
        request.num_preemptions += 1
        request.num_computed = 0

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self._free_rows.append(request.row)
        request.blocks, request.row, request.num_registered = [], -1, 0
