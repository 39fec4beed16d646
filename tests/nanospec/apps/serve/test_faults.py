"""Misbehaving clients and failures inside the server: afterwards no row or block is leaked and the next
request is answered. `Served.gate` stops the engine, so that no test depends on its speed."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanospec.apps.openai_format import COMPLETIONS
from nanospec.apps.serve import app as app_module
from nanospec.apps.serve import gate, jobs
from nanospec.apps.serve.app import App
from nanospec.apps.serve.logs import log_to_stderr
from nanospec.apps.serve.server import Server, listen, run
from nanospec.apps.serve.settings import ServeConfig
from tests.drive import MODES, assert_idle
from tests.nanospec.apps.serve.conftest import Served, serving
from tests.nanospec.test_llm import ALPHABET, after, folder, make

__all__ = ["folder"]
LONG = {"prompt": after("abcd"), "temperature": 0, "max_tokens": 60, "ignore_eos": True, "n": 2}
SHORT = {"prompt": after("abcd"), "temperature": 0, "max_tokens": 5}
JSON = {"content-type": "application/json"}
both_modes = pytest.mark.parametrize("shared", MODES, indirect=True)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    with serving(make(folder, **MODES[getattr(request, "param", "plain")])) as served:
        yield served


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    """A server that must work again after the test."""
    yield shared
    shared.settle()
    answered = shared.post(COMPLETIONS, SHORT)
    assert answered.json()["choices"][0]["text"] == ALPHABET[4:9]
    shared.wait_until(lambda: not shared.app._bodies.size)


@pytest.fixture
def limits(server: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that changes settings of the server during the test."""

    def change(**settings: float) -> None:
        for name, value in settings.items():
            monkeypatch.setitem(server.app.config.__dict__, name, value)

    return change


