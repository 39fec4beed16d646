"""The app that clients connect to: it reads a request, has a replica answer it and hands the answer on.

Paths, answers and errors are those of the server in the replica (`serve/app.py`). The front has what comes
before, keys and log lines (`serve/gate.py`), and `/metrics`, with the figures of all replicas.

An answer comes through Ray as lists of messages, as Ray takes as long for a list as for a message. Ray
queues what it is given without a limit, and what is sent faster than it carries would come later and later.
So `Sender` pauses between the lists of an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..serve.answers import event
from ..serve.gate import Gate, HTTPError, draining, read_body
from ..serve.settings import ServeConfig
from .routing import prefix_hashes

SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
NO_REPLICA = "No replica answers; try again in some seconds."
LOST = "The replica ended before it could finish this request, which may be sent again."
LINGER = 5.0  # seconds that it outlives its replicas, to say so
FLUSH = 1.0  # seconds to send the last bytes
PAUSE = 0.002  # seconds, for each answer under way: 500 lists a second in all, of about 700 that Ray carries


class Front:
    """Answers requests; `asgi` is the app.

    Args:
        ask: (scope, body, hashes of its prefixes) -> lists of messages as ASGI sends them, and last of all
            facts for the log, under "facts".
        figures: () -> the page of metrics of each replica by its name, to be awaited.
    """

    def __init__(self, config: ServeConfig, ask: Callable[..., Any], figures: Callable[[], Any]) -> None:
        self.config, self._ask, self._figures = config, ask, figures
        self._answers: set[Any] = set()  # under way
        self._draining = self._is_over = False

    def asgi(self) -> ASGIApp:
        """Return the app behind the gate."""
        return Gate(self._answer, self.config, Counter(), set())

    async def drain(self) -> None:
        """Take no new requests, and wait until those that run have ended, or end them when time is over."""
        self._draining, end = True, time.monotonic() + self.config.drain_timeout
        while self._answers and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._is_over = True
        for answer in self._answers:
            answer.cancel()
        await asyncio.sleep(FLUSH)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics" and scope["method"] == "GET":
            if not (pages := await self._figures()):
                raise HTTPError(503, NO_REPLICA)
            await Response(merge_metrics(pages), media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
        else:
            await self._forward(scope, await read_body(Request(scope, receive), self.config), send)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        state = scope["state"]
        prefixes = await asyncio.to_thread(prefix_hashes, body, state["salt"]) if body else []
        if self._draining:
            raise draining(self.config.drain_timeout)
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", state["id"].encode()))  # which the gate has given it
        forwarded = {**{name: scope[name] for name in SCOPE if name in scope}, "headers": headers}
        more: bool | None = None  # to be sent; None: nothing was sent yet
        answer = self._ask(forwarded, body, prefixes)
        self._answers.add(answer)
        try:
            async for messages in answer:
                for message in messages:
                    if "facts" in message:
                        state["facts"].update(message["facts"])
                        return
                    more = message.get("more_body", message["type"] == "http.response.start")
                    await send(message)
        except (Exception, asyncio.CancelledError) as error:
            client_gone = isinstance(error, asyncio.CancelledError) and not self._is_over
            state["facts"]["ended_by"] = "client gone" if client_gone else type(error).__name__  # of Ray's
            if client_gone:
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


class Sender:
    """The replica's side: the answers of its app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._under_way = app, 0

    async def lists(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """Yield the app's messages in answer to a request. Raises what the app raises. To the app, closing
        the generator is a client that goes away."""
        sent: asyncio.Queue[Message] = asyncio.Queue()  # and last of all an empty one
        disconnected, requests = asyncio.Event(), iter([{"type": "http.request", "body": body}])

        async def receive() -> Message:
            if (request := next(requests, None)) is not None:
                return request
            await disconnected.wait()
            return {"type": "http.disconnect"}

        running: asyncio.Future[Any] = asyncio.ensure_future(self._app(scope, receive, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait({}))
        self._under_way += 1
        try:
            last: Message | None = None
            while last != {}:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                last = messages[-1]
                if nonempty := [message for message in messages if message]:
                    yield nonempty
                if "body" in last:  # no pause before the first token
                    await asyncio.sleep(PAUSE * self._under_way)
            await running
        finally:
            self._under_way -= 1
            disconnected.set()  # an app without a client ends by itself


def merge_metrics(pages: Mapping[str, str]) -> bytes:
    """Return pages of metrics, by replica, as one in which every figure has a label `replica`."""
    metrics: dict[str, Metric] = {}
    for replica, text in pages.items():
        for family in text_string_to_metric_families(text):
            merged = metrics.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry: Any = SimpleNamespace(collect=metrics.values)
    return generate_latest(registry)
