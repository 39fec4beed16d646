"""Settings of the server; every field is an option of `nanospec serve`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...text.validation import bounded_field, check_fields, parse_size, shown

MIN_KEY = 8  # characters; shorter keys are easy to guess
MAX_SECONDS = 1e7  # timers do not support much longer or infinite timeouts
FORMS = {  # pattern and description of each text in a field
    "api_key": (rf"[!-~]{{{MIN_KEY},}}", f"at least {MIN_KEY} ASCII characters without spaces"),
    "allowed_hosts": (r"\*|[a-z0-9._-]+|\[[0-9a-f:.]+\]", "a name in lower case without a port"),
    "allowed_origins": (r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", "like https://example.com, with no path"),
}


@dataclass(frozen=True)
class ServeConfig:
    """Address, API keys, limits and timeouts of the server.

    Attributes:
        host: address to listen on; the default only accepts local connections.
        port: port to listen on; 0 picks a free one.
        api_key: key of at least 8 characters that clients must send as "Authorization: Bearer KEY" or
            "x-api-key: KEY". May be repeated; NANOSPEC_API_KEY adds comma-separated keys. Clients with
            different keys share no cached prefixes.
        allowed_hosts: name in the Host header, besides those of this machine, that is accepted without a key
            when only local connections are; "*" accepts all. May be repeated.
        allowed_origins: origin, such as https://example.com, allowed to use the API from a browser (CORS);
            "*" allows all. May be repeated.
        served_model_name: model name in the API. Defaults to the last part of --model.
        max_queue: maximum number of waiting outputs; further requests are answered with status 429.
        max_body: maximum size of a request body in bytes.
        max_connections: maximum number of connections; further ones can only use /health and /metrics.
        request_timeout: time limit of a request in seconds.
        read_timeout: time limit in seconds for a client to send a request.
        write_timeout: time limit in seconds for a client to accept data.
        drain_timeout: seconds for running requests to finish after SIGTERM or Ctrl-C.
    """

    host: str = "127.0.0.1"
    port: int = bounded_field(8000, 0, 65535)
    api_key: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    served_model_name: str | None = None
    max_queue: int = bounded_field(256, 0)
    max_body: int = bounded_field(4 << 20, 1024, read=parse_size, metavar="SIZE")
    max_connections: int = bounded_field(1000, 1)
    request_timeout: float = bounded_field(600.0, 0.1, MAX_SECONDS)
    read_timeout: float = bounded_field(20.0, 0.1, MAX_SECONDS)
    write_timeout: float = bounded_field(60.0, 0.1, MAX_SECONDS)
    drain_timeout: float = bounded_field(30.0, 0, MAX_SECONDS)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, (pattern, form) in FORMS.items():
            texts = getattr(self, name)
            for text in texts if isinstance(texts, list | tuple) else [None]:
                if not isinstance(text, str) or not re.fullmatch(pattern, text):
                    value = "" if name == "api_key" else f"={shown(text)}"
                    raise ValueError(f"{name}{value} must be {form}.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
