"""How the leader and the other ranks find each other: by an address and a key in a store that all know.

What comes over a connection is unpickled, so the leader listens where ranks are expected only, and asks for
the key first.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any

from torch.distributed import Store

from .team import GRACE, LOOK, RankFailed

ADDRESS, KEY = "nanospec/address", "nanospec/key"
READY = "is ready"  # what a rank says of itself


class Meeting:
    """Where the leader awaits the others."""

    def __init__(self, host: str, store: Store) -> None:
        self._server = socket.create_server((host, 0))
        self._key = secrets.token_bytes(32)
        store.set(ADDRESS, f"{host} {self._server.getsockname()[1]}")
        store.set(KEY, self._key.hex())

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
                try:
                    connection = _connection(self._server.accept()[0])
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    found[connection.recv()] = connection
                except (TimeoutError, AuthenticationError, EOFError, OSError):
                    continue
        return [connection for _, connection in sorted(found.items())]


def hand_over(connections: Sequence[Connection], parts: Any) -> None:
    """Tell ranks what they are made of. Raises RankFailed if one of them says that it cannot be."""
    for connection in connections:
        connection.send(parts)
    for rank, connection in enumerate(connections, 1):
        try:
            answer = connection.recv()
        except (EOFError, OSError):
            answer = "ended while it started"
        if answer != READY:
            raise RankFailed(f"Rank {rank} {answer}")


def visit(store: Store, rank: int) -> Connection:
    """A connection to the leader."""
    host, port = store.get(ADDRESS).decode().split()
    key = bytes.fromhex(store.get(KEY).decode())
    connection = _connection(socket.create_connection((host, int(port))))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
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


def _connection(found: socket.socket) -> Connection:
    found.settimeout(None)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(found.detach())
