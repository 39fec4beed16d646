"""Replicas, a router and a load, over time: events in order. Only load and router may be random, by seed.

With `prefillers` prompts are computed by replicas of their own, which send the K/V of each prompt on, one
after the other, at `bandwidth` bytes per second; the replica that decodes then needs room for all of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.scale.replica import Replica
from bench.scale.routing import Router, least_loaded
from bench.scale.workload import Request

Event = tuple[float, int, int, Request | None]
"""When, a number, the replica, and what reaches it; None: its steps may have ended."""


@dataclass
class Fleet:
    """`replicas` that answer, routed to by `router`; with `prefillers`, it routes to those."""

    replicas: Sequence[Replica]
    router: Router
    prefillers: Sequence[Replica] = ()
    bandwidth: float = 50e9
    now: float = 0.0
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._all = [*self.prefillers, *self.replicas]
        self._entry = len(self.prefillers) or len(self.replicas)  # replicas that requests come to
        self._loads = [0] * len(self._all)
        self._sent = [0.0] * len(self.prefillers)  # seconds until which each sends
        self._decoders = least_loaded()
        self._number = 0

    def warm(self, requests: Sequence[Request]) -> None:
        """Fill the caches with the prefixes of requests that came before, when nobody waited."""
        for request in requests:
            cache = self._all[self.router(request, [0] * self._entry)].cache
            if cache.admit(request) is not None:
                cache.release(request)

    def run(self, requests: Sequence[Request]) -> None:
        """Answer all of them, which are in order of arrival."""
        for request in requests:
            while self._events and self._events[0][0] <= request.at:
                self._handle(heapq.heappop(self._events))
            self.now = request.at
            loads = self._loads[: self._entry] if self.prefillers else self._loads
            self._add(self.router(request, loads), request)
        while self._events:
            self._handle(heapq.heappop(self._events))

    def _add(self, i: int, request: Request) -> None:
        replica = self._all[i]
        self._loads[i] += 1
        before = replica.run.end if replica.run else None
        replica.add(request, self.now)
        if replica.run is None:
            replica.plan(self.now)
        if replica.run and replica.run.end != before:
            self._expect(replica.run.end, i)

    def _expect(self, at: float, i: int, request: Request | None = None) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, i, request))

    def _handle(self, event: Event) -> None:
        at, _, i, request = event
        if request is not None:
            self.now = at
            first = len(self.prefillers)
            self._add(first + self._decoders(request, self._loads[first:]), request)
            return
        replica = self._all[i]
        if replica.run is None or replica.run.end != at:
            return  # cut short since
        self.now = at
        for ended in replica.finish():
            self._loads[i] -= 1
            if ended.end < 0:
                self._send(i, ended)
        replica.plan(at)
        if replica.run:
            self._expect(replica.run.end, i)

    def _send(self, i: int, request: Request) -> None:
        begin = max(self.now, self._sent[i])
        self._sent[i] = begin + request.prompt * self._all[i].costs.kv_bytes / self.bandwidth
        self._expect(self._sent[i], i, request)
