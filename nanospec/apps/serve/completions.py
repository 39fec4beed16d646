"""Answers of OpenAI's /v1/chat/completions and /v1/completions; see `openai_format.py` for the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ...outputs import Completion
from ..openai_format import CHAT, choice, counts, finish_reasons, logprobs, response_header, usage
from ..tool_calls.offer import call_object
from ..tool_calls.parser import Part
from .answers import Format, event
from .jobs import Delta


class OpenAIFormat(Format):
    """The format of completions and chat completions."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        request = self.request
        answer_id = f"{'chatcmpl' if request.url == CHAT else 'cmpl'}-{self.request_id}"
        self._head = response_header(request.url, answer_id, self.model, request.streams)
        self._num_tokens, self._num_chars, self._num_calls = Counter[int](), Counter[int](), Counter[int]()
        self._begun: set[int] = set()  # outputs of which a part was sent

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        url, number, parser = self.request.url, self.request.params.logprobs, self.request.parser
        choices = [choice(url, each, number, self.tokenizer, parser) for each in done]
        return {**self._head, "choices": choices, "usage": self._usage(done)}

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        return usage(self.request.num_prompt_tokens, done, self.request.params.n)

    def update(self, delta: Delta) -> Iterator[bytes]:
        i, done, request = delta.choice, delta.done, self.request
        # The role is sent with the first text, not before: some clients take it for the first token.
        role = {} if i in self._begun else {"role": "assistant"}
        # The last piece may be the remaining bytes of a character instead of a token.
        self._num_tokens[i] = len(done.token_ids) if done else self._num_tokens[i] + len(delta.pieces)
        drafts: dict[str, Any] = {}
        if "include_drafts" in request.include:
            drafts["speculation"] = {"index": i, "pieces": delta.pieces, **delta.speculation}
        number, offset = request.params.logprobs, self._num_chars[i]
        entries = logprobs(request.url, delta.logprobs, delta.pieces, number, self.tokenizer, offset)
        self._num_chars[i] += sum(len(piece.text) for piece in delta.pieces)
        for part in self.parts(delta) or ([Part("")] if entries else []):
            yield self._event([self._choice(i, {**role, **self._delta(i, part)}, entries)], **drafts)
            drafts, role, entries = {}, {}, None
            self._begun.add(i)
        if done is not None:
            yield self._event([self._choice(i, role, done=done)], **drafts)

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        if "include_usage" in self.request.include:
            yield self._event([], usage=self._usage(done))
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if "include_usage" in self.request.include:
            continuous = "continuous_usage_stats" in self.request.include  # as in vLLM
            so_far = counts(self.request.num_prompt_tokens, self._num_tokens.total())
            more = {"usage": so_far if continuous else None, **more}
        return event({**self._head, "choices": choices, **more})

    def _delta(self, i: int, part: Part) -> dict[str, Any]:
        """Return the delta of a part of output i."""
        if part.call is None:
            return {"content": part.text}
        self._num_calls[i] = part.call + 1
        more: dict[str, Any] = {"function": {"arguments": part.text}}
        call = call_object(part.id, part.name, part.text) if part.name else more
        return {"tool_calls": [{"index": part.call, **call}]}

    def _choice(
        self, index: int, delta: dict[str, Any], entries: Any = None, done: Completion | None = None
    ) -> dict[str, Any]:
        """Return the choice of an event. `entries` are its log-probabilities."""
        content = {"delta": delta} if self.request.url == CHAT else {"text": delta.get("content", "")}
        reasons = finish_reasons(done, self._num_calls[index])
        return {"index": index, **content, "logprobs": entries, **reasons}
