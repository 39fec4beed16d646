"""An answer on its way through Ray: nothing is lost or waits, and little is sent at a time of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from nanospec.apps.cluster import front
from nanospec.apps.cluster.front import Sender


def part(number: int) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"", "number": number}


def asked(app: ASGIApp, most: int = 1000) -> list[list[int]]:
    """The numbers in each list."""

    async def ask() -> list[list[int]]:
        found: list[list[int]] = []
        async with aclosing(Sender(app).lists({}, b"body")) as answer:
            async for several in answer:
                found.append([message["number"] for message in several])
                if len(found) == most:
                    break
        await asyncio.sleep(0.001)
        return found

    return asyncio.run(ask())


def sender(pauses: Sequence[int]) -> ASGIApp:
    """An app that sends 0, 1, 2, ..., after so many rounds of the event loop each."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for number, pause in enumerate(pauses):
            for _ in range(pause):
                await asyncio.sleep(0)
            await send(part(number))

    return app


@settings(max_examples=30)
@given(pauses=st.lists(st.sampled_from([0, 1, 3, 30]), max_size=20))
def test_every_message_comes_once_and_in_order(pauses: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "PAUSE", 1e-5)
        found = asked(sender(pauses))
    assert [number for numbers in found for number in numbers] == list(range(len(pauses)))
    assert [] not in found


def test_the_first_token_does_not_wait_and_what_follows_soon_comes_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front, "PAUSE", 0.1)
    begin = {"type": "http.response.start", "number": -1}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(begin)
        await sender([1] * 10)(scope, receive, send)

    assert asked(app) == [[-1], [0], list(range(1, 10))]


def test_the_more_answers_there_are_the_longer_are_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray carries so many lists, whoever's they are."""
    monkeypatch.setattr(front, "PAUSE", 0.01)
    waited: list[float] = []
    sleep = asyncio.sleep

    async def wait(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    async def ask(count: int) -> None:
        sends = Sender(sender([0]))
        found = [sends.lists({}, b"") for _ in range(count)]
        assert [await anext(each) for each in found] == [[part(0)]] * count
        waited.clear()
        with suppress(StopAsyncIteration):
            await anext(found[0])
        for each in found:
            await each.aclose()
        assert waited == [0.01 * count]

    monkeypatch.setattr(asyncio, "sleep", wait)
    for count in (1, 3):
        asyncio.run(ask(count))


def test_what_goes_wrong_is_raised_after_what_was_sent() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"body"
        await send(part(0))
        raise OSError("no such thing")

    async def ask() -> None:
        answer = Sender(app).lists({}, b"body")
        assert await anext(answer) == [part(0)]
        await anext(answer)

    with pytest.raises(OSError, match="no such thing"):
        asyncio.run(ask())


def test_an_app_is_told_when_nobody_listens_any_more() -> None:
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(part(0))
        told.append((await receive())["type"])

    assert asked(app, most=1) == [[0]]
    assert told == ["http.disconnect"]
