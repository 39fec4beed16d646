"""What an ASGI app sends, as lists that travel through Ray, which takes as long for a list as for a message.

Ray takes whatever it is given, however much is still on its way: what is sent faster than it carries would
come later and later. So the lists of an answer have a pause between them, and hold what came in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

PAUSE = 0.002  # seconds, for each answer under way: 500 lists a second in all, of about 700 that Ray carries


class Sender:
    """The answers of one app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._under_way = app, 0

    async def lists(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """The app's messages in answer to a request. Raises what it raises. To close this is to go away."""
        waiting: list[Message] = []
        news, gone = asyncio.Event(), asyncio.Event()
        received = iter([{"type": "http.request", "body": body}])

        async def receive() -> Message:
            if (request := next(received, None)) is not None:
                return request
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            waiting.append(message)
            news.set()

        running: asyncio.Future[Any] = asyncio.ensure_future(self._app(scope, receive, send))
        running.add_done_callback(lambda _: news.set())
        self._under_way += 1
        try:
            while waiting or not running.done():
                await news.wait()
                news.clear()
                if messages := waiting.copy():
                    waiting.clear()
                    yield messages
                    if "body" in messages[-1]:  # no pause before the first token
                        await asyncio.sleep(PAUSE * self._under_way)
            await running
        finally:
            self._under_way -= 1
            gone.set()  # what runs for nobody ends by itself
