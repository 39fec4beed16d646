"""What must hold from one step to the next: all goes on, and guesses are made where there is something to
guess. Outputs would be right without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nanospec.engine import Engine
from nanospec.request import Request

STALLED = 12  # steps in a row in which who runs first does not go on


class Watch:
    """Of one engine. `asked`: what the scenario says of it."""

    def __init__(self, engine: Engine, asked: dict[str, Any]) -> None:
        self.engine, self._asked = engine, asked
        self._busy_steps = self._idle_steps = 0
        self._first: tuple[Request, int] | None = None

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
        compute all that it has not seen, or lookup and an end that occurs earlier."""
        asked, own = self._asked, request.params.num_speculative_tokens
        fixed = asked["k"] not in (0, "auto") and own != 0 and request.guide is None
        if not fixed or len(text) + 1 >= request.max_len:
            return False
        methods, n = asked["method"].split("+"), asked["min_n"]
        places = range(len(text) - n) if "ngram" in methods else ()
        has_all = "draft" in methods and asked["budget"] > asked["rows"] * asked["window"]
        return has_all or any(text[i : i + n] == text[-n:] for i in places)
