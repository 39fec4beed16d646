"""Misbehaving clients and failures inside the server: afterwards no row or block is leaked and the next
request is answered. `Served.gate` stops the engine, so that no test depends on its speed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanospec.apps.serve import jobs
from nanospec.apps.serve.app import App
from nanospec.apps.serve.logs import log_to_stderr
from nanospec.apps.serve.server import Server, listen, run
from nanospec.apps.serve.settings import ServeConfig
from tests.drive import MODES
from tests.nanospec.apps.serve.conftest import Served, serving
from tests.nanospec.test_llm import ALPHABET, after, folder, make

__all__ = ["folder"]
LONG = {"prompt": after("abcd"), "temperature": 0, "max_tokens": 60, "ignore_eos": True, "n": 2}
SHORT = {"prompt": after("abcd"), "temperature": 0, "max_tokens": 5}


@pytest.fixture(params=["plain", "as-on-gpu"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """A server for this test alone, with short timeouts and a short queue."""
    llm = make(folder, **MODES[request.param])
    limits = {"max_queue": 12, "read_timeout": 0.4, "write_timeout": 0.5, "request_timeout": 5.0}
    with serving(llm, **limits) as served:
        yield served
        served.settle()
        answers: list[Any] = []

        def is_answered() -> bool:  # retried, since a busy machine may exceed these timeouts
            answers.append(served.post("/v1/completions", SHORT))
            return answers[-1].status_code == 200

        served.wait_until(is_answered)
        assert answers[-1].json()["choices"][0]["text"] == ALPHABET[4:9]


def raw(body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> bytes:
    """Return a request's bytes on the wire."""
    data = json.dumps(body).encode()
    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))}
    fields |= headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def reset(connection: socket.socket) -> None:
    """Close the connection with a reset, as a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closes", "resets"])
def test_disconnect_frees_blocks_before_next_step(server: Served, stream: bool, leave: Any) -> None:
    engine = server.llm.engine
    steps: list[int] = []
    step = engine.step

    def counted() -> Any:
        steps.append(len(engine.scheduler.running))
        actual = step()
        if len(steps) == 1:
            server.gate.clear()
        return actual

    engine.step = counted  # type: ignore[method-assign]
    connection = server.connect()
    connection.sendall(raw({**LONG, "stream": stream}))
    server.wait_until(lambda: not server.gate.is_set())
    assert engine.scheduler.running
    leave(connection)
    server.wait_until(lambda: not server.app.engine.num_outputs)
    before = len(steps)
    engine.step = step  # type: ignore[method-assign]
    server.settle()
    assert len(steps) - before <= 1  # the step in progress
    assert engine.metrics.num_aborted == 2


def test_many_clients_disconnecting_at_random_times(server: Served) -> None:
    chance = random.Random(3)

    def visit(i: int) -> None:
        connection = server.connect()
        data = raw({**LONG, "stream": bool(i % 2), "n": 1 + i % 3})
        connection.sendall(data[: chance.choice([len(data), len(data), 30, len(data) - 3])])
        time.sleep(chance.choice([0, 0, 0.002, 0.02]))
        (reset if i % 3 else socket.socket.close)(connection)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(visit, range(120)))
    server.settle()


def test_incomplete_requests_time_out(server: Served) -> None:
    starts = [b"", b"GET", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n", raw(LONG)[:-20]]
    connections = [server.connect() for _ in starts]
    for connection, start in zip(connections, starts):
        connection.sendall(start)
    dripping = server.connect()  # an occasional byte does not extend the timeout
    with pytest.raises(OSError):
        any(dripping.sendall(b"G") or time.sleep(0.05) for _ in range(160))  # type: ignore[func-returns-value]
    for connection in connections:
        connection.settimeout(8)
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:
            answer = b""
        assert answer == b"" or b" 408 " in answer
        connection.close()


def test_keep_alive(server: Served) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            time.sleep(0.5)  # longer than the read timeout of a request


def test_slow_reader_is_disconnected_without_delaying_others(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect((server.host, server.port))
    body = {**LONG, "logprobs": 20, "n": 4, "max_tokens": 80}
    body |= {"stream": True, "stream_options": {"include_drafts": True}}
    for _ in range(40):  # more than the buffers of two sockets hold
        connection.sendall(raw(body))
    given = server.post("/v1/completions", SHORT)
    assert given.status_code == 200
    server.wait_until(lambda: not server.app.engine.num_outputs)
    server.wait_until(lambda: not server.server.server_state.connections - {None}, 20)
    connection.close()


def test_idle_stream_sends_comments(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "QUIET_AFTER", 0.1)
    server.gate.clear()
    threading.Timer(0.6, server.gate.set).start()
    text = server.post("/v1/completions", {**SHORT, "stream": True}).text
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")


def test_connection_limit_still_answers_health(server: Served) -> None:
    object.__setattr__(server.app.config, "max_connections", 2)
    idle = [server.connect() for _ in range(3)]
    server.wait_until(lambda: len(server.server.server_state.connections) >= 3)
    refused = server.post("/v1/completions", SHORT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "Too many connections" in refused.json()["error"]["message"]
    assert server.get("/health").status_code == 200
    for connection in idle:
        connection.close()
    server.wait_until(lambda: len(server.server.server_state.connections) <= 1)


def test_full_queue_returns_retry_after(server: Served) -> None:
    server.gate.clear()
    room = server.app.engine.limit
    assert room == 4 + 12
    never = server.post("/v1/completions", {**SHORT, "n": 16, "prompt": ["a", "b"]})
    assert never.status_code == 400

    def ask(n: int) -> httpx.Response:
        return server.post("/v1/completions", {**SHORT, "n": n})

    with ThreadPoolExecutor(4) as pool:
        accepted = [pool.submit(ask, 5) for _ in range(3)]
        server.wait_until(lambda: server.app.engine.num_outputs == 15)
        refused = ask(2)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        last = pool.submit(ask, 1)  # fits
        server.wait_until(lambda: server.app.engine.num_outputs == 16)
        server.gate.set()
        for future in [*accepted, last]:
            response = future.result()
            assert {choice["text"] for choice in response.json()["choices"]} == {ALPHABET[4:9]}


def test_request_timeout(server: Served) -> None:
    object.__setattr__(server.app.config, "request_timeout", 0.3)
    server.gate.clear()
    given = server.post("/v1/completions", LONG)
    assert given.status_code == 504
    assert given.json()["error"]["type"] == "timeout_error"
    streamed = server.post("/v1/completions", {**LONG, "stream": True})
    assert streamed.status_code == 200
    assert "longer than the server allows" in streamed.text
    assert "[DONE]" not in streamed.text


class Panic(BaseException):
    """An exception like those Rust libraries raise on a panic."""


@pytest.mark.parametrize(
    ("where", "nth", "error"),
    [
        ("step", 2, RuntimeError), ("fetch", 2, RuntimeError), ("prefill", 2, RuntimeError),
        ("admit", 2, Panic), ("on_done", 1, RuntimeError), ("on_done", 3, RuntimeError),
        ("add", 2, Panic), ("step", 1, Panic),
    ],
)  # fmt: skip
def test_exception_fails_running_requests_only(
    server: Served, where: str, nth: int, error: type[BaseException]
) -> None:
    """During, before or after a step: the engine's thread survives, and every request is answered."""
    owners: dict[str, Any] = {"on_done": server.app.engine, "add": server.llm.engine.scheduler}
    owner, calls = owners.get(where, server.llm.engine.worker), []
    own = getattr(owner, where)

    def failing(*values: Any, **named: Any) -> Any:
        calls.append(where)
        if len(calls) == nth:
            raise error("a cosmic ray")
        return own(*values, **named)

    server.gate.clear()
    with ThreadPoolExecutor(6) as pool:
        bodies = [{**LONG, "stream": i % 2 == 1, "prompt": after("abcd") + "x" * i} for i in range(6)]
        actual = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        server.wait_until(lambda: server.app.engine.num_outputs == 12)
        setattr(owner, where, failing)
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
    setattr(owner, where, own)
    assert server.get("/health").status_code == 200
    server.settle()


