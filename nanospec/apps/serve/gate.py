"""What every request passes: it gets an id, its client shows a key, and one line about it is logged."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import HTTPError
from .logs import log
from .settings import ServeConfig

OPEN = ("/", "/health")  # without a key; so are the files of the page
LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?", re.IGNORECASE)  # this machine's names
UNCOUNTED = ("/health", "/metrics")  # answered however many connections there are
CROWDED = "There are too many connections; try again in a second."
BAD_KEY = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'."
BAD_HOST = "This server answers its own machine alone, as localhost; --host and --api-key open it to others."


class Gate:
    """Before the routes. Of a request that passes, `scope["state"]` holds `id`, `salt` (of its client's key),
    `arrival` (of `time.perf_counter`) and `facts`, a dict for what is to be logged. Answers are counted by
    path for `paths`, and as "other" for what clients may invent."""

    def __init__(
        self, app: ASGIApp, config: ServeConfig, answered: Counter[tuple[str, int]], paths: Collection[str]
    ) -> None:
        self.app, self._paths = app, paths
        self._digests = [_digest(key) for key in config.api_key]
        self._answered = answered  # see `App`
        self._most = config.max_connections
        self._only_local = config.is_local and not config.api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no web sockets, and nothing to do at the start and the end
        headers, start, status = Headers(scope=scope), time.perf_counter(), 0
        asked = headers.get("x-request-id", "")
        request_id = asked if re.fullmatch(r"[\w.-]{1,64}", asked) else f"req-{uuid.uuid4().hex[:24]}"
        facts: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, facts=facts, salt=b"", arrival=start)

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
        except HTTPError as error:
            await error.response()(scope, receive, with_id)
        else:
            await self.app(scope, receive, with_id)
        finally:
            ms = round((time.perf_counter() - start) * 1e3, 1)
            told = {"id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
            level = (
                logging.DEBUG if scope["path"] in ("/health", "/metrics") and status == 200 else logging.INFO
            )
            self._answered[scope["path"] if scope["path"] in self._paths else "other", status] += 1
            log.log(level, "request", extra={"facts": {**told, "ms": ms, **facts}})

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise HTTPError unless the client may ask this. A page of another site whose name was made to lead
        here would show that name as the host."""
        if self._only_local and not LOCAL.fullmatch(headers.get("host", "localhost")):
            raise HTTPError(403, BAD_HOST)
        path = scope["path"]
        if len(scope["state"].get("connections", ())) > self._most and path not in UNCOUNTED:
            raise HTTPError(503, CROWDED, headers={"retry-after": "1", "connection": "close"})
        if not self._digests or path in OPEN or path.startswith("/page/"):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key if scheme.lower() == "bearer" else "")
        found = [hmac.compare_digest(given, digest) for digest in self._digests]  # all, in the same time
        if not any(found):
            raise HTTPError(401, BAD_KEY, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        scope["state"]["salt"] = given


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
