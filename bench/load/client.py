"""The process that sends a load to a server of this machine: each request at its time, whatever others do.

    python -m bench.load.client WORK.json RESULT.json

Needs nothing but the standard library. It is cheap, as it computes beside the server: requests are encoded
before the first is sent, and what comes back is only stamped with its time, and read when all is over.

WORK.json: `port`, `path`, `timeout` (seconds for each request, from the time at which it should be sent)
and `requests`, each with `at` (seconds from the start) and `body`. RESULT.json: `seconds` until the last
answer, `cpu_seconds` of this process meanwhile, and `requests`: what `answers.py` says of each, times in
seconds since it should have been sent, and `late`, how late it was sent.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from .answers import Piece, read_answer

HOST = "127.0.0.1"  # no other: this is no tool to trouble others with
MOST = 2000  # requests
Json = dict[str, Any]


def encode(port: int, path: str, body: Json) -> bytes:
    """A request for which a connection of its own is opened."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Exchange:
    """One request and what has come back for it."""

    def __init__(self, at: float, data: bytes) -> None:
        self.at, self.data = at, data
        self.sent = at
        self.pieces: list[Piece] = []
        self.failed: str | None = None

    async def run(self, port: int, start: float, timeout: float) -> None:
        due = start + self.at
        await asyncio.sleep(due - time.perf_counter())
        try:
            await asyncio.wait_for(self._talk(port, start), due + timeout - time.perf_counter())
        except asyncio.TimeoutError:
            self.failed = f"no whole answer within {timeout:g} s"
        except OSError as error:
            self.failed = str(error)

    async def _talk(self, port: int, start: float) -> None:
        self.sent = time.perf_counter() - start
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(self.data)
            while data := await reader.read(1 << 16):
                self.pieces.append((time.perf_counter() - start - self.at, data))
        finally:
            writer.close()

    def row(self) -> Json:
        found = read_answer(self.pieces)
        return {**found, "error": self.failed or found["error"], "at": self.at, "late": self.sent - self.at}


async def send(work: Json) -> Json:
    """The result of a load."""
    port, timeout = work["port"], work["timeout"]
    if len(work["requests"]) > MOST:
        raise ValueError(f"{len(work['requests'])} requests are more than {MOST}.")
    asked = [Exchange(r["at"], encode(port, work["path"], r["body"])) for r in work["requests"]]
    gc.freeze()
    start, used = time.perf_counter() + 0.05, time.process_time()  # when all of them wait for their time
    await asyncio.gather(*(exchange.run(port, start, timeout) for exchange in asked))
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return {"seconds": seconds, "cpu_seconds": used, "requests": [exchange.row() for exchange in asked]}


def main() -> None:
    """Command line."""
    work, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(asyncio.run(send(json.loads(work.read_text())))))


if __name__ == "__main__":
    main()
