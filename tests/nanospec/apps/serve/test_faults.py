"""Misbehaving clients and failures inside the server: afterwards no row or block is leaked and the next
request is answered. `Served.gate` stops the engine, so that no test depends on its speed."""

import asyncio
import io
import json
import logging
import math
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from nanospec.apps.openai_format import COMPLETIONS
from nanospec.apps.serve import gate, jobs
from nanospec.apps.serve.app import App
from nanospec.apps.serve.logs import log, log_to_stderr
from nanospec.apps.serve.loop import MAX_FAILURES
from nanospec.apps.serve.server import listen, run
from nanospec.apps.serve.settings import ServeConfig
from tests.alphabet import ALPHABET, after, make
from tests.drive import MODES, assert_idle
from tests.nanospec.apps.serve.conftest import Served, serving
from tests.util import eventually

LONG = {"prompt": after("abcd"), "temperature": 0, "max_tokens": 60, "ignore_eos": True, "n": 2}
SHORT = {"prompt": after("abcd"), "temperature": 0, "max_tokens": 5}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    with serving(make(folder, **MODES[getattr(request, "param", "plain")])) as served:
        yield served


@pytest.fixture
def server(shared: Served) -> Iterator[Served]:
    """Yield a server, and check that it works after the test."""
    yield shared
    shared.settle()
    answered = shared.post(COMPLETIONS, SHORT)
    assert answered.json()["choices"][0]["text"] == ALPHABET[4:9]
    eventually(lambda: not shared.app._bodies.size)


