"""An answer as it is sent, with an eye on its client and on the clock."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .answers import Answer, event
from .errors import HTTPError
from .jobs import EngineFailed, TooSlow
from .settings import ServeConfig

LOOK = 5.0  # seconds between looks at the clock
QUIET_AFTER = 15.0  # seconds without a byte of a stream, after which one says that it goes on


class Answering(Response):
    """An answer under way. When its client goes away, its outputs end."""

    def __init__(self, config: ServeConfig, answer: Answer, facts: dict[str, Any]) -> None:
        self.config, self.answer, self.facts = config, answer, facts
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_at = time.monotonic()
        write = self._stream if self.answer.asked.streams else self._whole
        sending = asyncio.ensure_future(write(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            why = await self._watch(sending, gone)
            if why is not None:
                self.facts["ended_by"] = why
        finally:
            self.answer.job.abort()
            for task in (sending, gone):
                task.cancel()
            self._tell()

    async def _watch(self, sending: asyncio.Future[None], gone: asyncio.Future[None]) -> str | None:
        """Wait for the answer to have been sent; why not, if it is not to be."""
        end, streams = time.monotonic() + self.config.request_timeout, self.answer.asked.streams
        while not sending.done():
            left = max(min(end - time.monotonic(), LOOK), 0.0)
            await asyncio.wait({sending, gone}, timeout=left, return_when="FIRST_COMPLETED")
            now = time.monotonic()
            if gone.done() and not sending.done():
                return "client gone"
            if streams and now - self._sent_at > QUIET_AFTER:
                self.answer.job.put(None)
            if now > end:
                self.answer.job.put(TooSlow())
                end = float("inf")
        sending.result()
        return None

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.answer.wait()
            error = self.answer.error
            if error is not None:
                response = HTTPError(500, error).response()
            else:  # with log-probabilities it may be long
                response = await asyncio.to_thread(lambda: JSONResponse(self.answer.body()))
        except EngineFailed as failure:
            self.facts["ended_by"] = str(failure)
            response = HTTPError(failure.status, str(failure)).response()
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(data: bytes, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more_body})
            self._sent_at = time.monotonic()

        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        failure: HTTPError | None = None
        try:
            async for data in self.answer.events():
                await body(data)
            if self.answer.error:
                failure = HTTPError(500, self.answer.error)
        except EngineFailed as error:
            failure = HTTPError(error.status, str(error))
        if failure:
            self.facts["ended_by"] = failure.message
            await body(event(failure.body()))
        await body(b"", more_body=False)

    def _tell(self) -> None:
        """For the log: what was asked and given; never a text."""
        done = self.answer.done
        self.facts["prompt_tokens"] = self.answer.asked.num_prompt_tokens
        if done:
            usage = self.answer.usage()
            self.facts["completion_tokens"] = usage["completion_tokens"]
            self.facts["tokens_per_step"] = round(usage["speculation"]["tokens_per_step"], 2)
            self.facts["first_token_ms"] = round(min(each.first_token_seconds for each in done) * 1e3, 1)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
