"""The app that clients connect to. It forwards requests to replicas and their responses to clients.

Paths, responses and errors are those of the server in the replica (`serve/app.py`). The front checks API keys
and writes log lines (`serve/gate.py`), and its `/metrics` merges the metrics of all replicas.

A response passes through Ray as lists of ASGI messages, because a list takes Ray as long as one message. Ray
queues without a limit, so sending faster than it can deliver would add ever more latency. Therefore `Sender`
pauses between the lists of a response.
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
from ..serve.gate import Bodies, Gate, HTTPError
from ..serve.settings import ServeConfig
from .routing import prefix_hashes

SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
NO_REPLICA = "No replica is available; try again in a few seconds."
LOST = "The replica failed before this request was finished; try again in 5 seconds."
DRAINING = "The server is shutting down and does not accept new requests."
LINGER = 5.0  # seconds that it outlives its replicas, to report errors
FLUSH = 1.0  # seconds to send the last bytes
PAUSE = 0.002  # seconds per running response: 500 lists per second in all; Ray delivers about 700


class Front:
    """Forwards requests; `asgi` returns the app.

    Args:
        ask: (scope, body, hashes of its prefixes) -> async generator of lists of ASGI messages; the last one
            has fields for the log under "log_fields".
        metrics: () -> an awaitable of the replicas' metrics pages by replica name.
    """

    def __init__(self, config: ServeConfig, ask: Callable[..., Any], metrics: Callable[[], Any]) -> None:
        self.config, self._ask, self._metrics = config, ask, metrics
        self._bodies, self._answers = Bodies(config), set[Any]()  # of running requests
        self._draining = self._is_over = False

    def asgi(self) -> ASGIApp:
        """Return the ASGI app, wrapped in the gate."""
        return Gate(self._answer, self.config, Counter(), set())

    async def drain(self) -> None:
        """Reject new requests and wait for the running ones; abort them after `drain_timeout`."""
        self._draining, end = True, time.monotonic() + self.config.drain_timeout
        while self._answers and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._is_over = True
        for answer in self._answers:
            answer.cancel()
        await asyncio.sleep(FLUSH)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics" and scope["method"] == "GET":
            if not (pages := await self._metrics()):
                raise HTTPError(503, NO_REPLICA)
            await Response(merge_metrics(pages), media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
        else:
            async with self._bodies.read(Request(scope, receive)) as body:
                await self._forward(scope, body, send)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        state = scope["state"]
        prefixes = await asyncio.to_thread(prefix_hashes, body, state["salt"]) if body else []
        if self._draining:
            retry_after = str(int(self.config.drain_timeout) + 1)
            raise HTTPError(503, DRAINING, headers={"retry-after": retry_after, "connection": "close"})
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", state["id"].encode()))  # assigned by the gate
        forwarded = {**{name: scope[name] for name in SCOPE if name in scope}, "headers": headers}
        more: bool | None = None  # whether the response is incomplete; None before its start
        answer = self._ask(forwarded, body, prefixes)
        self._answers.add(answer)
        try:
            async for messages in answer:
                for message in messages:
                    if "log_fields" in message:
                        state["log_fields"].update(message["log_fields"])
                        return
                    more = message.get("more_body", message["type"] == "http.response.start")
                    await send(message)
        except (Exception, asyncio.CancelledError) as error:
            disconnected = isinstance(error, asyncio.CancelledError) and not self._is_over
            state["log_fields"]["ended_by"] = "client disconnected" if disconnected else type(error).__name__
            if disconnected:
                raise
            failure = HTTPError(503, LOST, headers={"retry-after": "5"})
            if more is None:
                raise failure from None
            if more:
                last = event(failure.body(scope["path"]))  # only streams are sent in parts
                await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._answers.discard(answer)
            answer.cancel()  # no effect if it has finished


class Sender:
    """The replica's side: returns the responses of its app as lists of messages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._under_way = app, 0

    async def lists(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """Yield the app's response to a request, and raise its exceptions. Closing the generator looks like a
        disconnected client to the app."""
        sent: asyncio.Queue[Message] = asyncio.Queue()  # ends with an empty message
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
            disconnected.set()  # the app then ends


def merge_metrics(pages: Mapping[str, str]) -> bytes:
    """Merge metrics pages by replica name into one page, in which each sample has a label `replica`."""
    metrics: dict[str, Metric] = {}
    for replica, text in pages.items():
        for family in text_string_to_metric_families(text):
            merged = metrics.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry: Any = SimpleNamespace(collect=metrics.values)
    return generate_latest(registry)