def raw(body: dict[str, Any], length: int = 0) -> bytes:
    """Return a request's bytes on the wire, with its body padded to `length` bytes."""
    data = json.dumps(body).encode().ljust(length)
    fields = {"host": "localhost", **JSON, "content-length": len(data)}
    lines = [f"POST {COMPLETIONS} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def reset(connection: socket.socket) -> None:
    """Close the connection with a reset, as a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@both_modes
@pytest.mark.parametrize(("stream", "leave"), [(False, socket.socket.close), (True, reset)])
def test_disconnect_frees_blocks_before_next_step(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool, leave: Any
) -> None:
    engine, steps = server.llm.engine, list[int]()
    step, aborted = engine.step, engine.metrics.num_aborted

    def counted() -> Any:
        steps.append(len(engine.scheduler.running))
        actual = step()
        if len(steps) == 1:
            server.gate.clear()
        return actual

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", counted)
        connection = server.connect()
        connection.sendall(raw({**LONG, "stream": stream}))
        server.wait_until(lambda: not server.gate.is_set())
        assert engine.scheduler.running
        leave(connection)
        server.wait_until(lambda: not server.app.engine.num_outputs)
        before = len(steps)
    server.settle()
    assert len(steps) - before <= 1  # the step in progress
    assert engine.metrics.num_aborted == aborted + 2


def answer(connection: socket.socket) -> bytes:
    """Return the first bytes of the server's answer, or none if it has closed the connection."""
    try:
        return connection.recv(1000)
    except ConnectionError:
        return b""
    finally:
        connection.close()


def test_incomplete_or_invalid_requests_are_ended(server: Served, limits: Any) -> None:
    """Unlike connections that are idle after a request."""
    limits(read_timeout=0.4)
    incomplete = [b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"]
    invalid = [b"\x16\x03\x01\x02\x00\x01\x00\xfc", b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"A" * 200_000]
    with httpx.Client(base_url=server.url, verify=False) as client:
        client.post(COMPLETIONS, json=SHORT)
        [idle] = server.server.server_state.connections
        starts = [*incomplete, raw(LONG)[:-20], *invalid]
        connections = [server.connect() for _ in starts]
        for connection, start in zip(connections, starts):
            with suppress(ConnectionError):
                connection.sendall(start)
        dripping = server.connect()  # an occasional byte does not extend the timeout
        with pytest.raises(OSError):
            any(dripping.sendall(b"G") or time.sleep(0.05) for _ in range(160))  # type: ignore[func-returns-value]
        answers = [answer(connection) for connection in connections]
        assert answers[3].startswith(b"HTTP/1.1 408 ")
        assert all(data == b"" or b" 40" in data for data in answers)
        assert idle in server.server.server_state.connections


def test_slow_reader_is_disconnected_without_delaying_others(server: Served, limits: Any) -> None:
    limits(write_timeout=0.5)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect((server.host, server.port))
    body = {**LONG, "logprobs": 20, "n": 4, "max_tokens": 80, "stream": True}
    for _ in range(14):  # more than the buffers of two sockets hold
        connection.sendall(raw(body | {"stream_options": {"include_drafts": True}}))
    assert server.post(COMPLETIONS, SHORT).status_code == 200
    server.wait_until(lambda: not server.app.engine.num_outputs)
    server.wait_until(lambda: not server.server.server_state.connections, 20)
    connection.close()


def test_idle_stream_sends_comments(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "QUIET_AFTER", 0.05)
    server.gate.clear()
    threading.Timer(0.3, server.gate.set).start()
    text = server.post(COMPLETIONS, {**SHORT, "stream": True}).text
    assert text.startswith(": keep-alive\n\n" * 2)
    assert text.endswith("data: [DONE]\n\n")


def test_connection_limit_still_answers_health(server: Served, limits: Any) -> None:
    limits(max_connections=2)
    server.wait_until(lambda: not server.server.server_state.connections)
    idle = [server.connect()]
    server.wait_until(lambda: len(server.server.server_state.connections) == 1)
    assert server.post(COMPLETIONS, SHORT).status_code == 200
    idle += [server.connect() for _ in range(2)]
    server.wait_until(lambda: len(server.server.server_state.connections) >= 3)
    refused = server.post(COMPLETIONS, SHORT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "Too many connections" in refused.json()["error"]["message"]
    assert server.get("/health").status_code == server.get("/metrics").status_code == 200
    idle += [server.connect() for _ in range(12)]
    server.wait_until(lambda: len(server.server.server_state.connections) == 2 * 2 + 8)
    assert [answer(connection) for connection in idle[12:]] == [b""] * 3
    for connection in idle:
        connection.close()
    server.wait_until(lambda: len(server.server.server_state.connections) <= 1)


def test_request_timeout(server: Served, limits: Any) -> None:
    limits(request_timeout=0.2)
    server.gate.clear()
    given = server.post(COMPLETIONS, LONG)
    assert (given.status_code, given.json()["error"]["type"]) == (504, "timeout_error")
    streamed = server.post(COMPLETIONS, {**LONG, "stream": True})
    assert streamed.status_code == 200
    assert "longer than the server allows" in streamed.text
    assert "[DONE]" not in streamed.text


def test_size_of_bodies_is_limited(server: Served, limits: Any) -> None:
    limits(max_body=1000)
    for size, status in ((1000, 200), (1001, 413)):
        data = json.dumps(SHORT).encode().ljust(size)
        for content in (data, (data[i : i + 100] for i in range(0, size, 100))):
            assert server.ask("POST", COMPLETIONS, content=content, headers=JSON).status_code == status
    lying = server.connect()
    lying.sendall(raw(SHORT).replace(b"content-length: ", b"content-length: 9999999999"))
    assert b" 413 " in answer(lying)


def test_bytes_of_all_bodies_are_limited(
    server: Served, limits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count from their arrival until the request is parsed."""
    limits(max_body=1000)
    monkeypatch.setattr(gate, "MAX_BODIES", 2)
    bodies, go, read_request = server.app._bodies, threading.Event(), app_module.read_request
    monkeypatch.setattr(app_module, "read_request", lambda *args: (go.wait(20), read_request(*args))[1])
    parsed, arriving, last = (server.connect() for _ in range(3))
    parsed.sendall(raw(SHORT, 1000))
    arriving.sendall(raw(SHORT, 999)[:-99])
    server.wait_until(lambda: bodies.size == 1900)
    for content in (b" " * 101, iter([b" " * 101])):  # with a length or in chunks
        refused = server.ask("POST", COMPLETIONS, content=content, headers=JSON)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert bodies.size == 1900
    last.sendall(raw({"prompt": "a", "max_tokens": 1}, 100))
    server.wait_until(lambda: bodies.size == 2000)
    arriving.close()
    server.wait_until(lambda: bodies.size == 1100)
    go.set()
    assert b" 200 " in answer(parsed)
    assert b" 200 " in answer(last)


class Panic(BaseException):
    """An exception like those Rust libraries raise on a panic."""


@pytest.mark.parametrize(
    ("shared", "where", "nth", "error"),
    [
        ("plain", "step", 2, RuntimeError),
        ("plain", "prefill", 2, Panic),
        ("plain", "on_done", 3, RuntimeError),
        ("plain", "add", 2, Panic),
        ("as-on-gpu", "fetch", 2, RuntimeError),
        ("as-on-gpu", "admit", 2, Panic),
        ("as-on-gpu", "on_done", 1, RuntimeError),
        ("as-on-gpu", "step", 1, Panic),
    ],
    indirect=["shared"],
)
def test_exception_fails_running_requests_only(
    server: Served, monkeypatch: pytest.MonkeyPatch, where: str, nth: int, error: type[BaseException]
) -> None:
    """During, before or after a step: the engine's thread survives, and every request is answered."""
    owners: dict[str, Any] = {"on_done": server.app.engine, "add": server.llm.engine.scheduler}
    owner, calls = owners.get(where, server.llm.engine.worker), list[str]()
    own = getattr(owner, where)

    def failing(*values: Any, **named: Any) -> Any:
        calls.append(where)
        if len(calls) == nth:
            raise error("a cosmic ray")
        return own(*values, **named)

    server.gate.clear()
    bodies = [{**LONG, "stream": i % 2 == 1, "prompt": after("abcd") + "x" * i} for i in range(4)]
    with ThreadPoolExecutor(4) as pool, monkeypatch.context() as patch:
        actual = [pool.submit(server.post, COMPLETIONS, body) for body in bodies]
        server.wait_until(lambda: server.app.engine.num_outputs == 8)
        patch.setattr(owner, where, failing)
        server.gate.set()
        responses = [future.result() for future in actual]
    failed = [r for r in responses if "engine failed" in r.text]
    assert failed
    assert len(calls) >= nth
    for response in responses:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert ("[DONE]" in response.text) == (response not in failed)
        else:
            assert response.status_code == (500 if response in failed else 200)
    assert server.get("/health").status_code == 200


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the server logs. Signals outside the server have no effect during the test."""
    loggers = [logging.getLogger(name) for name in ("nanospec.apps.serve", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    numbers = signal.SIGTERM, signal.SIGHUP
    handlers = [signal.signal(number, lambda *_: None) for number in numbers]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log_to_stderr("info")
    yield sys.stderr  # type: ignore[misc]
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    for logger, (previous, propagate, level) in zip(loggers, before):
        logger.handlers, logger.propagate = previous, propagate
        logger.setLevel(level)


def run_server(app: App, visit: Callable[[str], Any]) -> tuple[int, Any]:
    """Run the server in this thread, and `visit` with its URL in another one; return both results."""
    listener = listen(app.config)
    with ThreadPoolExecutor(1) as pool:
        visiting = pool.submit(visit, "http://{}:{}".format(*listener.getsockname()))
        return asyncio.run(run(app, listener)), visiting.result(30)


@pytest.mark.parametrize(
    ("seconds", "signals"),
    [(20, [signal.SIGTERM]), (20, [signal.SIGHUP]), (0.1, [signal.SIGTERM]), (20, [signal.SIGTERM] * 2)],
)
def test_signal_under_load(
    folder: Path, lines: io.StringIO, caplog: Any, seconds: float, signals: list[signal.Signals]
) -> None:
    """With time to drain, all accepted requests are answered. Without it, or after a second signal, the
    server ends at once: waiting requests get an error, incomplete ones are cut off, no error is logged."""
    llm = make(folder)
    step = llm.engine.step

    def slow_step() -> Any:
        time.sleep(0.02)
        return step()

    llm.engine.step = slow_step  # type: ignore[method-assign]
    app = App(llm, ServeConfig(port=0, drain_timeout=seconds), "m")
    body = {**LONG, "num_speculative_tokens": 0, "max_tokens": 20}

    def visit(url: str) -> list[httpx.Response]:
        with ThreadPoolExecutor(3) as pool, socket.socket() as half:
            ask = [pool.submit(httpx.post, url + COMPLETIONS, json=body, timeout=30) for _ in range(3)]
            if len(signals) == 2:
                half.connect((httpx.URL(url).host, httpx.URL(url).port))
                half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            while app.engine.num_outputs < 6 or not llm.engine.scheduler.running:
                time.sleep(0.01)
            for number in signals:
                os.kill(os.getpid(), number)
                time.sleep(0.15)
            with pytest.raises(httpx.ConnectError):
                httpx.get(url + "/health")
            return [each.result() for each in ask]

    code, results = run_server(app, visit)
    assert code == 0
    assert_idle(llm.engine)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {json.loads(line)["level"] for line in lines.getvalue().splitlines()} == {"info"}
    if len(signals) == 1 and seconds > 1:
        choices = [response.json()["choices"] for response in results]
        assert [[each["finish_reason"] for each in two] for two in choices] == [["length"] * 2] * 3
    else:
        assert {response.status_code for response in results} == {503}


@pytest.mark.parametrize("cleans_up", [True, False], ids=["a rank is gone", "cannot clean up"])
def test_server_ends_when_engine_is_dead(
    folder: Path, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch, cleans_up: bool
) -> None:
    """Until the server has ended, running and new requests are answered with an error."""
    llm = make(folder)
    app = App(llm, ServeConfig(port=0), "m")
    seen, on_tick = threading.Event(), Server.on_tick

    async def later(server: Server, counter: int) -> bool:
        return seen.is_set() and await on_tick(server, counter)

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    def visit(url: str) -> list[str]:
        messages = []
        while not app.engine.is_alive:
            time.sleep(0.01)
        if cleans_up:
            llm.engine.worker.failure = "Rank 1 is gone."
        else:
            for name in ("step", "abort_all"):
                monkeypatch.setattr(llm.engine, name, fail)
            answers = [httpx.post(url + COMPLETIONS, json=SHORT, timeout=20) for _ in range(2)]
            messages = [f"{each.status_code}: {each.json()['error']['message']}" for each in answers]
        health = httpx.get(url + "/health")
        messages.append(f"{health.status_code}: {health.json()['status']}")
        seen.set()
        return messages

    monkeypatch.setattr(Server, "on_tick", later)
    failed = "500: The engine failed while processing this request; try again."
    assert run_server(app, visit) == (1, [*([] if cleans_up else [failed] * 2), "503: failed"])
    assert lines.getvalue().count("Rank 1 is gone." if cleans_up else "restart the server") == 1
