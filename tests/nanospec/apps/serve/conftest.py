"""A server in a thread of the test process, on a free port, with a tiny model that spells the alphabet."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanospec import LLM
from nanospec.apps.serve.app import App
from nanospec.apps.serve.server import Server, listen
from nanospec.apps.serve.settings import ServeConfig
from nanospec.kernels.native import library
from tests.alphabet import make
from tests.drive import assert_idle
from tests.util import eventually

MODEL = "alphabet"


class Served:
    """A running server. While `gate` is cleared, its engine runs no step."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.llm = llm
        self.gate = threading.Event()
        self.gate.set()
        self._options = {"port": 0, **options}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        step = llm.engine.step

        def gated() -> Any:
            self.gate.wait(30)
            return step()

        llm.engine.step = gated  # type: ignore[method-assign]

    async def _run(self) -> None:
        self.app = App(self.llm, ServeConfig(**self._options), MODEL)
        listener = listen(self.app.config)
        self.host, self.port = listener.getsockname()
        self.server = Server(self.app)
        self.app.engine.start()
        task = asyncio.ensure_future(self.server.serve(sockets=[listener]))
        while not self.server.started:
            await asyncio.sleep(0.001)
        self.url = f"http://{self.host}:{self.port}"
        self.loop = asyncio.get_running_loop()
        self._ready.set()
        await task
        await self.app.engine.stop()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self.gate.set()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request. `verify` is off because reading certificates is slow."""
        return httpx.request(method, self.url + path, timeout=20, verify=False, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.ask("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.ask("GET", path, **options)

    def stream(self, path: str, body: dict[str, Any], **options: bool) -> list[Any]:
        """Return the events of a streamed response before the last one; `options` are its stream_options."""
        *events, end = events_of(self.post(path, {**body, "stream": True, "stream_options": options}).text)
        assert end == "[DONE]", end
        return events

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=20)

    def settle(self) -> None:
        """Wait until the engine is idle, and check that no row or block is leaked."""
        self.gate.set()
        eventually(lambda: not self.llm.engine.has_work and not self.app.engine.num_outputs)
        with self.llm.shared.turn():
            assert_idle(self.llm.engine)
        assert not self.app.engine._live


def events_of(text: str) -> list[Any]:
    """Return the data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Served]:
    """Run a server for the duration of the block; at its end, wait until the server is idle and stop it."""
    library()  # compiling the C++ kernels may take longer than a request's timeout
    served = Served(llm, **options)
    served.start()
    try:
        yield served
        served.settle()
    finally:
        served.stop()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(make(folder, trace=True)) as served:
        yield served


@pytest.fixture(scope="module")
def offline(folder: Path) -> LLM:
    """Return the same model offline, to compute expected outputs."""
    return make(folder)
