"""The servers take turns under the same loads."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .arrivals import Load
from .figures import Bounds, errors, figures
from .servers import MOST_AT_ONCE, THREADS, Lane, Server, send, start

Json = dict[str, Any]
WARM = (1, 4, 16, MOST_AT_ONCE)  # requests at once, which are not measured
LONGEST = 265  # tokens of a prompt (`bench/peers/texts.py`)


class Race:
    """What is asked of all, and what each has done: `runs` are those of a load and a lane, round by round."""

    def __init__(self, model: Path, texts: list[str], settings: argparse.Namespace) -> None:
        self.model, self.texts, self.settings = model, texts, settings
        self.bounds = Bounds(settings.first, settings.token)
        self.window = -(-(LONGEST + settings.max_tokens + 32) // 512) * 512
        self.capacity = 0.0  # requests a second
        self.tried: dict[str, dict[str, float]] = {}  # lane: tokens per second by where its threads run
        self.runs: dict[tuple[Load, Lane], list[Json]] = {}
        self._chosen: dict[tuple[str, bool], str] = {}

    def measure_capacity(self, lane: Lane) -> float:
        """Requests a second of as many as run at once."""
        with start(lane, self.model, self.window) as server:
            self._warm(server)
            run = self._full(server)
        if run["errors"]:
            raise RuntimeError(f"{lane.name} does not answer as many as run at once: {run['errors']}")
        capacity = run["figures"]["answered"] / run["figures"]["seconds"]
        print(f"capacity: {capacity:.2f} requests a second ({lane.name})", flush=True)
        return round(float(capacity), 3)

    def choose_threads(self, lane: Lane) -> str:
        """Where a lane's threads run: what is fastest for the first that guesses, or that does not."""
        if lane.system == "nanospec" or self.settings.threads:
            return self.settings.threads or lane.threads
        kind = lane.system, lane.guess is None
        if kind not in self._chosen:
            rates = {}
            for threads in THREADS:
                with start(lane._replace(threads=threads), self.model, self.window) as server:
                    self._warm(server)
                    rates[threads] = self._full(server)["figures"]["tokens_per_second"]
                print(f"{lane.name}, threads {threads}: {rates[threads]:.0f} tok/s", flush=True)
            self.tried[lane.name] = rates
            self._chosen[kind] = max(rates, key=lambda threads: rates[threads])
        return self._chosen[kind]

    def round(self, number: int, lanes: list[Lane]) -> None:
        """Every load on every lane once."""
        for lane in lanes:
            with start(lane, self.model, self.window) as server:
                self._warm(server)
                for load in self.settings.loads:
                    run = self._run(server, self._times(load, number), self.settings.max_tokens)
                    run["figures"]["start_seconds"] = round(server.start_seconds, 2)
                    self.runs.setdefault((load, lane), []).append(run)
                    say(load, lane, run)

    def _times(self, load: Load, number: int) -> list[float]:
        of = self.settings
        return load.times(self.capacity, of.requests, of.seconds, of.seed + number)

    def minutes(self, lanes: list[Lane]) -> float:
        """How long all rounds take, about, of servers that are as fast as the capacity says."""
        times = [self._times(load, 0) for load in self.settings.loads]
        loads = sum(max(of[-1], len(of) / self.capacity) for of in times) + len(self.texts) / self.capacity
        starts = sum(10 if lane.system == "nanospec" else 45 for lane in lanes)
        return self.settings.rounds * (len(lanes) * loads + starts) / 60

    def _warm(self, server: Server) -> None:
        """What is compiled or measured at its first use is not timed."""
        for count in sorted({min(count, len(self.texts)) for count in WARM}):
            self._run(server, [0.0] * count, min(self.settings.max_tokens, 16))

    def _full(self, server: Server) -> Json:
        return self._run(server, [0.0] * min(MOST_AT_ONCE, len(self.texts)), self.settings.max_tokens)

    def _run(self, server: Server, times: list[float], max_tokens: int) -> Json:
        """Requests sent at these times: figures, errors, and what came back for each."""
        model = server.model()
        asked = [{"at": at, "body": body(model, text, max_tokens)} for at, text in zip(times, self.texts)]
        to = {"port": server.port, "path": "/v1/chat/completions", "timeout": self.settings.timeout}
        work = {**to, "requests": asked}
        before, result, after = server.usage(), send(work), server.usage()
        found = {
            **figures(result, self.bounds),
            "server_cpu_seconds": round(after["cpu_seconds"] - before["cpu_seconds"], 2),
            "rss_before_mb": before["rss_mb"],
            "rss_after_mb": after["rss_mb"],
        }
        return {"figures": found, "errors": errors(result["requests"]), "requests": result["requests"]}


def body(model: str, text: str, max_tokens: int) -> Json:
    """Greedy, and to the last token, as what a server writes after it takes the others' time."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def say(load: Load, lane: Lane, run: Json) -> None:
    of = run["figures"]
    first = of.get("first_token_seconds", {}).get("p50", float("nan"))
    print(
        f"  {load.name:12} {lane.name:20} {of['tokens_per_second']:7.1f} tok/s, first token {first:.3f} s, "
        f"goodput {of['goodput_share']:.0%}, load average {os.getloadavg()[0]:.1f} {run['errors'] or ''}",
        flush=True,
    )
