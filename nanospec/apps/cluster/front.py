"""What clients connect to: it reads a request, chooses a replica by its beginning, and hands the answer on.

Paths, answers and errors are those of the server in the replica (`serve/app.py`). Here is only what comes
before, keys and log lines (`serve/gate.py`), and what is about all replicas, `/metrics`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..serve.answers import event
from ..serve.gate import Gate, HTTPError, draining
from ..serve.settings import ServeConfig
from .figures import together
from .routing import Balancer, pieces

SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
NOBODY = "No replica answers; try again in some seconds."
LOST = "The replica ended before it could finish this request, which may be sent again."
LINGER = 5.0  # seconds that it outlives its replicas, to say so
LAST = 1.0  # seconds that the last bytes have to reach their clients
LOOK = 4.0  # seconds that a replica has for its figures


class Front:
    """An ASGI app.

    Args:
        replicas: the names of those that are there.
        ask: (scope, body, name of a replica or None) -> lists of messages as ASGI sends them, and last of all
            what is to be logged, under "facts", with the name of the replica: another where that had died.
    """

    def __init__(
        self,
        config: ServeConfig,
        slack: int,
        replicas: Callable[[], Sequence[str]],
        ask: Callable[[dict[str, Any], bytes, str | None], Any],
    ) -> None:
        self.config, self.balancer = config, Balancer(slack)
        self._replicas, self._ask = replicas, ask
        self._answers: set[Any] = set()  # under way
        self._draining = self._is_over = False

    def asgi(self) -> ASGIApp:
        """Behind the gate."""
        return Gate(self, self.config, Counter(), ())

    async def drain(self) -> None:
        """Take no new requests, wait until those that run have ended, and end them when time is over."""
        self._draining, end = True, time.monotonic() + self.config.drain_timeout
        while self._answers and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._is_over = True
        for answer in self._answers:
            answer.cancel()
        await asyncio.sleep(LAST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] == "/metrics" and scope["method"] == "GET" and self._replicas():
                await (await self._figures(scope))(scope, receive, send)
            else:
                await self._pass_on(scope, await self._body(receive), send)
        except HTTPError as error:
            await error.response()(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes:
        """What the client sends; of a body that is too large only as much as shows it."""
        data = bytearray()

        async def read() -> None:
            more = True
            while more and len(data) <= self.config.max_body:
                message = await receive()
                data.extend(message.get("body", b""))
                more = message.get("more_body", False)

        try:
            await asyncio.wait_for(read(), self.config.read_timeout)
        except asyncio.TimeoutError:
            raise HTTPError(408, "The body did not come in time.", headers={"connection": "close"}) from None
        return bytes(data)

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        names = await asyncio.to_thread(pieces, body, scope["state"]["salt"]) if body else []
        if self._draining:
            raise draining(self.config.drain_timeout)
        there = self._replicas()
        to = self.balancer.choose(names, there) if there else None
        more: bool | None = None  # to be sent; None: nothing was sent yet
        with self.balancer.busy(to or ""):
            answer = self._ask(self._plain(scope), body, to)
            self._answers.add(answer)
            try:
                async for messages in answer:
                    for message in messages:
                        if "facts" in message:
                            scope["state"]["facts"].update(message["facts"])
                            return
                        more = message.get("more_body", message["type"] == "http.response.start")
                        await send(message)
            except (Exception, asyncio.CancelledError) as error:
                gone = isinstance(error, asyncio.CancelledError) and not self._is_over
                why = "client gone" if gone else f"{type(error).__name__} of replica {to}"  # that has died
                scope["state"]["facts"]["ended_by"] = why
                if gone:
                    raise
                failure = HTTPError(503, LOST, headers={"retry-after": "5"})
                if more is None:
                    raise failure from None
                if more:
                    last = event(failure.body())  # of a stream: nothing else is sent in parts
                    await send({"type": "http.response.body", "body": last, "more_body": False})
            finally:
                self._answers.discard(answer)
                answer.cancel()  # nothing if it has ended

    def _plain(self, scope: Scope) -> dict[str, Any]:
        """What a process elsewhere can use of a scope, with the id that the gate has given the request."""
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", scope["state"]["id"].encode()))
        return {**{name: scope[name] for name in SCOPE if name in scope}, "headers": headers}

    async def _figures(self, scope: Scope) -> Response:
        found: dict[str, str] = {}
        for replica in self._replicas():  # one after the other: to Ray, all calls of a request have one id
            found.update(await self._figures_of(scope, replica))
        if not found:
            raise HTTPError(503, NOBODY)
        page, kind = together(found)
        return Response(page, media_type=kind)

    async def _figures_of(self, scope: Scope, replica: str) -> dict[str, str]:
        """By the name of who told them; nothing where none come."""
        page, name = bytearray(), ""
        answer = self._ask(self._plain(scope), b"", replica)

        async def read() -> None:
            nonlocal name
            async for messages in answer:
                for message in messages:
                    page.extend(message.get("body", b""))
                    name = message.get("facts", {}).get("replica", name)

        try:
            await asyncio.wait_for(read(), LOOK)
        except Exception:  # of Ray's, or it takes too long
            return {}
        finally:
            answer.cancel()
        return {name: page.decode()}
