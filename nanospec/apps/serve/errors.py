"""Errors in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

DRAINING = "The server is ending; running requests are finished, new ones are not taken."
MOST = 1500  # characters of a message, which may repeat what a client sent
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class HTTPError(Exception):
    """A request that is refused: its status, one sentence, and the field that is to blame, if one is."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        # A client's own word may be long, or half of a surrogate pair, which cannot be sent.
        self.param = None if param is None else param[:100].encode(errors="replace").decode()
        self.message = message if len(message) <= MOST else message[:MOST] + "..."
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": TYPES[self.status], "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def draining(seconds: float) -> HTTPError:
    """What new requests are told while those that run have so many seconds left."""
    return HTTPError(503, DRAINING, headers={"retry-after": str(int(seconds) + 1), "connection": "close"})


def bad_request(error: ValueError, body: Mapping[str, Any]) -> HTTPError:
    """What a ValueError says of a body, with the field that it names, if it names one."""
    message = str(error)
    named = re.match(r"unknown field '([^']*)'", message)
    words = [named[1]] if named else re.findall(r"[A-Za-z_]+", message)
    param = next((word for word in words if word in body), None)
    param = "chat_template_kwargs" if param is None and message.startswith("the chat template") else param
    return HTTPError(400, message, param, "unknown_field" if named else None)
