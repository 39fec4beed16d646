"""An answer as it is sent, with an eye on its client and on the clock."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from .answers import Answer, event
from .errors import HTTPError
from .loop import EngineFailed, TooSlow
from .settings import ServeConfig

LOOK = 5.0  # seconds between looks at whether the client still reads


class Answering(Response):
    """An answer under way. When its client goes away, or leaves unread what was sent, its outputs end."""

    def __init__(self, config: ServeConfig, answer: Answer, facts: dict[str, Any]) -> None:
        self.config, self.answer, self.facts = config, answer, facts
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sending_since: float | None = None
        write = self._stream if self.answer.asked.streams else self._whole
        sending = asyncio.ensure_future(write(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            why = await self._watch(sending, gone)
            if why is not None:
                self.facts["ended_by"] = why
                scope["state"].get("abort", lambda: None)()
        finally:
            self.answer.job.abort()
            for task in (sending, gone):
                task.cancel()
            self._tell()

    async def _watch(self, sending: asyncio.Future[None], gone: asyncio.Future[None]) -> str | None:
        """Wait for the answer to have been sent; why not, if it is not to be."""
        end, most = time.monotonic() + self.config.request_timeout, min(LOOK, self.config.write_timeout)
        while not sending.done():
            left = max(min(end - time.monotonic(), most), 0.0)
            await asyncio.wait({sending, gone}, timeout=left, return_when="FIRST_COMPLETED")
            now, since = time.monotonic(), self._sending_since
            if gone.done() and not sending.done():
                return "client gone"
            if since is not None and now - since > self.config.write_timeout:
                return "client does not read"
            if now > end:
                self.answer.job.put(TooSlow())
                end = float("inf")
        sending.result()
        return None

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self.answer.whole()
            error = self.answer.error
            response = HTTPError(500, error).response() if error else JSONResponse(body)
        except EngineFailed as failure:
            response = HTTPError(failure.status, str(failure)).response()
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(data: bytes, more_body: bool = True) -> None:
            self._sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more_body})
            self._sending_since = None

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
