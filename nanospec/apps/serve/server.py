"""Uvicorn with read and write timeouts for its connections, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...device.hardware import compute_info
from .app import App
from .logs import log
from .settings import ServeConfig

KEEP_ALIVE = 65  # seconds; longer than clients keep idle connections
LINGER = 5  # seconds to send remaining data at the end of a graceful shutdown
FAREWELL = 1.0  # seconds to send a final error to clients at an immediate exit
MAX_HEADERS = 32 << 10  # bytes


class Protocol(H11Protocol):
    """One connection. `scope["state"]["connections"]` of its requests contains all open connections."""

    limits = ServeConfig()
    reading = writing = math.inf  # deadlines on the event loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connections": self.connections}
        if len(self.connections) > 2 * self.limits.max_connections + 8:  # too many even to answer with 503
            transport.abort()
        self._limit_reading()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writing = self.loop.time() + self.limits.write_timeout

    def resume_writing(self) -> None:
        super().resume_writing()
        self.writing = math.inf

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # in the middle of a response
            self.transport.close()

    def _limit_reading(self) -> None:
        """Limit the time from the start of the connection, or the first byte of a request, until its headers
        are complete. (The body and idle connections after the first request have separate limits.)"""
        reads = self.cycle is None or (self.cycle.response_complete and self.timeout_keep_alive_task is None)
        latest = self.loop.time() + self.limits.read_timeout
        self.reading = min(self.reading, latest) if reads else math.inf


class Server(uvicorn.Server):
    """Serves until a signal, after which running requests finish, a second signal, or an engine failure."""

    def __init__(self, app: App) -> None:
        settings = uvicorn.Config(
            app.asgi(), http=type("LimitedProtocol", (Protocol,), {"limits": app.config}), ws="none",
            lifespan="off", access_log=False, log_config=None, log_level="warning", server_header=False,
            timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=int(app.config.drain_timeout + LINGER),
            h11_max_incomplete_event_size=MAX_HEADERS, proxy_headers=False,
        )  # fmt: skip
        super().__init__(settings)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit, self.should_exit = self.should_exit, True
        asyncio.get_event_loop().call_later(self._app.config.drain_timeout, self._app.engine.end_all)

    async def on_tick(self, counter: int) -> bool:
        """Abort connections past a deadline and return whether to exit. Called ten times a second."""
        now = asyncio.get_running_loop().time()
        connections: set[Any] = self.server_state.connections
        for each in [each for each in connections if min(each.reading, each.writing) < now]:
            each.transport.abort()
        return await super().on_tick(counter) or self._app.engine.fatal_error is not None


def listen(config: ServeConfig) -> socket.socket:
    """Return a listening socket. Raises OSError with a one-sentence message if that fails."""
    try:
        infos = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (")[0]
        where = f"{config.host}:{config.port}"
        raise OSError(f"cannot listen on {where}: {reason}; change --host or --port.") from None


async def run(app: App, listener: socket.socket) -> int:
    """Serve until a signal or an engine failure; return the exit status."""
    server, engine, spec = Server(app), app.engine, app.llm.config.spec
    engine.start()
    try:
        log_fields = {**compute_info(app.llm.engine.worker.model), "spec": spec.method}
        log_fields["k"] = spec.num_speculative_tokens
        log_ready(app.config, listener.getsockname(), app.model, log_fields)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.handle_exit, 0, None)
        await server.serve(sockets=[listener])
    finally:
        await engine.stop()
        if tasks := server.server_state.tasks:  # send clients the final error if they read promptly
            await asyncio.wait(tasks, timeout=FAREWELL)
        if engine.fatal_error is not None:  # exit with an error, so that a supervisor can restart the server
            log.error(engine.fatal_error)
        log.info("ended")
    return 0 if engine.fatal_error is None else 1


def log_ready(config: ServeConfig, address: Any, model: str, log_fields: dict[str, Any]) -> None:
    """Log the server's addresses, and a warning if it accepts remote requests without a key."""
    url = "http://{}:{}".format(f"[{address[0]}]" if ":" in address[0] else address[0], address[1])
    server = {"page": f"{url}/", "api": f"{url}/v1", "model": model, "keys": len(config.api_key)}
    log.info("ready", extra={"log_fields": {**server, **log_fields}})
    if not config.is_local and not config.api_key:
        log.warning("the server accepts remote requests without an API key; set --api-key to require one")
