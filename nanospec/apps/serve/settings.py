"""What may be set for the server; every field is an option of `nanospec serve`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...text import as_bytes, check_fields, limited

MIN_KEY = 8  # characters; shorter ones are guessed
MAX_SECONDS = 1e7  # clocks count no further than some powers of ten, and infinity not at all


@dataclass(frozen=True)
class ServeConfig:
    """How the server listens, and what a client may ask of it.

    Attributes:
        host: the address to listen at; the default is reached from this machine alone.
        port: the port; 0 takes a free one.
        api_key: what clients must send as "Authorization: Bearer KEY", 8 or more characters; several may be
            given, and NANOSPEC_API_KEY holds them with commas between. Clients with different keys share no
            cached prefixes.
        served_model_name: what clients call the model; without it: the name of its folder.
        max_queue: most outputs that wait for one of the max_num_seqs rows; beyond it clients are told to come
            again later (429).
        max_body: most bytes of a request.
        max_connections: most connections at once; of more, /health and /metrics alone are answered.
        request_timeout: seconds that a request may take in all.
        read_timeout: seconds that a client may take to send a request.
        write_timeout: seconds that a client may leave what was sent to it unread.
        drain_timeout: seconds that running requests have left to finish after SIGTERM or Ctrl-C.
    """

    host: str = "127.0.0.1"
    port: int = limited(8000, 0, 65535)
    api_key: Sequence[str] = ()
    served_model_name: str | None = None
    max_queue: int = limited(256, 0)
    max_body: int = limited(4 << 20, 1024, read=as_bytes, metavar="SIZE")
    max_connections: int = limited(1000, 1)
    request_timeout: float = limited(600.0, 0.1, MAX_SECONDS)
    read_timeout: float = limited(20.0, 0.1, MAX_SECONDS)
    write_timeout: float = limited(60.0, 0.1, MAX_SECONDS)
    drain_timeout: float = limited(30.0, 0, MAX_SECONDS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_body", as_bytes(self.max_body, "max_body"))
        check_fields(self)
        keys = self.api_key
        for key in keys if isinstance(keys, list | tuple) else [None]:
            if not isinstance(key, str) or not re.fullmatch(rf"[!-~]{{{MIN_KEY},}}", key):
                raise ValueError(f"api_key must be {MIN_KEY} or more ASCII characters without blanks.")

    @property
    def is_local(self) -> bool:
        """Whether it is reached from this machine alone."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
