"""Uvicorn as it is needed here: connections that do not ask in time are closed, and it ends gently."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import HTTPError
from .settings import ServeConfig

KEEP_ALIVE = 65  # seconds: longer than clients keep unused connections
LINGER = 5.0  # seconds to send what is left when a connection is closed
FAREWELL = 1.0  # seconds to tell clients that nothing comes any more, where it ends at once
MAX_HEADERS = 32 << 10  # bytes


class Protocol(H11Protocol):
    """One connection. `scope["state"]["connections"]` of its requests are all there are."""

    read_timeout, most_connections = 20.0, 1000
    write_timeout = 60.0
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connections": self.connections}
        if len(self.connections) > self.most_connections:
            transport.abort()
        self._limit_reading()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(LINGER, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so as everybody is told of errors, not as a text."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            error = HTTPError(400, "This is no request of HTTP.", headers={"connection": "close"})
            response = error.response()
            head = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(response.body))
        self.transport.close()

    def _limit_reading(self) -> None:
        """Headers must be complete some time after their first byte, or after the connection was made. (The
        body has a limit of its own, and so has an unused connection behind its first request.)"""
        reads = self.cycle is None or (self.cycle.response_complete and self.timeout_keep_alive_task is None)
        if not reads and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif reads and self._timer is None:
            self._timer = self.loop.call_later(self.read_timeout, self.transport.abort)


class Server(uvicorn.Server):
    """Ends when it is told to, but not before `drain` is done; told twice, at once."""

    def __init__(self, app: ASGIApp, config: ServeConfig, drain: Callable[[], Any]) -> None:
        limits = {"read_timeout": config.read_timeout, "write_timeout": config.write_timeout}
        limits["most_connections"] = 2 * config.max_connections + 8
        protocol = type("LimitedProtocol", (Protocol,), limits)
        settings = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(LINGER),
            h11_max_incomplete_event_size=MAX_HEADERS,
            proxy_headers=False,
        )
        super().__init__(settings)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
        elif threading.current_thread() is threading.main_thread():
            self._draining = asyncio.get_event_loop().create_task(self._end())

    def end_at_hangup(self) -> None:
        """Take SIGHUP, of a terminal that is closed, as SIGTERM, unless nohup has it ignored."""
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        if threading.current_thread() is threading.main_thread() and not ignored:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)

    async def _end(self) -> None:
        await self._drain()
        self.should_exit = True

    async def say_farewell(self) -> None:
        """Have requests that were ended by the end of the engine answered, by clients that read at once."""
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=FAREWELL)


def listen(config: ServeConfig) -> socket.socket:
    """The socket of a server. OSError with a sentence if it cannot be had."""
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (")[0]
        raise OSError(f"cannot listen at {where}: {reason}; --host and --port name another.") from None
