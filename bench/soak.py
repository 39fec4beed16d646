"""Thousands of requests of all kinds to one server: does its memory stay what it is, is all given back?

    python bench/soak.py [--requests 2000] [--at-once 24]

Streams and whole answers, several outputs and prompts, log-probabilities, penalties and bias, long prompts,
clients that leave before, while and after their answer begins, bad requests and wrong paths. Every 100
requests the resident memory of the server is read. At the end nothing may run or wait, no block may be held,
and a request must be answered as the first one was. The result is `bench/results/soak.json`.

Memory counts from request 500 on: until then caches fill, that of keys and values above all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from bench.load.client import HOST, encode
from bench.load.servers import Lane, Server, command, free_port
from nanospec.models.hub import resolve_model

Json = dict[str, Any]
WARM = 500  # requests until memory counts
EVERY = 100  # requests between looks
CACHE = "128M"  # of keys and values: so little that all of it is soon in use
TEXT = "The quick brown fox jumps over the lazy dog. "
KINDS = (
    "whole",
    "stream",
    "several",
    "logprobs",
    "penalties",
    "long",
    "bad",
    "leaves",
    "leaves early",
    "none",
)


def body_of(kind: str, chance: random.Random) -> tuple[str, Json]:
    """Path and body of a request."""
    many = TEXT * chance.randint(1, 4) + str(chance.random())
    body: Json = {"messages": [{"role": "user", "content": many}], "max_tokens": chance.randint(1, 16)}
    body |= {"temperature": chance.choice([0, 1]), "stream": chance.random() < 0.5}
    if kind in ("whole", "stream", "leaves", "leaves early"):
        body |= {"stream": kind != "whole", "max_tokens": 64 if "leaves" in kind else 8}
    elif kind == "several":
        return "/v1/completions", {"prompt": [many, many + "!"], "n": 2, "max_tokens": 6}
    elif kind == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 20}
    elif kind == "penalties":
        body |= {"presence_penalty": 1, "logit_bias": {"40": 5}, "stop": ["fox"]}
    elif kind == "long":
        body["messages"][0]["content"] = many * 12
    elif kind == "bad":
        body["temperature"] = -1
    return ("/v1/nothing" if kind == "none" else "/v1/chat/completions"), body


class Soak:
    """Sends requests, so many at once."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.chance = port, random.Random(seed)
        self.statuses: Counter[str] = Counter()

    async def run(self, count: int, at_once: int) -> None:
        limit = asyncio.Semaphore(at_once)

        async def one() -> None:
            async with limit:
                kind = self.chance.choice(KINDS)
                status = await asyncio.wait_for(self.visit(kind), 120)
                self.statuses[f"{kind}: {status}"] += 1

        await asyncio.gather(*(one() for _ in range(count)))

    async def visit(self, kind: str) -> str:
        """Ask, and read the answer as far as the client stays; the status."""
        data = encode(self.port, *body_of(kind, self.chance))
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(data[: len(data) // 2] if kind == "leaves early" else data)
            await writer.drain()
            if kind == "leaves early":
                return "left"
            found = await reader.read(400)
            while kind != "leaves" and (more := await reader.read(1 << 16)):
                found += more
            return found[9:12].decode()
        finally:
            writer.close()


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as answer:
        found = re.search(rf"^nanospec:{name}{{[^}}]*}} (.*)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def answer(port: int) -> str:
    body = {"prompt": TEXT * 3, "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(f"http://{HOST}:{port}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


async def soak(server: Server, args: argparse.Namespace) -> Json:
    """The figures of a server."""
    first, run = answer(server.port), Soak(server.port, args.seed)
    memory = [server.usage()["rss_mb"]]
    for _ in range(0, args.requests, EVERY):
        await run.run(EVERY, args.at_once)
        memory.append(server.usage()["rss_mb"])
        print(f"{EVERY * (len(memory) - 1)} requests, {memory[-1]:.0f} MB", flush=True)
    late = memory[min(WARM // EVERY, len(memory) - 1) :]
    for _ in range(100):
        if not (held := sum(metric(server.port, f"num_requests_{what}") for what in ("running", "waiting"))):
            break
        await asyncio.sleep(0.1)
    return {
        "requests": args.requests,
        "at_once": args.at_once,
        "statuses": dict(sorted(run.statuses.items())),
        "memory_mb": memory,
        "growth_mb": round(max(late) - late[0], 1),
        "held_at_the_end": held,
        "kv_cache_in_use_at_the_end": metric(server.port, "kv_cache_usage_perc"),
        "same_answer_as_at_the_start": answer(server.port) == first,
        "server_log_errors": server.log().count("Traceback"),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="soak")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    port, folder = free_port(), resolve_model(args.model).resolve()
    run = [part for part in command(Lane("nanospec", "auto"), folder, port, 2048) if "prefix" not in part]
    with Server("nanospec", [*run, "--kv-cache-memory", CACHE], port, {}) as server:
        result = asyncio.run(soak(server, args))
    common.save(args.name, {"machine": common.environment(), "model": args.model, **result}, args.out)


if __name__ == "__main__":
    main()