def test_repeatedly_failing_engine_is_unhealthy(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.llm.engine.worker, "prefill", None)
        for _ in range(3):
            assert server.get("/health").status_code == 200
            assert server.post("/v1/completions", SHORT).status_code == 500
        health = server.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert server.post("/v1/completions", SHORT).status_code == 200
    assert server.get("/health").status_code == 200


def test_large_bodies_are_rejected(server: Served) -> None:
    object.__setattr__(server.app.config, "max_body", 10_000)
    assert server.post("/v1/completions", {"prompt": "a" * 20_000}).status_code == 413

    headers, chunks = {"content-type": "application/json"}, (b" " * 1000 for _ in range(100))
    with suppress(httpx.WriteError, httpx.ReadError):  # the server closed the connection
        chunked = httpx.post(f"{server.url}/v1/completions", content=chunks, headers=headers)
        assert chunked.status_code == 413
    lying = server.connect()
    lying.sendall(raw(SHORT, **{"content-length": str(10**15)}))
    assert b" 413 " in lying.recv(1000)
    lying.close()


def test_invalid_http(server: Served) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\xfc"  # of TLS
    for data in (hello, b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"A" * 200_000):
        connection = server.connect()
        try:
            connection.sendall(data)
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b""
        assert answer == b"" or b" 400 " in answer or b" 40" in answer
        connection.close()


