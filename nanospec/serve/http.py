"""Uvicorn as it is needed here: connections that do not ask in time are closed, and it ends gently."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import ServeConfig

KEEP_ALIVE = 65  # seconds: longer than clients keep unused connections
LINGER = 5.0  # seconds to send what is left when a connection is closed
MAX_HEADERS = 32 << 10  # bytes


class Protocol(H11Protocol):
    """One connection. `scope["state"]["abort"]` of its requests cuts it off, whatever is still to be sent."""

    read_timeout = 20.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._limit_reading()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(LINGER, self.transport.abort)

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
        protocol = type("LimitedProtocol", (Protocol,), {"read_timeout": config.read_timeout})
        settings = uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            limit_concurrency=config.max_connections,
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

    async def _end(self) -> None:
        await self._drain()
        self.should_exit = True

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return host, port
