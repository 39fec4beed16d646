"""Answers in OpenAI's format, whole or as events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from ..outputs import Completion
from ..request import Logprob
from .loop import Delta, Job
from .openai_format import CHAT, choice, logprobs, usage
from .requests import Asked


class Answer:
    """What a client gets for a request.

    Attributes:
        done: the outputs that have ended.
    """

    def __init__(self, asked: Asked, job: Job, request_id: str, model: str) -> None:
        self.asked, self.job = asked, job
        self.done: list[Completion] = []
        kind = ("chat.completion" if asked.url == CHAT else "text_completion") + (
            ".chunk" if asked.streams and asked.url == CHAT else ""
        )
        self._head = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}

    @property
    def error(self) -> str | None:
        """Why an output could not be finished."""
        return next((done.error for done in self.done if done.error), None)

    def usage(self) -> dict[str, Any]:
        """Of what has ended."""
        return usage(self.asked.num_prompt_tokens, self.done)

    async def whole(self) -> dict[str, Any]:
        """The body, when all outputs have ended. Raises EngineFailed."""
        async for delta in self.job:
            if delta.done is not None:
                self.done.append(delta.done)
        self.done.sort(key=lambda done: done.index)
        url, number = self.asked.url, self.asked.params.logprobs
        choices = [choice(url, done, number) for done in self.done]
        return {**self._head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """The stream, as bytes of server-sent events. Raises EngineFailed."""
        if self.asked.url == CHAT:
            for index in range(self.job.num_outputs):
                yield self._event([self._choice(index, {"role": "assistant", "content": ""})])
        offsets = [0] * self.job.num_outputs
        held: dict[int, Delta] = {}  # steps that have not given a text yet
        async for delta in self.job:
            if (before := held.pop(delta.choice, None)) is not None:
                delta = _joined(before, delta)
            text = "".join(piece.text for piece in delta.pieces)
            if text or delta.logprobs:
                found = self._logprobs(delta.logprobs, offsets[delta.choice])
                offsets[delta.choice] += len(text)
                told = {"speculation": _told(delta)} if self.asked.with_drafts else {}
                content = {"content": text} if self.asked.url == CHAT else {}
                yield self._event([self._choice(delta.choice, content, text, found)], **told)
            elif delta.done is None:
                held[delta.choice] = delta
            if delta.done is not None:
                self.done.append(delta.done)
                if delta.done.error is not None:
                    return
                yield self._event([self._choice(delta.choice, {}, reason=delta.done.finish_reason)])
        if self.asked.with_usage:
            yield self._event([], usage=self.usage())
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self.asked.with_usage:
            more.setdefault("usage", None)
        return event({**self._head, "choices": choices, **more})

    def _choice(
        self, index: int, delta: dict[str, Any], text: str = "", found: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        own = {"delta": delta} if self.asked.url == CHAT else {"text": text}
        return {"index": index, **own, "logprobs": found, "finish_reason": reason}

    def _logprobs(self, places: list[dict[int, Logprob]], offset: int) -> dict[str, Any] | None:
        number = self.asked.params.logprobs
        tokens = [next(iter(place)) for place in places]  # the token itself comes first
        return None if number is None else logprobs(self.asked.url, tokens, places, number, offset)


def event(data: Any) -> bytes:
    """A server-sent event."""
    return (
        b"data: "
        + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        + b"\n\n"
    )


def _joined(a: Delta, b: Delta) -> Delta:
    return Delta(
        b.choice,
        [*a.pieces, *b.pieces],
        [*a.logprobs, *b.logprobs],
        a.drafted + b.drafted,
        a.accepted + b.accepted,
        b.drafter or a.drafter,
        [*a.rejected, *b.rejected],
        b.done,
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