SCRIPT = """
import asyncio, signal, sys, time
from nanospec import LLM
from nanospec.apps.serve.app import App
from nanospec.apps.serve.logs import log_to_stderr
from nanospec.apps.serve.server import listen, run
from nanospec.apps.serve.settings import ServeConfig
log_to_stderr("error")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
llm = LLM(sys.argv[1], dtype="float32", max_num_seqs=4, max_model_len=128)
step = llm.engine.step
def slow():
    time.sleep(0.05)
    return step()
llm.engine.step = slow
app = App(llm, ServeConfig(port=int(sys.argv[2]), drain_timeout=float(sys.argv[3])), "m")
code = asyncio.run(run(app, listen(app.config)))
pool = llm.engine.scheduler.pool
print("free", len(pool.free) == pool.num_blocks, flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("seconds", "signals"),
    [(20, [signal.SIGTERM]), (20, [signal.SIGHUP]), (0.1, [signal.SIGTERM]), (20, [signal.SIGTERM] * 2)],
)
def test_signal_under_load(folder: Path, seconds: float, signals: list[signal.Signals]) -> None:
    """With time to drain, all accepted requests are answered. Without it, or after a second signal, the
    server ends at once: waiting requests get an error, incomplete ones are cut off, no traceback is shown."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(port), str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    half = socket.socket()
    try:
        url, results = f"http://127.0.0.1:{port}", list[Any]()
        for _ in range(2000):
            with suppress(httpx.ConnectError):
                httpx.get(url + "/health")
                break
            time.sleep(0.05)

        def ask() -> None:
            body = {**LONG, "prompt": after("abcd"), "num_speculative_tokens": 0, "max_tokens": 100}
            try:
                results.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30))
            except httpx.HTTPError as error:
                results.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        if len(signals) == 2:
            half.connect(("127.0.0.1", port))
            half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.5)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
        for thread in threads:
            thread.join(30)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "free True\n"
        assert process.stderr is not None
        assert process.stderr.read() == ""
        if len(signals) == 1 and seconds > 1:
            assert [len(r.json()["choices"]) for r in results] == [2, 2, 2]
            assert all(c["finish_reason"] == "length" for r in results for c in r.json()["choices"])
        else:
            assert {getattr(r, "status_code", r) for r in results} == {503}
    finally:
        half.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("cleans_up", [True, False], ids=["a rank is gone", "cannot clean up"])
def test_server_ends_when_engine_is_dead(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cleans_up: bool
) -> None:
    """Until the server has ended, running and new requests are answered with an error."""
    llm, messages, lines = make(folder), list[str](), io.StringIO()
    app = App(llm, ServeConfig(port=0), "m")
    listener = listen(app.config)
    url = "http://{}:{}".format(*listener.getsockname())
    seen, on_tick = threading.Event(), Server.on_tick

    async def later(server: Server, counter: int) -> bool:
        return seen.is_set() and await on_tick(server, counter)

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    def end() -> None:
        while not app.engine.is_alive:
            time.sleep(0.01)
        if cleans_up:
            llm.engine.worker.failure = "Rank 1 is gone."
        else:
            for name in ("step", "abort_all"):
                monkeypatch.setattr(llm.engine, name, fail)
            answers = [httpx.post(url + "/v1/completions", json=SHORT, timeout=20) for _ in range(2)]
            messages.extend(
                f"{actual.status_code}: {actual.json()['error']['message']}" for actual in answers
            )
        messages.append(httpx.get(url + "/health").json()["status"])
        seen.set()

    monkeypatch.setattr(Server, "on_tick", later)
    asking = threading.Thread(target=end)
    asking.start()
    monkeypatch.setattr(sys, "stderr", lines)
    log_to_stderr("info")
    assert asyncio.run(run(app, listener)) == 1
    asking.join()
    failed = "500: The engine failed while processing this request; try again."
    assert messages == [*([] if cleans_up else [failed] * 2), "failed"]
    assert lines.getvalue().count("Rank 1 is gone." if cleans_up else "restart the server") == 1
