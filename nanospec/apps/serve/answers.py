"""Answers in OpenAI's format, whole or as events of a stream."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from typing import Any

from ...engine.request import Logprob, Piece
from ...outputs import Completion
from .jobs import Delta, Job
from .openai_format import CHAT, choice, counts, logprobs, usage
from .requests import Asked

QUIET = b": nothing yet\n\n"  # a comment, so that nobody between takes the connection for dead


class Answer:
    """What a client gets for a request.

    Attributes:
        done: the outputs that have ended.
    """

    def __init__(
        self, asked: Asked, job: Job, request_id: str, model: str, bytes_of: Callable[[int], bytes]
    ) -> None:
        self.asked, self.job, self._bytes_of = asked, job, bytes_of
        self.done: list[Completion] = []
        self._num_tokens: Counter[int] = Counter()  # of each output so far
        kind, prefix = ("chat.completion", "chatcmpl") if asked.url == CHAT else ("text_completion", "cmpl")
        kind += ".chunk" * (asked.streams and asked.url == CHAT)
        known = {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time())}
        self._head = {**known, "model": model}

    @property
    def error(self) -> str | None:
        """Why an output could not be finished."""
        return next((done.error for done in self.done if done.error), None)

    def usage(self) -> dict[str, Any]:
        """Of what has ended."""
        return usage(self.asked.num_prompt_tokens, self.done, self.asked.params.n)

    async def wait(self) -> None:
        """Until all outputs have ended. Raises EngineFailed."""
        async for delta in self.job:
            if delta is not None and delta.done is not None:
                self.done.append(delta.done)

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        self.done.sort(key=lambda done: done.index)
        url, number = self.asked.url, self.asked.params.logprobs
        choices = [choice(url, done, number, self._bytes_of) for done in self.done]
        return {**self._head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The stream, as bytes of server-sent events. Raises EngineFailed."""
        offsets = [0] * self.job.num_outputs
        begun: set[int] = set()  # what has been told who speaks, with its first text and not before
        held: dict[int, Delta] = {}  # steps that have not given a text yet
        async for delta in self.job:
            if delta is None:
                yield QUIET
                continue
            i = delta.choice
            self._num_tokens[i] += len(delta.pieces)
            if delta.done is not None:  # the last piece may be the rest of a character
                self._num_tokens[i] = len(delta.done.token_ids)
            delta = held.pop(i).joined(delta) if i in held else delta
            if self.asked.url == CHAT and i not in begun and (delta.pieces or delta.done):
                begun.add(i)
                yield self._event([self._choice(i, {"role": "assistant", "content": ""})])
            text = "".join(piece.text for piece in delta.pieces)
            told = {"speculation": _told(delta)} if self.asked.with_drafts else {}
            if text or delta.logprobs:
                found = self._logprobs(delta.logprobs, delta.pieces, offsets[i])
                offsets[i] += len(text)
                content = {"content": text} if self.asked.url == CHAT else {}
                yield self._event([self._choice(i, content, text, found)], **told)
                told = {}
            elif delta.done is None:
                held[i] = delta
            if delta.done is not None:
                self.done.append(delta.done)
                if delta.done.error is not None:
                    return
                yield self._event([self._choice(i, {}, done=delta.done)], **told)
        if self.asked.with_usage:
            yield self._event([], usage=self.usage())
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self.asked.with_counts:
            more.setdefault("usage", counts(self.asked.num_prompt_tokens, self._num_tokens.total()))
        elif self.asked.with_usage:
            more.setdefault("usage", None)
        return event({**self._head, "choices": choices, **more})

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        text: str = "",
        found: Any = None,
        done: Completion | None = None,
    ) -> dict[str, Any]:
        own = {"delta": delta} if self.asked.url == CHAT else {"text": text}
        reasons = {"finish_reason": done and done.finish_reason, "stop_reason": done and done.stop_reason}
        return {"index": index, **own, "logprobs": found, **reasons}

    def _logprobs(
        self, places: list[dict[int, Logprob]], pieces: list[Piece], offset: int
    ) -> dict[str, Any] | None:
        number = self.asked.params.logprobs
        tokens = [next(iter(place)) for place in places]  # the token itself comes first
        offsets = list(accumulate((len(piece.text) for piece in pieces), initial=offset))
        url, bytes_of = self.asked.url, self._bytes_of
        return None if number is None else logprobs(url, tokens, places, number, offsets, bytes_of)


def event(data: Any) -> bytes:
    """A server-sent event."""
    return (
        b"data: "
        + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        + b"\n\n"
    )


def _told(delta: Delta) -> dict[str, Any]:
    return {
        "index": delta.choice,
        "pieces": delta.pieces,
        "drafted": delta.drafted,
        "accepted": delta.accepted,
        "drafter": delta.drafter,
        "rejected": delta.rejected,
    }
