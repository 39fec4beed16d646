"""Choose the requests of the next step and the number of tokens of each.

All running requests that are prefilled decode in every step. Prompts share the rest of the token budget,
first come first served and in chunks, so that a long prompt never stalls a running request for longer than
one chunk. A prompt that does not fit in the rest of the budget takes half of it if another prompt can follow,
so that a short prompt does not wait until a long one is complete. When blocks run out, the request admitted
last is preempted: its blocks are freed, and its K/V are recomputed later unless they are still cached.

The blocks of a prompt are registered in the prefix cache when its chunk is scheduled, not when it is
computed. In a forward pass, all K/V of a layer are written before they are read, so a request scheduled later
in the same step may already share them, as the `n` outputs of a prompt do.
"""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from .blocks import BlockPool
from .request import Request


@dataclass
class Plan:
    """The schedule of an engine step."""

    # Request, first token and number of tokens of each prompt chunk.
    prefill: list[tuple[Request, int, int]] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    # Requests that got a row: number of their blocks found in the prefix cache.
    admitted: dict[Request, int] = field(default_factory=dict)
    # Requests that got more blocks: number of blocks they had before.
    new_blocks: dict[Request, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)  # rows


class Scheduler:
    """Manages the queues, rows and blocks of all requests."""

    def __init__(
        self, num_blocks: int, block_size: int, num_rows: int, max_tokens: int, max_k: int, lag: int
    ) -> None:
        """`max_tokens`: token budget of a step. `max_k`: largest K of a step. `lag`: number of further
        steps queued before a step's results are read, each of which may add K + 1 tokens."""
        self.block_size, self.max_tokens, self.max_k = block_size, max_tokens, max_k
        self.slots_ahead = max_k + lag * (max_k + 1)  # drafts, and K + 1 tokens per step in flight
        self._num_blocks, self._num_rows = num_blocks, num_rows
        self.reset()

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, held: Collection[Request] = ()) -> Plan:
        """Plan the next step and allocate its blocks. `held` requests do not decode in it."""
        plan = Plan()
        budget = self.max_tokens
        for request in list(self.running):
            if request.row < 0 or not request.is_prefilled or request in held:  # row < 0: preempted above
                continue
            if self._extend(request, plan):
                plan.decode.append(request)
                budget -= 1 + self.max_k
        if plan.decode:
            budget = max(budget, self.block_size)  # so that prompts never starve
        prompts = [request for request in self.running if not request.is_prefilled]
        for i, request in enumerate(prompts, 1):
            if budget > 0:
                others_follow = i < len(prompts) or self._next(plan) is not None
                budget -= self._chunk(request, budget, others_follow, plan)
        while budget > 0 and (candidate := self._next(plan)) is not None:
            request, cached = candidate
            self._admit(request, cached)
            self.waiting.remove(request)  # after `_admit`, so that an interrupt cannot lose it
            plan.admitted[request] = len(cached)
            if not request.is_prefilled:
                budget -= self._chunk(request, budget, self._next(plan) is not None, plan)
        return plan

    def reset(self) -> None:
        """Drop all requests, free all rows and blocks, and clear the prefix cache."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.pool = BlockPool(self._num_blocks)
        self._free_rows = list(range(self._num_rows - 1, -1, -1))

    def finish(self, request: Request) -> None:
        """Remove a finished or aborted request and free its row and blocks."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def register(self, request: Request) -> None:
        """Register the full blocks of a request whose K/V are computed or scheduled in this step."""
        for i in range(request.num_registered, request.num_computed // self.block_size):
            self.pool.register(request.blocks[i], request.hashes(self.block_size)[i])
            request.num_registered = i + 1

    def forget_unwritten(self, plan: Plan) -> list[Request]:
        """Unregister the blocks that a failed prefill has not written; return the requests that hold any."""
        lost = {block for r, start, _ in plan.prefill for block in r.blocks[start // self.block_size :]}
        self.pool.forget(lost)
        return [request for request in self.running if not lost.isdisjoint(request.blocks)]

    def _next(self, plan: Plan) -> tuple[Request, list[int]] | None:
        """Return the next waiting request and its cached blocks, None if no row or too few blocks are free.

        A request waits if a prompt in prefill will compute its next block, so that it can share the block.
        After a preemption no request is admitted, since running requests need the freed blocks.
        """
        if not self.waiting or not self._free_rows or plan.preempted:
            return None
        size, in_prefill = self.block_size, [request for request in self.running if not request.is_prefilled]
        for request in self.waiting:
            reusable = request.hashes(size)[: (request.num_tokens - 1) // size]
            cached = self.pool.match(reusable)
            i = slice(len(cached), len(cached) + 1)  # the next full block, if any
            if not reusable[i] or all(other.hashes(size)[i] != reusable[i] for other in in_prefill):
                missing = self._blocks_ahead(request) - len(cached)
                return (request, cached) if missing <= self.pool.num_available(cached) else None
        return None

    def _admit(self, request: Request, cached: list[int]) -> None:
        """Give a waiting request a row and its blocks, starting with the `cached` ones."""
        self.pool.share(cached)
        missing = self._blocks_ahead(request) - len(cached)
        request.blocks = cached + (self.pool.allocate(missing) or [])  # enough are free, see `_next`
        request.num_registered = len(cached)
        request.num_computed = len(cached) * self.block_size
        if not request.num_preemptions:  # after a preemption, the cached blocks are its own
            request.num_cached_tokens = request.num_computed
        request.row = self._free_rows.pop()
        request.start_time = request.start_time or time.perf_counter()
        self.running.append(request)

    def _chunk(self, request: Request, budget: int, others_follow: bool, plan: Plan) -> int:
        """Schedule the next chunk of a prompt and return its length."""
        start = request.num_computed
        count = request.num_tokens - 1 - start
        if count > budget:
            count = max(budget // 2, min(self.block_size, budget)) if others_follow else budget
        plan.prefill.append((request, start, count))
        request.num_computed += count
        self.register(request)
        return count

    def _blocks_ahead(self, request: Request) -> int:
        """Return the number of blocks for all tokens that a request may have before its results are known."""
        return -(-min(request.num_tokens + self.slots_ahead, request.max_len) // self.block_size)

    def _extend(self, request: Request, plan: Plan) -> bool:
        """Allocate the blocks for the next step, preempting the requests admitted last if necessary. Return
        False if the request itself was preempted."""
        missing = self._blocks_ahead(request) - len(request.blocks)
        if missing <= 0:
            return True
        while (blocks := self.pool.allocate(missing)) is None:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return False
        plan.new_blocks[request] = len(request.blocks)
        request.blocks += blocks
        return True

    def _preempt(self, request: Request, plan: Plan) -> None:
        # Requeue it behind earlier arrivals before removing it, so that an interrupt cannot lose it.
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
