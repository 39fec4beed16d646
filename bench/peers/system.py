"""A system's process, as `bench/cpu.py` holds it: started, told which cases to run, ended."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.peers.plan import ADAPTERS
from bench.peers.worker import DONE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLACE = ROOT / ".peers"  # where `make peers` puts the environments
FOLDERS = {"vllm": "vllm", "transformers": "hf", "llama.cpp": "llama"}
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
Json = dict[str, Any]


def adapter(system: str) -> Any:
    return importlib.import_module(f"bench.peers.{ADAPTERS[system]}")


def python_of(system: str) -> Path:
    """The interpreter of a system's environment: the environment variable PEERS may name another place."""
    if system == "nanospec":
        return Path(sys.executable)
    python = Path(os.environ.get("PEERS", PLACE)) / FOLDERS[system] / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} is not there; `make peers PEER={FOLDERS[system]}` installs {system}.")
    return python


class System:
    """One process of a system with one way of guessing. `caches` is where its compilers keep their results,
    if not where they always do."""

    def __init__(self, system: str, work: Json, caches: Path | None = None) -> None:
        self.name = system
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "work.json").write_text(json.dumps(work))
        self._out, self._log = folder / "results.json", (folder / "log").open("w+")
        python, cores = python_of(system), sorted(os.sched_getaffinity(0))
        place = {name: str(caches / name) for name in CACHES} if caches else {}
        self._process = subprocess.Popen(
            [str(python), str(HERE / "worker.py"), ADAPTERS[system], str(folder / "work.json")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=folder,
            env={**os.environ, **adapter(system).environment(python, cores), **place},
        )  # fmt: skip
        self._wait()

    def run(self, cases: list[str]) -> Json:
        """What `worker.py` wrote about these cases."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"cases": cases, "out": str(self._out)}) + "\n")
        self._process.stdin.flush()
        self._wait()
        found: Json = json.loads(self._out.read_text())
        return found

    def _wait(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.rstrip("\n") == DONE:
                return
        self._log.seek(0)
        raise RuntimeError(f"The process of {self.name} has ended:\n{self._log.read()[-4000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:  # it has answered everything: nothing is lost
            self._process.kill()
        self._log.close()
        self._folder.cleanup()
