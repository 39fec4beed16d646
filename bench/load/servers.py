"""A server under load: how it is started, that it answers, what it uses, that it ends. One runs at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import ROOT
from bench.peers.system import adapter, python_of
from bench.peers.tables import guess_name
from bench.peers.vllm_cpu import cache_gib
from bench.peers.vllm_cpu import environment as vllm_environment
from bench.peers.worker import family

from .client import HOST

Json = dict[str, Any]
MOST_AT_ONCE = 64  # requests that run; others wait
VERSIONS = """import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))"""
READY_WITHIN = 300.0  # seconds, compiling included
THREADS = {  # where vLLM computes; in which its server is fastest is tried (`bench/serve.py`)
    "unbound": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},  # in the engine's process, as `vllm_cpu.py` has it
    "bound": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # to all cores, in a third process
    "spare": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"},  # to all but one
}


class Lane(NamedTuple):
    """A system, what it guesses (None for nothing, "auto", or one of vLLM's settings), and one of vLLM's
    `THREADS`."""

    system: str
    guess: Any
    threads: str = "unbound"

    @property
    def name(self) -> str:
        return f"{self.system} plain" if self.guess is None else f"{self.system} {guess_name(self.guess)}"


def command(lane: Lane, model: Path, port: int, window: int) -> list[str]:
    """The command line of a server. `window`: most tokens of a prompt and its answer."""
    common = [
        "--host", HOST, "--port", str(port), "--dtype", "bfloat16", "--model", str(model),
        "--max-num-seqs", str(MOST_AT_ONCE), "--max-model-len", str(window), "--no-enable-prefix-caching",
    ]  # fmt: skip
    python = str(python_of(lane.system))
    if lane.system == "nanospec":
        spec = "none" if lane.guess is None else "ngram"
        return [python, str(ROOT / "run.py"), "serve", *common, "--spec", spec]
    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    guess = lane.guess and {"method": "ngram", **dict(zip(names, lane.guess))}
    return [  # `vllm serve` looks for a package of another name than vllm-cpu, and fails
        python, "-m", "vllm.entrypoints.openai.api_server", *common,
        "--disable-log-stats", "--disable-uvicorn-access-log",
        *(["--speculative-config", json.dumps(guess)] if guess else []),
    ]  # fmt: skip


def environment(lane: Lane, model: Path, window: int) -> dict[str, str]:
    """Variables beside those that are set."""
    if lane.system == "nanospec":
        return {}
    cores = sorted(os.sched_getaffinity(0))
    room = cache_gib({"model": str(model), "cache_tokens": MOST_AT_ONCE * window})
    return {
        **vllm_environment(python_of(lane.system), cores),
        "VLLM_CPU_KVCACHE_SPACE": str(room),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        **THREADS[lane.threads],
    }


def versions(system: str) -> Json:
    """Of the packages that its adapter names, in its environment."""
    asked = [str(python_of(system)), "-c", VERSIONS, *adapter(system).PACKAGES]
    found: Json = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Server:
    """A server that has answered at /health, until the `with` block is left."""

    def __init__(self, name: str, command: Sequence[str], port: int, environment: dict[str, str]) -> None:
        self.name, self.port, self._command, self._environment = name, port, command, environment
        self.start_seconds = 0.0

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory()
        self._log = (Path(self._folder.name) / "log").open("w+")
        begun = time.perf_counter()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            cwd=self._folder.name, env={**os.environ, **self._environment}, start_new_session=True,
        )  # fmt: skip
        try:
            self._wait(begun + READY_WITHIN)
        except BaseException:
            self.__exit__()
            raise
        self.start_seconds = time.perf_counter() - begun
        return self

    def _wait(self, deadline: float) -> None:
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() > deadline:
                raise RuntimeError(f"The server of {self.name} does not answer:\n{self.log()[-4000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def model(self) -> str:
        """What it calls its model."""
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def log(self) -> str:
        """What it has written."""
        return Path(self._log.name).read_text(errors="replace")

    def usage(self) -> Json:
        """Of all its processes: resident memory, shared pages counted in each, and computing time so far."""
        pages = ticks = 0
        for process in family(self._process.pid):
            with contextlib.suppress(OSError):  # it has just ended
                pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
                fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
        return {
            "rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            "cpu_seconds": ticks / os.sysconf("SC_CLK_TCK"),
        }

    def __exit__(self, *exception: object) -> None:
        """Ask it to end, then its whole group without asking."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=15)
        with contextlib.suppress(ProcessLookupError):  # what it leaves behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        self._folder.cleanup()


def start(lane: Lane, model: Path, window: int) -> Server:
    """The server of a lane, to be entered."""
    port = free_port()
    return Server(lane.name, command(lane, model, port, window), port, environment(lane, model, window))


def send(work: Json) -> Json:
    """A load, sent by a process of its own (`client.py`)."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "work.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(work))
        client = [sys.executable, "-m", "bench.load.client", str(asked), str(out)]
        subprocess.run(client, cwd=ROOT, check=True)
        found: Json = json.loads(out.read_text())
    return found
