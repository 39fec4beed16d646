"""Send the answer to a request, as one JSON object or streamed as server-sent events.

`Answer` waits for the outputs, limits the time and aborts them if the client disconnects. A `Format` encodes
them for one API; each API has its own file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...outputs import Completion
from ...text.tokenizer import Tokenizer
from ..openai_format import usage
from ..tool_calls.parser import CallParser, Part
from .gate import HTTPError
from .jobs import Delta, Job, JobFailed
from .requests import APIRequest

TOO_SLOW = "The request timed out; it took longer than the server allows."
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Format:
    """The format of the answer to one request: a whole response, or the events of a stream."""

    whole: Callable[[Sequence[Completion]], dict[str, Any]]  # returns the response with all outputs
    update: Callable[[Delta], Iterable[bytes]]  # returns the events of a delta
    end: Callable[[Sequence[Completion]], Iterable[bytes]]  # returns the events after the last delta
    quiet = b": keep-alive\n\n"  # an event without effect, so that proxies do not close an idle connection

    def __init__(self, request: APIRequest, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self.request, self.request_id, self.model, self.tokenizer = request, request_id, model, tokenizer
        self._parsers: dict[int, CallParser] = {}  # of the outputs that may contain tool calls

    def parts(self, delta: Delta) -> list[Part]:
        """Return the new parts of an output: its text, unless it may contain tool calls."""
        text = "".join(piece.text for piece in delta.pieces)
        if (new_parser := self.request.parser) is None:
            return [Part(text)] if text else []
        parser = self._parsers.setdefault(delta.choice, new_parser())
        return parser.push(text, ended=delta.done is not None)

    def begin(self) -> Iterable[bytes]:
        """Return the events before the first delta."""
        return ()

    def failed(self, error: HTTPError) -> bytes:
        """Return the event that ends the stream if the request fails."""
        return event(error.body(self.request.url))


@dataclass(eq=False)
class Answer:
    """The ASGI app that answers one request. Its outputs are aborted if the client disconnects, or after
    `timeout` seconds. `log_fields` are logged and must not contain text."""

    request: APIRequest
    job: Job
    format: Format
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
                counts = usage(self.request.num_prompt_tokens, self.done, self.request.params.n)
                self.log_fields["completion_tokens"] = counts["completion_tokens"]
                self.log_fields["tokens_per_step"] = counts["speculation"]["tokens_per_step"]
                first = min(done.first_token_seconds for done in self.done)
                self.log_fields["first_token_ms"] = round(first * 1e3, 1)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for delta in self.job:
                if delta is not None and delta.done is not None:
                    self._end(delta.done)
            # In a thread, because a response with log-probabilities may be large.
            response = await asyncio.to_thread(self._response)
        except JobFailed as failure:
            response = self._failed(failure).response(scope)
        await response(scope, receive, send)

    def _response(self) -> Response:
        self.done.sort(key=lambda done: done.index)
        return Response(encode(self.format.whole(self.done)), media_type="application/json")

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(events: Iterable[bytes], more: bool = True) -> None:
            if (data := b"".join(events)) or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            await write(self.format.begin())
            async for delta in self.job:
                await write([self.format.quiet] if delta is None else self.format.update(delta))
                if delta is not None and delta.done is not None:
                    self._end(delta.done)
            last = self.format.end(self.done)
        except JobFailed as failure:
            last = [self.format.failed(self._failed(failure))]
        await write(last, more=False)

    def _end(self, done: Completion) -> None:
        if done.error is not None:
            raise JobFailed(done.error)
        self.done.append(done)

    def _failed(self, failure: JobFailed) -> HTTPError:
        self.log_fields["ended_by"] = str(failure)
        return HTTPError(failure.status, str(failure))


def event(data: dict[str, Any]) -> bytes:
    """Encode `data` as a server-sent event, named after its "type" if it has one."""
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + encode(data) + b"\n\n"


def encode(data: Any) -> bytes:
    """Encode `data` as JSON. Unpaired surrogates, which clients and models may produce, become "?"."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
