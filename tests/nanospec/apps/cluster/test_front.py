"""The ingress with mock replicas, and the transport of responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from nanospec.apps.cluster import front as front_module
from nanospec.apps.cluster.front import DRAINING, LOST, NO_REPLICA, Front, Sender
from nanospec.apps.cluster.routing import prefix_hashes
from nanospec.apps.serve.settings import ServeConfig

Messages = AsyncIterator[dict[str, Any]]
URL = "/v1/completions"
BEGIN = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


class Answer:
    """A replica's answer as Ray's handle yields it: lists of messages, here of one message each."""

    def __init__(self, source: Messages) -> None:
        self._source, self.is_cancelled = source, False
        self._next: asyncio.Future[dict[str, Any]] | None = None

    async def __aiter__(self) -> AsyncIterator[list[dict[str, Any]]]:
        with suppress(StopAsyncIteration):
            while True:
                self._next = asyncio.ensure_future(anext(self._source))
                yield [await self._next]

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._next is not None:
            self._next.cancel()


def part(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def echo(scope: dict[str, Any], body: bytes, names: Sequence[bytes]) -> Messages:
    yield BEGIN
    received = {"names": names, "path": scope["path"], "body": body, "headers": dict(scope["headers"])}
    yield part(repr(received).encode())
    yield {"log_fields": {}}


def front(
    ask: Callable[..., Messages], pages: Mapping[str, str] | None = None, **config: Any
) -> tuple[httpx.AsyncClient, Front]:
    ingress = Front(ServeConfig(**config), lambda *args: Answer(ask(*args)), AsyncMock(return_value=pages))
    transport = httpx.ASGITransport(ingress.asgi(), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost"), ingress


def run(ask: Callable[..., Messages], method: str, path: str, body: Any, **options: Any) -> httpx.Response:
    async def one() -> httpx.Response:
        client, ingress = front(ask, **options)
        async with client:
            result = await client.request(method, path, content=body)
        assert (ingress._answers, ingress._bodies.size) == (set(), 0)
        return result

    return asyncio.run(one())


def test_accepted_request_reaches_replica() -> None:
    body = json.dumps({"prompt": "x" * 400}).encode()
    response = run(echo, "POST", URL, body)
    received = eval(response.text)
    assert (received["path"], received["body"], received["names"]) == (URL, body, prefix_hashes(body))
    assert received["headers"][b"x-request-id"].decode() == response.headers["x-request-id"]
    assert received["headers"][b"host"] == b"localhost"
    assert run(echo, "POST", URL, body, api_key=("secret-key",)).status_code == 401
    assert run(echo, "POST", URL, b"x" * 2501, max_body=2500).status_code == 413


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        ([], 503, ""),
        ([b"data: {}\n\n"], 200, "data: {}\n\ndata: "),
        ([b"data: {}\n\n", b""], 200, "data: {}\n\n"),
    ],
)
def test_dead_replica_is_reported_as_error(sent: list[bytes], status: int, text: str) -> None:
    async def fails(*_: object) -> Messages:
        if sent:
            yield BEGIN
        for data in sent:
            yield part(data, more=data != b"")
        raise RuntimeError("ActorDiedError")

    response = run(fails, "POST", URL, "{}")
    assert (response.status_code, response.headers.get("retry-after")) == (status, None if sent else "5")
    error = response.text.removeprefix(text)
    assert json.loads(error)["error"]["message"] == LOST if len(sent) < 2 else error == ""


def test_disconnect_cancels_answer() -> None:
    async def never(*_: object) -> Messages:
        yield BEGIN
        await asyncio.sleep(60)

    async def ask() -> None:
        client, ingress = front(never)
        running = asyncio.ensure_future(client.post(URL, content=b" "))
        while not ingress._answers:
            await asyncio.sleep(0.01)
        [answer] = ingress._answers
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert answer.is_cancelled
        assert (ingress._answers, ingress._bodies.size) == (set(), 0)

    asyncio.run(ask())


@pytest.mark.parametrize("ends", [True, False], ids=["in-time", "too-late"])
def test_drain_finishes_running_and_rejects_new_requests(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "FLUSH", 0.0)
    event = asyncio.Event()

    async def answer(*_: object) -> Messages:
        yield BEGIN
        yield part(b"data: first\n\n", more=True)
        await event.wait()
        yield part(b"data: [DONE]\n\n")

    async def end() -> tuple[httpx.Response, httpx.Response]:
        client, ingress = front(answer, drain_timeout=30.0 if ends else 0.1)
        running = asyncio.ensure_future(client.post(URL, content="{}"))
        while not ingress._answers:
            await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(ingress.drain())
        await asyncio.sleep(0.01)
        refused = await client.post(URL, content="{}")
        if ends:
            assert not draining.done()
            event.set()
        await asyncio.wait_for(draining, 10)
        return await running, refused

    finished, refused = asyncio.run(end())
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, DRAINING)
    assert refused.headers["retry-after"] == ("31" if ends else "1")
    first, last, _ = finished.text.split("\n\n")
    assert first == "data: first"
    assert last == "data: [DONE]" if ends else LOST in last


def test_metrics_include_all_replicas() -> None:
    text = '# TYPE h histogram\nh_bucket{le="1.0"} 1.0\nh_bucket{le="+Inf"} 2.0\nh_count 2.0\nh_sum 5.0\n'
    text += '# TYPE nanospec:steps counter\nnanospec:steps_total{model_name="m"} '
    page = run(echo, "GET", "/metrics", b"", pages={"a": f"{text} 1\n", "bb": f"{text} 2\n"}).text
    assert page.count("# TYPE nanospec:steps_total counter") == page.count("# TYPE h histogram") == 1
    assert page.count('le="+Inf"') == 2
    assert 'nanospec:steps_total{model_name="m",replica="a"} 1.0\n' in page
    assert 'nanospec:steps_total{model_name="m",replica="bb"} 2.0\n' in page
    response = run(echo, "GET", "/metrics", b"")
    assert (response.status_code, response.json()["error"]["message"]) == (503, NO_REPLICA)


def sent_numbers(app: ASGIApp, most: int = 1000, path: str = "/") -> list[list[int]]:
    """Return the numbers in each list that the app's sender yields, up to `most` lists."""

    async def ask() -> list[list[int]]:
        result: list[list[int]] = []
        async with aclosing(Sender(app).lists({"path": path}, b"body")) as answer:
            async for several in answer:
                result.append([message["number"] for message in several])
                if len(result) == most:
                    break
        await asyncio.sleep(0.001)
        return result

    return asyncio.run(ask())


def test_first_token_is_sent_at_once_and_the_rest_coalesced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "PAUSE", 0.1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "number": -1})
        for number in range(10):
            await asyncio.sleep(0)
            await send({**part(b""), "number": number})

    assert sent_numbers(app) == [[-1], [0], list(range(1, 10))]


def test_sender_passes_body_errors_and_disconnects() -> None:
    received: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.append((await receive())["body"])
        await send({**part(b""), "number": 0})
        if scope["path"] == "/wrong":
            raise OSError("no such thing")
        received.append((await receive())["type"])

    assert sent_numbers(app, most=1) == [[0]]
    assert received == [b"body", "http.disconnect"]
    with pytest.raises(OSError, match="no such thing"):
        sent_numbers(app, path="/wrong")
