"""Ray, found or started, and what of its machines each replica gets.

A replica is never spread over machines: its GPUs, or its threads, are all on one.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from ...config import EngineConfig
from ...device.threads import cpu_quota
from ...text.checks import shown

MISSING = "replicas need {}: pip install 'nanospec[ray]', or leave out --replicas."
STORE = 256 << 20  # bytes of the object store of a Ray of our own: requests and results are small
WAIT = 10.0  # seconds for the Ray of RAY_ADDRESS to answer
QUIET = {  # of the environment; what it has already counts
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Share(NamedTuple):
    """What one replica gets.

    Attributes:
        cpus, gpus: of one machine.
        threads: that compute, in each of its processes; None on a GPU, where they do not matter.
        neighbours: replicas that share a machine, itself among them.
    """

    cpus: int
    gpus: int
    threads: int | None
    neighbours: int

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `LLM`, for a replica."""
        return options if self.threads is None else {**options, "threads": self.threads}


def need_ray(part: str) -> None:
    """Import a part of it, quietly. ValueError if it, or what it needs, is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import_module(part)
    except ImportError as error:
        raise ValueError(MISSING.format(error.name or "ray")) from None


@contextmanager
def ray_for(replicas: int, config: EngineConfig, log_to_driver: bool = False) -> Iterator[Share]:
    """Ray with room for so many replicas: this process's if it has one, else that of RAY_ADDRESS, else one
    of our own, which ends with the block. ValueError if it has no room, OSError if it is not there. After
    `need_ray`."""
    import ray

    ours = not ray.is_initialized()
    if ours:
        how: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": log_to_driver}
        if not log_to_driver:  # else it would be told that this is set, once by each process
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        if "RAY_ADDRESS" in os.environ:
            check_there(os.environ["RAY_ADDRESS"])
        else:
            cpus = max(own_cpus(), replicas * least_cpus(config))
            how |= {"address": "local", "num_cpus": cpus, "object_store_memory": STORE}
            how["include_dashboard"] = False
        with no_chatter():
            try:
                ray.init(**how)
            except ConnectionError:
                raise OSError(
                    f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS')}: no Ray is found; `ray start --head` "
                    "starts one, and without RAY_ADDRESS this command has its own."
                ) from None
    try:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        yield share(replicas, config, machines)
    finally:
        if ours:
            ray.shutdown()


def check_there(address: str) -> None:
    """OSError with a sentence if nobody listens at a host and port: Ray would try for some minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # "auto", which Ray knows, or what it refuses
    try:
        socket.create_connection((host.strip("[]"), int(port)), WAIT).close()
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"RAY_ADDRESS={address}: nobody answers there ({reason}); start Ray there, or unset RAY_ADDRESS, "
            "which starts one here."
        ) from None


@contextmanager
def no_chatter() -> Iterator[None]:
    """Ray's C++ writes past Python to standard error what nobody can use, such as its level of logs."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def own_cpus() -> int:
    """Processors that this process may use."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if math.isinf(quota) else min(cores, max(math.ceil(quota), 1))


def least_cpus(config: EngineConfig) -> int:
    """Processors that a replica takes at least, if it computes on them."""
    return config.tensor_parallel_size * (1 if config.threads == "auto" else config.threads)


def share(replicas: int, config: EngineConfig, machines: Sequence[dict[str, float]]) -> Share:
    """What each of so many replicas gets of these machines: GPUs if there are any, else as many processors as
    let all of them run. ValueError if there are too few."""
    each = config.tensor_parallel_size
    if config.device.startswith("cuda:"):
        given = f"device={shown(config.device)}"
        raise ValueError(f"{given} is one GPU; with replicas it is 'cuda', 'cpu' or 'auto'.")
    gpus = [int(machine.get("GPU", 0)) for machine in machines]
    if config.device == "cuda" or (config.device == "auto" and any(gpus)):
        _check_room(replicas, each, gpus, "GPU")
        return Share(1, each, None, 1)
    cpus, least = [int(machine.get("CPU", 0)) for machine in machines], least_cpus(config)
    _check_room(replicas, least, cpus, "processor")
    most = max(cpus) if config.threads == "auto" else least
    own = next(n for n in range(most, 0, -1) if n % each == 0 and _room(n, cpus) >= replicas)
    return Share(own, 0, own // each, min(max(cpus) // own, replicas))


def _room(each: int, machines: Sequence[int]) -> int:
    return sum(count // each for count in machines)


def _check_room(replicas: int, each: int, machines: Sequence[int], what: str) -> None:
    if (room := _room(each, machines)) < replicas:
        raise ValueError(
            f"{replicas} replicas with {each} {what}{'s' * (each > 1)} each do not fit: Ray has "
            f"{' + '.join(map(str, machines)) or 'none'}, room for {room}; ask for fewer or add machines."
        )
