"""How the leader and the other ranks find each other: by an address in a store that all know.

What comes over a connection is unpickled, so the leader listens where ranks are expected only, and both sides
ask for a key first. Ranks that the leader starts get it in their environment, others find it in the store.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

from torch.distributed import Store

from .team import GRACE, LOOK, RankFailed

ADDRESS, KEY = "nanospec/address", "nanospec/key"
READY = "is ready"  # what a rank says of itself
PATIENCE = 5  # seconds within which who comes must say who it is


class Meeting:
    """Where the leader awaits the others."""

    def __init__(self, host: str, store: Store, key: str = "", everywhere: bool = False) -> None:
        """`host` is what others call this machine. If they are on other machines too, it may not be the name
        of an address here, so the leader listens `everywhere`."""
        if not key:
            store.set(KEY, key := new_key())
        self._key = bytes.fromhex(key)
        self._server = _listen(host, everywhere)
        store.set(ADDRESS, f"{host} {self._server.getsockname()[1]}")

    def await_ranks(
        self, count: int, processes: Sequence[subprocess.Popen[bytes]], seconds: float
    ) -> list[Connection]:
        """A connection to each of the ranks 1 .. count. Raises RankFailed if one of the `processes` ends, or
        if it takes longer than `seconds`."""
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + seconds
        self._server.settimeout(LOOK)
        with self._server:
            while len(found) < count:
                if ended := [i for i, process in enumerate(processes, 1) if process.poll() is not None]:
                    raise RankFailed(f"Rank {ended[0]} ended while it started.")
                if time.monotonic() > deadline:
                    lost = count - len(found)
                    raise RankFailed(f"{lost} of {count + 1} ranks did not start within {seconds:g} s.")
                with suppress(AuthenticationError, EOFError, OSError):
                    connection = _connection(self._server.accept()[0])
                    _wait_at_most(PATIENCE, connection)
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    found[connection.recv()] = connection
                    _wait_at_most(0, connection)
        return [connection for _, connection in sorted(found.items())]


def hand_over(connections: Sequence[Connection], parts: Any, seconds: float) -> list[Any]:
    """Tell ranks what they are made of: what each answers. Raises RankFailed if one of them says that it
    cannot be, or says nothing for so long."""
    data = ForkingPickler.dumps(parts)
    for connection in connections:
        connection.send_bytes(data)
    return [_answer(rank, connection, seconds) for rank, connection in enumerate(connections, 1)]


def _answer(rank: int, connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise RankFailed(f"Rank {rank} did not answer for {seconds:g} s.")
    try:
        word, answer = connection.recv()
    except (EOFError, OSError):
        raise RankFailed(f"Rank {rank} ended while it started.") from None
    if word != READY:
        raise RankFailed(f"Rank {rank} failed: {word}")
    return answer


def visit(store: Store, rank: int, key: str = "") -> Connection:
    """A connection to the leader."""
    host, port = store.get(ADDRESS).decode().split()
    secret = bytes.fromhex(key or store.get(KEY).decode())
    connection = _connection(socket.create_connection((host, int(port))))
    answer_challenge(connection, secret)
    deliver_challenge(connection, secret)
    connection.send(rank)
    return connection


def messages_of(connection: Connection) -> Iterator[Any]:
    """What the leader says. If it is gone the last message is ("end",), and this process does not outlive it
    for long, whatever it waits for."""
    inbox: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(("end",))
        except Exception as error:  # what came cannot be made here, so this rank is out of step
            inbox.put(error)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=read, daemon=True, name="messages").start()
    return iter(inbox.get, None)


def new_key() -> str:
    """As hexadecimal digits."""
    return secrets.token_hex(32)


def _listen(host: str, everywhere: bool) -> socket.socket:
    if everywhere:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", 0), family=family, dualstack_ipv6=both)
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def _connection(found: socket.socket) -> Connection:
    found.settimeout(None)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(found.detach())


def _wait_at_most(seconds: int, connection: Connection) -> None:
    """Have it be an OSError if nothing comes for so long; 0: never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))
