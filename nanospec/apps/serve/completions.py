"""Answers of OpenAI's /v1/chat/completions and /v1/completions; see `openai_format.py` for the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...outputs import Completion
from ..openai_format import CHAT, choice, counts, finish_reasons, logprobs, response_header, usage
from ..tool_calls.offer import call_object
from ..tool_calls.parser import CallStart, Part, Text
from .answers import Format, event
from .jobs import Delta


class OpenAIFormat(Format):
    """The format of completions and chat completions."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_chat = self.request.url == CHAT
        answer_id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{self.request_id}"
        self._head = response_header(self.request.url, answer_id, self.model, self.request.streams)
        self._num_tokens: Counter[int] = Counter()  # so far, by output
        self._num_chars: Counter[int] = Counter()
        self._num_calls: Counter[int] = Counter()
        self._begun: set[int] = set()  # outputs of which a part was sent

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        request = self.request
        choices = [
            choice(request.url, each, request.params.logprobs, self.tokenizer, request.parser)
            for each in done
        ]
        return {**self._head, "choices": choices, "usage": self._usage(done)}

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        return usage(self.request.num_prompt_tokens, done, self.request.params.n)

    def update(self, delta: Delta) -> Iterator[bytes]:
        i, done = delta.choice, delta.done
        # The role is sent with the first text, not before: some clients take it for the first token.
        role = {} if i in self._begun else {"role": "assistant"}
        # The last piece may be the remaining bytes of a character instead of a token.
        self._num_tokens[i] = len(done.token_ids) if done else self._num_tokens[i] + len(delta.pieces)
        speculation = {"index": i, "pieces": delta.pieces, **delta.speculation}
        drafts: dict[str, Any] = {"speculation": speculation} if self._includes("include_drafts") else {}
        entries = self._logprobs(delta)
        parts = self.parts(delta) or ([Text("")] if entries else [])
        for part in parts:
            yield self._event([self._choice(i, {**role, **self._delta(i, part)}, entries)], **drafts)
            drafts, role, entries = {}, {}, None
            self._begun.add(i)
        if done is not None:
            yield self._event([self._choice(i, role, done=done)], **drafts)

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        if self._includes("include_usage"):
            yield self._event([], usage=self._usage(done))
        yield b"data: [DONE]\n\n"

    def _includes(self, option: str) -> bool:
        return option in self.request.include

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self._includes("include_usage"):
            continuous = self._includes("continuous_usage_stats")  # as in vLLM
            so_far = counts(self.request.num_prompt_tokens, self._num_tokens.total())
            more = {"usage": so_far if continuous else None, **more}
        return event({**self._head, "choices": choices, **more})

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """Return the log-probabilities of the new tokens, None if there are none."""
        offset, number = self._num_chars[delta.choice], self.request.params.logprobs
        self._num_chars[delta.choice] += sum(len(piece.text) for piece in delta.pieces)
        return logprobs(self.request.url, delta.logprobs, delta.pieces, number, self.tokenizer, offset)

    def _delta(self, i: int, part: Part) -> dict[str, Any]:
        """Return the delta of a part of output i."""
        if isinstance(part, Text):
            return {"content": part.text}
        call: dict[str, Any] = {"index": part.number}
        if isinstance(part, CallStart):
            self._num_calls[i] += 1
            call |= call_object(part.id, part.name)
        else:
            call["function"] = {"arguments": part.text}
        return {"tool_calls": [call]}

    def _choice(
        self, index: int, delta: dict[str, Any], entries: Any = None, done: Completion | None = None
    ) -> dict[str, Any]:
        """Return the choice of an event. `entries` are its log-probabilities."""
        content = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        reasons = finish_reasons(done, self._num_calls[index])
        return {"index": index, **content, "logprobs": entries, **reasons}