@pytest.fixture
def limits(server: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that changes settings of the server during the test."""

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


@pytest.mark.parametrize("shared", MODES, indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_blocks_before_next_step(server: Served, stream: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(gate.log, "log", logged := Mock())
    metrics = server.llm.engine.metrics
    steps, aborted = metrics.num_forward_steps, metrics.num_aborted
    server.gate.clear()
    connection = server.connect()
    connection.sendall(raw({**LONG, "stream": stream}))
    eventually(lambda: server.llm.engine.has_work)
    if stream:  # a killed process resets its connections
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    eventually(lambda: not server.app.engine.num_outputs)
    server.settle()
    eventually(lambda: "'client disconnected'" in str(logged.call_args))
    assert metrics.num_forward_steps - steps <= 1  # the step in progress
    assert metrics.num_aborted == aborted + 2


def answer(connection: socket.socket) -> bytes:
    """Return the first bytes of the server's answer, or none if it has closed the connection."""
    try:
        return connection.recv(1000)
    except ConnectionError:
        return b""
    finally:
        connection.close()


def test_incomplete_or_invalid_requests_are_ended(server: Served, limits: Any) -> None:
    """A connection that is idle after a request stays open."""
    limits(read_timeout=0.4)
    incomplete = [b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"]
    invalid = [b"\x16\x03\x01\x02", b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"A" * 200_000]
    with httpx.Client(base_url=server.url, verify=False) as client:
        client.post(COMPLETIONS, json=SHORT)
        [idle] = server.server.server_state.connections
        starts = [*incomplete, raw(LONG)[:-20], *invalid]
        connections = [server.connect() for _ in starts]
        for connection, start in zip(connections, starts):
            with suppress(ConnectionError):
                connection.sendall(start)
        later, answered = server.connect(), b""
        later.sendall(raw(SHORT))
        while not answered.endswith(b"}"):
            answered += later.recv(10_000)
        later.sendall(b"POST")  # the start of a second request
        slow_sender = server.connect()  # an occasional byte does not extend the timeout
        with pytest.raises(OSError):
            any(slow_sender.sendall(b"G") or time.sleep(0.05) for _ in range(160))  # type: ignore[func-returns-value]
        answers = [answer(connection) for connection in connections]
        assert answers[3].startswith(b"HTTP/1.1 408 ")
        assert all(data == b"" or b" 40" in data for data in answers)
        assert idle in server.server.server_state.connections
        assert answer(later) == b""
        for call, is_limited in ((idle.pause_writing, True), (idle.resume_writing, False)):
            call()
            assert (idle.writing < math.inf) == is_limited  # type: ignore[union-attr]


@pytest.mark.slow
def test_slow_reader_is_disconnected_without_delaying_others(server: Served, limits: Any) -> None:
    limits(write_timeout=0.5)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect((server.host, server.port))
    body = {**LONG, "logprobs": 20, "n": 4, "max_tokens": 80, "stream": True}
    for _ in range(14):  # more than the buffers of two sockets hold
        connection.sendall(raw(body | {"stream_options": {"include_drafts": True}}))
    assert server.post(COMPLETIONS, SHORT).status_code == 200
    eventually(lambda: not server.app.engine.num_outputs)
    eventually(lambda: not server.server.server_state.connections, 20)
    connection.close()


def test_connection_limit_still_answers_health(server: Served, limits: Any) -> None:
    def wait_for(count: int) -> None:
        eventually(lambda: len(server.server.server_state.connections) == count)

    limits(max_connections=2)
    wait_for(0)
    idle = [server.connect()]
    wait_for(1)
    assert server.post(COMPLETIONS, SHORT).status_code == 200
    idle += [server.connect() for _ in range(2)]
    wait_for(3)
    refused = server.post(COMPLETIONS, SHORT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "Too many connections" in refused.json()["error"]["message"]
    assert server.get("/health").status_code == server.get("/metrics").status_code == 200
    server.app.engine.failures = MAX_FAILURES
    assert (server.get("/health").status_code, server.get("/health").json()) == (503, {"status": "failed"})
    idle += [server.connect() for _ in range(12)]
    wait_for(2 * 2 + 8)
    assert [answer(connection) for connection in idle[12:]] == [b""] * 3
    for connection in idle:
        connection.close()
    wait_for(0)


def test_late_request_times_out(server: Served, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the timeout, a stream without tokens sends keep-alive comments."""
    monkeypatch.setattr(jobs, "QUIET_AFTER", 0.05)
    limits(request_timeout=0.2)
    server.gate.clear()
    given = server.post(COMPLETIONS, LONG)
    assert (given.status_code, given.json()["error"]["type"]) == (504, "timeout_error")
    streamed = server.post(COMPLETIONS, {**LONG, "stream": True})
    assert streamed.status_code == 200
    assert streamed.text.startswith(": keep-alive\n\n" * 2)
    assert "longer than the server allows" in streamed.text
    assert "[DONE]" not in streamed.text


def test_size_of_bodies_is_limited(server: Served, limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit each body and the sum of all, with Content-Length and chunked."""

    def send(data: bytes) -> list[httpx.Response]:
        chunks = (data[i : i + 100] for i in range(0, len(data), 100))
        return [server.ask("POST", COMPLETIONS, content=c, headers=JSON) for c in (data, chunks)]

    limits(max_body=1000)
    monkeypatch.setattr(gate, "MAX_BODIES", 2)
    for size, status in ((1000, 200), (1001, 413)):
        data = json.dumps(SHORT).encode().ljust(size)
        assert [response.status_code for response in send(data)] == [status] * 2
    for parts in ([b" " * 500, b" " * 501], []):  # the response follows the body, or the timeout
        limits(read_timeout=20.0 if parts else 0.3)
        connection = server.connect()
        connection.sendall(raw(SHORT, 1001).partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        for part in parts:
            time.sleep(0.1)
            connection.sendall(part)  # raises an error if the server has closed the connection
        assert answer(connection).startswith(b"HTTP/1.1 413 ")
    limits(read_timeout=20.0)
    waits = raw(SHORT, 1001).replace(b"host:", b"expect: 100-continue\r\nhost:").partition(b"\r\n\r\n")
    connection = server.connect()
    connection.sendall(waits[0] + waits[1])
    assert answer(connection).startswith(b"HTTP/1.1 413 ")
    bodies, arriving = server.app._bodies, [server.connect() for _ in range(2)]
    for connection in arriving:
        connection.sendall(raw(SHORT, 999)[:-49])
    eventually(lambda: bodies.size == 1900)
    for refused in send(b" " * 101):
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    arriving[0].close()
    eventually(lambda: bodies.size == 950)
    arriving[1].sendall(b" " * 49)
    assert b" 200 " in answer(arriving[1])


class Panic(BaseException):
    """An exception like those Rust libraries raise on a panic."""


@pytest.mark.parametrize(
    ("shared", "where", "nth"),
    [
        ("plain", "step", 2),
        ("plain", "prefill", 2),
        ("plain", "on_done", 3),  # the third failure: a successful step resets their count
        ("plain", "add", 2),
        ("as-on-gpu", "fetch", 2),
        ("as-on-gpu", "step", 1),
    ],
    indirect=["shared"],
)
def test_exception_fails_running_requests_only(
    server: Served, monkeypatch: pytest.MonkeyPatch, where: str, nth: int
) -> None:
    """An exception is raised during, before or after a step. The engine's thread continues."""
    owners: dict[str, Any] = {"on_done": server.app.engine, "add": server.llm.engine.scheduler}
    owner, calls = owners.get(where, server.llm.engine.worker), list[str]()
    own = getattr(owner, where)

    def failing(*values: Any, **named: Any) -> Any:
        calls.append(where)
        if len(calls) == nth:
            raise Panic
        return own(*values, **named)

    server.gate.clear()
    bodies = [{**LONG, "stream": i % 2 == 1, "prompt": after("abcd") + "x" * i} for i in range(4)]
    with ThreadPoolExecutor(4) as pool, monkeypatch.context() as patch:
        patch.setattr(owner, where, failing)
        actual = [pool.submit(server.post, COMPLETIONS, body) for body in bodies]
        eventually(lambda: server.app.engine.num_outputs >= 6)  # a request that failed has ended
        server.gate.set()
        responses = [future.result() for future in actual]
    failed = [r for r in responses if "engine failed" in r.text]
    assert failed
    for response in responses:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert ("[DONE]" in response.text) == (response not in failed)
        else:
            assert response.status_code == (500 if response in failed else 200)
    assert server.get("/health").status_code == 200


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Collect the server's log. Signals outside the server have no effect during the test."""
    for name in ("nanospec.apps.serve", "uvicorn"):
        logger = logging.getLogger(name)
        for attribute in ("handlers", "propagate", "level"):  # restored after the test
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    numbers = signal.SIGTERM, signal.SIGHUP
    handlers = [signal.signal(number, lambda *_: None) for number in numbers]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log_to_stderr("info")
    yield sys.stderr  # type: ignore[misc]
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


def test_errors_but_no_cancellations_are_logged(lines: io.StringIO) -> None:
    for error in (asyncio.CancelledError(), OSError("full")):
        log.error("failed", exc_info=error)
    [line] = map(json.loads, lines.getvalue().splitlines())
    assert (line["level"], line["event"], line["error"][-13:]) == ("error", "failed", "OSError: full")


def run_server(app: App, visit: Callable[[str], Any]) -> tuple[int, Any]:
    """Run the server in this thread, and `visit` with its URL in another one; return both results."""
    listener = listen(app.config)
    with ThreadPoolExecutor(1) as pool:
        visiting = pool.submit(visit, "http://{}:{}".format(*listener.getsockname()))
        return asyncio.run(run(app, listener)), visiting.result(30)


@pytest.mark.parametrize(
    ("seconds", "signals"), [(20, [signal.SIGHUP]), (0.1, [signal.SIGTERM]), (20, [signal.SIGTERM] * 2)]
)
def test_accepted_requests_end_after_signal(
    folder: Path, lines: io.StringIO, monkeypatch: Any, seconds: float, signals: list[signal.Signals]
) -> None:
    """With time to drain, all accepted requests are answered. Without it, or after a second signal, the
    server ends at once, and waiting requests get an error."""
    llm = make(folder)
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.02), step())[1])  # type: ignore[func-returns-value]
    app = App(llm, ServeConfig(port=0, drain_timeout=seconds), "m")
    body = {**LONG, "num_speculative_tokens": 0, "max_tokens": 20}

    def visit(url: str) -> list[httpx.Response]:
        with ThreadPoolExecutor(3) as pool:
            ask = [pool.submit(httpx.post, url + COMPLETIONS, json=body, timeout=30) for _ in range(3)]
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
    assert {json.loads(line)["level"] for line in lines.getvalue().splitlines()} == {"info"}
    choices = [choice for response in results for choice in response.json().get("choices", ())]
    drained = signals == [signal.SIGHUP]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 6 * drained
    assert {response.status_code for response in results} == {200 if drained else 503}


def test_server_ends_when_a_rank_is_gone(folder: Path, lines: io.StringIO) -> None:
    app, reason = App(make(folder), ServeConfig(port=0), "m"), "Rank 1 is gone."
    assert run_server(app, lambda url: setattr(app.llm.engine.worker, "failure", reason)) == (1, None)
    assert lines.getvalue().count(reason) == 1
