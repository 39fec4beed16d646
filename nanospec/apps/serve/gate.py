"""The middleware of every request: assigns a request id, checks the API key, and writes a log line."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...text.validation import shown
from .logs import log
from .settings import ServeConfig

PUBLIC = ("/", "/health")  # need no key; neither do the files of the page
MONITORING = ("/health", "/metrics")  # not subject to the limit of connections
# Host names of this machine, also in its containers (.internal is not resolved by public servers).
LOCAL = re.compile(r"localhost|127(\.\d+){3}|\[::1\]|host\.(docker|containers)\.internal")
BAD_KEY = "Missing or invalid API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
BAD_HOST = "is not a name of this machine; allow it with --allowed-hosts, or set --api-key."
BUSY = "The server is reading too many large requests; try again in a second."
MAX_BODIES = 32  # bodies of maximum size that may be read at once
MAX_MESSAGE = 1500  # characters; messages may repeat client input
ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "timeout_error",
}  # fmt: skip
ANTHROPIC_ERROR_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


class HTTPError(HTTPException):
    """An error response: the status, a message, and the invalid field and error code, if any."""

    def __init__(self, status: int, text: str, param: str = "", code: str = "", headers: Any = None) -> None:
        text = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
        super().__init__(status, text, headers)
        # The name comes from the client; it may be long or contain surrogates, which cannot be encoded.
        self.param = param[:100].encode(errors="replace").decode() or None
        self.code = code or None
        self.kind = ERROR_TYPES.get(status, "invalid_request_error")

    def body(self, path: str) -> dict[str, Any]:
        """Return the error in the format of the API at `path`, Anthropic's or OpenAI's."""
        if path.startswith("/v1/messages"):
            kind = ANTHROPIC_ERROR_TYPES.get(self.status_code, self.kind)
            return {"type": "error", "error": {"type": kind, "message": self.detail}}
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> JSONResponse:
        """Return the response to the request of `scope`, and add the error's code to its log line."""
        scope["state"]["log_fields"]["code"] = self.code or self.kind
        return JSONResponse(self.body(scope["path"]), self.status_code, self.headers)


class Bodies:
    """The bodies of requests that are being read or parsed; `size` is their number of bytes so far."""

    def __init__(self, config: ServeConfig) -> None:
        self.config, self.size = config, 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the body of a request, which counts until the end of the block. Raises HTTPError if it is too
        large, takes too long to arrive, or exceeds the memory for all bodies. The rest of a refused body is
        received and dropped first: closing a connection with unread data would reset it, and the client could
        lose the response."""
        data, close, most = bytearray(), {"connection": "close"}, self.config.max_body
        error: HTTPError | None = None

        def refusal(size: int) -> HTTPError | None:
            if size > most:
                return HTTPError(413, f"The body exceeds the limit of {most} bytes.", headers=close)
            if self.size - len(data) + size > MAX_BODIES * most:
                return HTTPError(503, BUSY, headers={**close, "retry-after": "1"})
            return None

        async def receive() -> None:
            nonlocal error
            async for part in request.stream():
                error = error or refusal(len(data) + len(part))
                kept = b"" if error else part
                self.size += len(kept)
                data.extend(kept)

        error = refusal(int(request.headers.get("content-length", 0)))
        if error and "expect" in request.headers:  # the client waits for an answer before it sends the body
            raise error
        try:
            try:
                await asyncio.wait_for(receive(), self.config.read_timeout)
            except ClientDisconnect:
                raise HTTPError(499, "The client disconnected.") from None
            except asyncio.TimeoutError:
                error = error or HTTPError(408, "Timed out while reading the body.", headers=close)
            if error:
                raise error
            yield bytes(data)
        finally:
            self.size -= len(data)


class Gate:
    """ASGI middleware. For an accepted request, `scope["state"]` contains its `id`, a `salt` derived from the
    API key, and `log_fields`, a dict to be logged. Responses are counted by path for `paths`, and as "other"
    for unknown paths."""

    def __init__(self, app: ASGIApp, config: ServeConfig, responses: Counter[Any], paths: set[str]) -> None:
        self.app, self.config, self._paths, self._responses = app, config, paths, responses
        self._digests = [_digest(key) for key in config.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # WebSockets are not supported, and lifespan events need no handling
        headers, start, status = Headers(scope=scope), time.perf_counter(), 0
        client_id, path = headers.get("x-request-id", ""), scope["path"]
        request_id = client_id if re.fullmatch(r"[\w.-]{1,64}", client_id) else f"req-{uuid.uuid4().hex[:24]}"
        log_fields: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, log_fields=log_fields, salt=b"")

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
            await self.app(scope, receive, with_id)
        except HTTPError as error:
            await error.response(scope)(scope, receive, with_id)
        finally:
            self._responses[path if path in self._paths else "other", status] += 1
            ms = round((time.perf_counter() - start) * 1e3, 1)
            line = {"id": request_id, "method": scope["method"], "path": path, "status": status, "ms": ms}
            level = logging.DEBUG if path in MONITORING and status == 200 else logging.INFO
            log.log(level, "request", extra={"log_fields": {**line, **log_fields}})

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise HTTPError unless the request is accepted."""
        path, config = scope["path"], self.config
        if config.is_local and not config.api_key and "*" not in config.allowed_hosts:
            host = re.sub(r":\d+$", "", headers.get("host", "localhost").lower())
            if not LOCAL.fullmatch(host) and host not in config.allowed_hosts:
                raise HTTPError(403, f"{shown(host)} {BAD_HOST}")  # DNS rebinding by a page of another site
        if len(scope["state"].get("connections", ())) > config.max_connections and path not in MONITORING:
            message = "Too many connections; try again in a second."
            raise HTTPError(503, message, headers={"retry-after": "1", "connection": "close"})
        if not self._digests or path in PUBLIC or path.startswith("/page/"):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key if scheme.lower() == "bearer" else headers.get("x-api-key", ""))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all, in constant time
        if not any(matches):
            raise HTTPError(401, BAD_KEY, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        scope["state"]["salt"] = digest


def guarded(app: ASGIApp, config: ServeConfig, responses: Counter[Any], paths: set[str]) -> ASGIApp:
    """Return the app behind a `Gate`. Pages of the allowed origins can use it: CORS, whose preflight requests
    carry no key."""
    gate, origins = Gate(app, config, responses, paths), config.allowed_origins
    methods, headers = ("GET", "POST"), ("x-request-id", "retry-after")
    return CORSMiddleware(gate, origins, methods, ("*",), expose_headers=headers) if origins else gate


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
