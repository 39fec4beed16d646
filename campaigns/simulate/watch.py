"""Check properties across steps: requests progress, are admitted in order, and get drafts where possible."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from nanospec.engine.engine import Engine
from nanospec.engine.request import Request
from nanospec.engine.scheduler import Plan

STALLED = 12  # maximum number of consecutive steps without progress of the first running request


class Watch:
    """Checks one engine. `settings` are the engine settings of the scenario."""

    def __init__(self, engine: Engine, settings: dict[str, Any]) -> None:
        self.engine, self._settings = engine, settings
        self._busy_steps = self._idle_steps = 0
        self._first: tuple[Request, int] | None = None
        scheduler = engine.scheduler
        self._schedule, self._admit = scheduler.schedule, scheduler._admit
        scheduler.schedule, scheduler._admit = self._scheduled, self._admitted  # type: ignore[method-assign]

    def _scheduled(self, held: Collection[Request] = ()) -> Plan:
        """Check that requests wait in order of arrival and are preempted in reverse order of admission."""
        scheduler = self.engine.scheduler
        new = [int(r.id.removeprefix("request-")) for r in scheduler.waiting if not r.num_preemptions]
        assert new == sorted(new), "a waiting request is ahead of an earlier one"
        before = list(scheduler.running)
        plan = self._schedule(held)
        kept = [request for request in before if request.row >= 0]
        assert kept == before[: len(kept)], "a request other than the last admitted was preempted"
        return plan

    def _admitted(self, request: Request, cached: list[int]) -> None:
        """Check that a request overtakes only requests whose prefix is still being prefilled."""
        for earlier in takewhile(lambda other: other is not request, self.engine.scheduler.waiting):
            assert self._waits_for_blocks(earlier), f"{request.id} was admitted before {earlier.id}"
        self._admit(request, cached)

    def _waits_for_blocks(self, request: Request) -> bool:
        """Return whether the first uncached block of a prompt is being computed for another request."""
        size, pool = self.engine.config.block_size, self.engine.scheduler.pool
        hashes = request.hashes(size)[: (request.num_tokens - 1) // size]
        cached = sum(1 for _ in takewhile(pool._block_of.__contains__, hashes))
        text = request.tokens[: (cached + 1) * size]
        return cached < len(hashes) and any(
            other.salt == request.salt and other.tokens[: len(text)] == text and not other.is_prefilled
            for other in self.engine.scheduler.running
        )

    @contextmanager
    def step(self, requests: Sequence[Request]) -> Iterator[None]:
        """Check a step that runs in the context, unless it raises."""
        self._busy_steps += self.engine.has_work
        before = [(r, r.num_tokens, r.stats.num_steps, r.stats.num_steps_with_drafts) for r in requests]
        yield
        self._check_progress(requests)
        for request, n, steps, drafted in before:
            if request.stats.num_steps > steps and self._must_draft(request, request.tokens[:n]):
                has_drafts = request.stats.num_steps_with_drafts > drafted
                assert has_drafts, f"{request.id}: no drafts after {n} tokens"

    def _check_progress(self, requests: Sequence[Request]) -> None:
        """Check that the first running request keeps its row until it finishes, and computes or generates a
        token per step, or per two steps with async_scheduling. Recomputed tokens do not count."""
        running, before = self.engine.scheduler.running, self._first
        self._first = None
        if running:
            first = running[0]
            self._first = first, first.num_computed + first.num_tokens
        lost = before is not None and before[0] not in running and not before[0].is_finished
        assert not lost, "the first running request lost its row"
        self._idle_steps = self._idle_steps + 1 if self.engine.has_work and self._first == before else 0
        assert self._idle_steps < STALLED, f"no progress in {STALLED} steps"
        texts = sum(request.max_len for request in requests)
        limit = (1 + self.engine.lag) * texts + STALLED * (1 + len(requests))
        assert self._busy_steps <= limit, f"{self._busy_steps} steps are too many for {texts} tokens"

    def _must_draft(self, request: Request, text: list[int]) -> bool:
        """Return whether a step after `text` must have drafts: K is fixed, and n-gram lookup has a match or a
        draft model can catch up within the token budget. In captured steps, a draft model after lookup may
        have missed too many tokens (`ModelDrafter.first_pass`)."""
        settings, limit = self._settings, request.params.num_speculative_tokens
        fixed = settings["k"] not in (0, "auto") and limit != 0 and request.constraint is None
        if not fixed or len(text) + 1 >= request.max_len:
            return False
        methods, n = settings["method"].split("+"), settings["min_n"]
        places = range(len(text) - n) if "ngram" in methods else ()
        keeps_up = settings["method"] == "draft" or ("draft" in methods and not settings["captured"])
        keeps_up &= settings["budget"] > settings["rows"] * settings["window"]
        return keeps_up or any(text[i : i + n] == text[-n:] for i in places)
