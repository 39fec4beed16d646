"""What must hold from one step to the next: all goes on, nobody is passed, and guesses are made where
there is something to guess. Outputs would be right without."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.engine.scheduler import Plan

STALLED = 12  # steps in a row in which who runs first does not go on


class Watch:
    """Of one engine. `asked`: what the scenario says of it."""

    def __init__(self, engine: Engine, asked: dict[str, Any]) -> None:
        self.engine, self._asked = engine, asked
        self._busy_steps = self._idle_steps = 0
        self._first: tuple[Request, int] | None = None
        scheduler = engine.scheduler
        self._schedule, self._admit = scheduler.schedule, scheduler._admit
        scheduler.schedule, scheduler._admit = self._scheduled, self._admitted  # type: ignore[method-assign]

    def _scheduled(self, held: Collection[Request] = ()) -> Plan:
        """Whoever is preempted was admitted after all others."""
        scheduler = self.engine.scheduler
        new = [int(r.id.removeprefix("request-")) for r in scheduler.waiting if not r.num_preemptions]
        assert new == sorted(new), "who has come later waits before who has come earlier"
        before = list(scheduler.running)
        plan = self._schedule(held)
        kept = [request for request in before if request.row >= 0]
        assert kept == before[: len(kept)], "somebody is preempted who was admitted before another"
        return plan

    def _admitted(self, request: Request, cached: list[int]) -> None:
        """Whoever is admitted passes nobody but those that wait for blocks that another computes."""
        for earlier in takewhile(lambda other: other is not request, self.engine.scheduler.waiting):
            assert self._waits_for_blocks(earlier), f"{request.id} is admitted before {earlier.id}"
        self._admit(request, cached)

    def _waits_for_blocks(self, request: Request) -> bool:
        """Whether the first block of its prompt that is not in the cache is being computed for another."""
        size, pool = self.engine.config.block_size, self.engine.scheduler.pool
        names = request.hashes(size)[: (request.num_tokens - 1) // size]
        found = sum(1 for _ in takewhile(pool._block_of.__contains__, names))
        text = request.tokens[: (found + 1) * size]
        return found < len(names) and any(
            other.salt == request.salt and other.tokens[: len(text)] == text and not other.is_prefilled
            for other in self.engine.scheduler.running
        )

    @contextmanager
    def step(self, requests: Sequence[Request]) -> Iterator[None]:
        """Around one; nothing is asked of what was cut short."""
        self._busy_steps += self.engine.has_work
        before = [(r, r.num_tokens, r.stats.num_steps, r.stats.num_steps_with_drafts) for r in requests]
        yield
        self._check_progress(requests)
        for request, n, steps, drafted in before:
            if request.stats.num_steps > steps and self._can_guess(request, request.tokens[:n]):
                found = request.stats.num_steps_with_drafts > drafted
                assert found, f"{request.id}: nothing is guessed behind {n} tokens"

    def _check_progress(self, requests: Sequence[Request]) -> None:
        """Who runs first keeps its row until it ends, and in every step, with lag in every other, it has one
        token more computed or said. So all ends in time. Prompts that are computed anew are none."""
        running, before = self.engine.scheduler.running, self._first
        self._first = None
        if running:
            first = running[0]
            self._first = first, first.num_computed + first.num_tokens
        lost = before is not None and before[0] not in running and not before[0].is_finished
        assert not lost, "who ran first has lost its row"
        self._idle_steps = self._idle_steps + 1 if self.engine.has_work and self._first == before else 0
        assert self._idle_steps < STALLED, f"nothing has happened in {STALLED} steps"
        texts = sum(request.max_len for request in requests)
        most = (1 + self.engine.lag) * texts + STALLED * (1 + len(requests))
        assert self._busy_steps <= most, f"{self._busy_steps} steps are too many for {texts} tokens"

    def _can_guess(self, request: Request, text: list[int]) -> bool:
        """Whether a step behind this text must have drafts: K is fixed, and there is a draft model that may
        compute all that it has not seen, or lookup and an end that occurs earlier. In recorded steps a model
        behind lookup may have missed too much (`ModelDrafter.first_pass`)."""
        asked, own = self._asked, request.params.num_speculative_tokens
        fixed = asked["k"] not in (0, "auto") and own != 0 and request.constraint is None
        if not fixed or len(text) + 1 >= request.max_len:
            return False
        methods, n = asked["method"].split("+"), asked["min_n"]
        places = range(len(text) - n) if "ngram" in methods else ()
        keeps_up = asked["method"] == "draft" or ("draft" in methods and not asked["recorded"])
        keeps_up &= asked["budget"] > asked["rows"] * asked["window"]
        return keeps_up or any(text[i : i + n] == text[-n:] for i in places)
