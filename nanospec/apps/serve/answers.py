"""Responses in OpenAI's format, sent as one JSON object or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ...outputs import Completion
from ...text.tokenizer import Tokenizer
from ..openai_format import CHAT, choice, counts, logprobs, usage
from .gate import HTTPError
from .jobs import Job, JobFailed
from .requests import APIRequest

QUIET = b": keep-alive\n\n"  # a comment event, so that proxies do not close an idle connection
TOO_SLOW = "The request timed out; it took longer than the server allows."
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(eq=False)
class Answer:
    """The ASGI app that answers one request. Its outputs are aborted if the client disconnects, or after
    `timeout` seconds. `log_fields` are logged and must not contain text."""

    request: APIRequest
    job: Job
    head: dict[str, Any]  # the first fields of the response, or of each event
    tokenizer: Tokenizer
    timeout: float
    log_fields: dict[str, Any]
    done: list[Completion] = field(default_factory=list)  # finished outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = self._stream if self.request.streams else self._whole
        sending = asyncio.ensure_future(write(scope, receive, send))
        disconnected = asyncio.ensure_future(_disconnected(receive))
        too_slow = asyncio.get_running_loop().call_later(self.timeout, self.job.put, JobFailed(TOO_SLOW, 504))
        try:
            await asyncio.wait({sending, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                self.log_fields["ended_by"] = "client disconnected"
        finally:
            self.job.abort()
            for each in (too_slow, sending, disconnected):
                each.cancel()
            self.log_fields["prompt_tokens"] = self.request.num_prompt_tokens
            if self.done:
                usage, first = self._usage(), min(done.first_token_seconds for done in self.done)
                self.log_fields["completion_tokens"] = usage["completion_tokens"]
                self.log_fields["tokens_per_step"] = usage["speculation"]["tokens_per_step"]
                self.log_fields["first_token_ms"] = round(first * 1e3, 1)

    def _usage(self) -> dict[str, Any]:
        return usage(self.request.num_prompt_tokens, self.done, self.request.params.n)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for delta in self.job:
                if delta is not None and delta.done is not None:
                    self._end(delta.done)
            # In a thread, because a response with log-probabilities may be large.
            response = await asyncio.to_thread(self._response)
        except JobFailed as failure:
            response = self._failed(failure).response()
        await response(scope, receive, send)

    def _response(self) -> Response:
        self.done.sort(key=lambda done: done.index)
        url, number = self.request.url, self.request.params.logprobs
        choices = [choice(url, done, number, self.tokenizer) for done in self.done]
        return JSONResponse({**self.head, "choices": choices, "usage": self._usage()})

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = b"data: [DONE]\n\n"
        except JobFailed as failure:
            last = event(self._failed(failure).body())
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the server-sent events of the stream except the final one. Raises JobFailed."""
        include = self.request.include
        num_tokens: Counter[int] = Counter()  # so far, by output
        num_chars: Counter[int] = Counter()

        def to_event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            if "include_usage" in include:
                continuous = "continuous_usage_stats" in include  # as in vLLM
                so_far = counts(self.request.num_prompt_tokens, num_tokens.total())
                more = {"usage": so_far if continuous else None, **more}
            return event({**self.head, "choices": choices, **more})

        async for delta in self.job:
            if delta is None:
                yield QUIET
                continue
            i, done = delta.choice, delta.done
            # The role is sent with the first text, not before: some clients take it for the first token.
            role = {} if i in num_tokens else {"role": "assistant"}
            # The last piece may be the remaining bytes of a character instead of a token.
            num_tokens[i] = len(done.token_ids) if done else num_tokens[i] + len(delta.pieces)
            speculation = {"index": i, "pieces": delta.pieces, **delta.speculation}
            drafts: dict[str, Any] = {"speculation": speculation} if "include_drafts" in include else {}
            text = "".join(piece.text for piece in delta.pieces)
            if text or delta.logprobs:
                url, number, offset = self.request.url, self.request.params.logprobs, num_chars[i]
                entries = logprobs(url, delta.logprobs, delta.pieces, number, self.tokenizer, offset)
                yield to_event([self._choice(i, {**role, "content": text}, entries)], **drafts)
                num_chars[i] += len(text)
                drafts, role = {}, {}
            if done is not None:
                self._end(done)
                yield to_event([self._choice(i, role, done=done)], **drafts)
        if "include_usage" in include:
            yield to_event([], usage=self._usage())

    def _choice(
        self, index: int, delta: dict[str, Any], entries: Any = None, done: Completion | None = None
    ) -> dict[str, Any]:
        """Return the choice of an event. `entries` are its log-probabilities."""
        content = {"delta": delta} if self.request.url == CHAT else {"text": delta.get("content", "")}
        reasons = {"finish_reason": done and done.finish_reason, "stop_reason": done and done.stop_reason}
        return {"index": index, **content, "logprobs": entries, **reasons}

    def _end(self, done: Completion) -> None:
        if done.error is not None:
            raise JobFailed(done.error)
        self.done.append(done)

    def _failed(self, failure: JobFailed) -> HTTPError:
        self.log_fields["ended_by"] = str(failure)
        return HTTPError(failure.status, str(failure))


def event(data: Any) -> bytes:
    """Encode `data` as a server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
