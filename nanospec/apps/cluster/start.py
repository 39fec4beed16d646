"""Start Ray or connect to it, and divide its machines among replicas.

A replica is never spread over machines: its GPUs, or its threads, are all on one.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ...config import EngineConfig
from ...device.resources import cpu_quota, resolve_device, spare_memory
from ...llm import LLM
from ...models import resolve_model
from ...text import shown

STORE = 256 << 20  # bytes of the object store of a Ray of our own: requests and results are small
WAIT = 10.0  # seconds for the Ray of RAY_ADDRESS to answer
QUIET = {  # environment variables, unless they are set
    "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip


class Bundle(NamedTuple):
    """The part of one of Ray's machines that a replica gets."""

    cpus: int
    gpus: int
    threads: int | None  # in each process of the replica; None on a GPU, where they do not matter
    neighbours: int  # replicas on one machine, itself among them


def load(folder: Path, model: str, bundle: Bundle, options: dict[str, Any], **more: Any) -> LLM:
    """Return the engine of a replica, in its process. On a machine without the command's `folder` the model
    is found by the name that the user gave."""
    threads = {} if bundle.threads is None else {"threads": bundle.threads}
    options = {**options, **more, **threads}
    device = resolve_device(options.get("device", "auto"))
    if device.type == "cpu" and bundle.neighbours > 1:  # all start at once and see the same free memory
        ranks = options.get("tensor_parallel_size", 1)
        options.setdefault("kv_cache_memory", spare_memory(device, bundle.neighbours * ranks))
    return LLM(folder if folder.is_dir() else resolve_model(model), **options)


def need_ray(part: str) -> None:
    """Import a part of Ray, quietly. Raises ValueError if it, or what it needs, is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import_module(part)
    except ImportError as error:
        text = f"replicas need {error.name or 'ray'}: pip install 'nanospec[ray]', or leave out --replicas."
        raise ValueError(text) from None


@contextmanager
def connect_ray(replicas: int, config: EngineConfig, log_to_driver: bool = False) -> Iterator[Bundle]:
    """Connect to the Ray of RAY_ADDRESS, or start one that ends with the block, and yield the bundle of each
    replica. Raises ValueError if there is no room for them, OSError if there is no Ray. After `need_ray`."""
    import ray

    ray_options: dict[str, Any] = {"logging_level": "CRITICAL", "log_to_driver": log_to_driver}
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        cpus = int(max(min(len(os.sched_getaffinity(0)), cpu_quota()), replicas * _least_cpus(config)))
        ray_options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        ray_options["object_store_memory"] = STORE
    else:
        check_reachable(address)
    try:
        with _quiet():
            ray.init(**ray_options)
    except ConnectionError:
        raise OSError(
            f"RAY_ADDRESS={address}: no Ray is found; `ray start --head` starts one, and without RAY_ADDRESS "
            "this command has its own."
        ) from None
    try:
        yield bundle_for(replicas, config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what Ray's C++ writes to standard error, past Python."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at a host and port: Ray would try for some minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # "auto", which Ray knows, or what it refuses
    try:
        socket.create_connection((host.strip("[]"), int(port)), WAIT).close()
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"RAY_ADDRESS={address}: nothing answers there ({reason}); start Ray there, or unset "
            "RAY_ADDRESS, which starts one here."
        ) from None


def bundle_for(replicas: int, config: EngineConfig, machines: Sequence[dict[str, float]]) -> Bundle:
    """Return the bundle of each replica: GPUs if the machines have any, else as many processors as leave room
    for all replicas. Raises ValueError if there are too few."""
    ranks, least = config.tensor_parallel_size, _least_cpus(config)
    if config.device.startswith("cuda:"):
        device = f"device={shown(config.device)}"
        raise ValueError(f"{device} is one GPU; with replicas it is 'cuda', 'cpu' or 'auto'.")
    gpus = [int(machine.get("GPU", 0)) for machine in machines]
    cpus = [int(machine.get("CPU", 0)) for machine in machines]
    on_gpus = config.device == "cuda" or (config.device == "auto" and any(gpus))
    available, needed, kind = (gpus, ranks, "GPU") if on_gpus else (cpus, least, "processor")

    def room(size: int) -> int:
        return sum(count // size for count in available)

    if room(needed) < replicas:
        needs, has = f"{needed} {kind}{'s' * (needed > 1)}", " + ".join(map(str, available)) or "none"
        raise ValueError(
            f"{replicas} replicas with {needs} each do not fit: Ray has {has}, room for {room(needed)}; ask "
            "for fewer or add machines."
        )
    if on_gpus:
        return Bundle(1, ranks, None, 1)
    most = max(cpus) if config.threads == "auto" else least
    size = next(n for n in range(most, 0, -1) if n % ranks == 0 and room(n) >= replicas)
    return Bundle(size, 0, size // ranks, min(max(cpus) // size, replicas))


def _least_cpus(config: EngineConfig) -> int:
    return config.tensor_parallel_size * (1 if config.threads == "auto" else config.threads)


def last_error(text: str) -> str:
    """Return the message of the last exception that Ray reports, or an empty text if it reports none."""
    return (re.findall(r"\w+Error: (.+)", text) or [""])[-1]
