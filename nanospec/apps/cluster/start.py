"""Start Ray or connect to it, and divide its machines among replicas.

All GPUs or CPUs of a replica are on one machine.
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
from ...models.folders import resolve_model
from ...text.validation import shown

STORE = 256 << 20  # bytes of the object store of a local Ray; requests and results are small
WAIT = 10.0  # seconds to connect to RAY_ADDRESS
QUIET = {  # environment variables that are set unless the user has set them
    "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip


class Bundle(NamedTuple):
    """The resources of one machine that a replica gets."""

    cpus: int
    gpus: int
    threads: int | None  # in each process of the replica; None on a GPU
    replicas_per_machine: int


def load(folder: Path, model: str, bundle: Bundle, options: dict[str, Any], **more: Any) -> LLM:
    """Load a replica's engine in its process. On a machine without the command's `folder`, `model` is looked
    up by name."""
    threads = {} if bundle.threads is None else {"threads": bundle.threads}
    options = {**options, **more, **threads}
    device = resolve_device(options.get("device", "auto"))
    if device.type == "cpu" and bundle.replicas_per_machine > 1:  # all start and see the same free memory
        ranks = options.get("tensor_parallel_size", 1)
        options.setdefault("kv_cache_memory", spare_memory(device, bundle.replicas_per_machine * ranks))
    return LLM(folder if folder.is_dir() else resolve_model(model), **options)


def need_ray(part: str) -> None:
    """Import a module of Ray without log output. Raises ValueError if it or a dependency is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import_module(part)
    except ImportError as error:
        text = f"--replicas requires {error.name or 'ray'}: pip install 'nanospec[ray]'."
        raise ValueError(text) from None


@contextmanager
def connect_ray(replicas: int, config: EngineConfig, log_to_driver: bool = False) -> Iterator[Bundle]:
    """Connect to the Ray cluster at RAY_ADDRESS, or start one for the `with` block. Yield a bundle for each
    replica. Raises ValueError if they do not fit, OSError if Ray is unavailable. Call `need_ray` first."""
    import ray

    ray_options: dict[str, Any] = {"logging_level": "CRITICAL", "log_to_driver": log_to_driver}
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        cpus = int(max(min(len(os.sched_getaffinity(0)), cpu_quota()), replicas * _min_cpus(config)))
        ray_options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        ray_options["object_store_memory"] = STORE
    else:
        check_reachable(address)
    try:
        with _quiet():
            ray.init(**ray_options)
    except ConnectionError:
        raise OSError(
            f"RAY_ADDRESS={address}: no Ray cluster found; start one with `ray start --head`, or unset "
            "RAY_ADDRESS to use a local one."
        ) from None
    try:
        yield bundle_for(replicas, config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what Ray's C++ code writes to standard error."""
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
    """Raise OSError if nothing listens at a host and port, since Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # "auto", or an address that Ray rejects
    try:
        socket.create_connection((host.strip("[]"), int(port)), WAIT).close()
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"RAY_ADDRESS={address}: could not connect ({reason}); start Ray there, or unset RAY_ADDRESS "
            "to use a local one."
        ) from None


def bundle_for(replicas: int, config: EngineConfig, machines: Sequence[dict[str, float]]) -> Bundle:
    """Return the bundle of each replica: GPUs if the machines have any, else as many CPUs as possible such
    that all replicas fit. Raises ValueError if there are too few."""
    ranks, least = config.tensor_parallel_size, _min_cpus(config)
    if config.device.startswith("cuda:"):
        device = f"device={shown(config.device)}"
        raise ValueError(f"{device} is a single GPU; with --replicas, use 'cuda', 'cpu' or 'auto'.")
    gpus = [int(machine.get("GPU", 0)) for machine in machines]
    cpus = [int(machine.get("CPU", 0)) for machine in machines]
    on_gpus = config.device == "cuda" or (config.device == "auto" and any(gpus))
    available, needed, kind = (gpus, ranks, "GPU") if on_gpus else (cpus, least, "CPU")

    def fitting(size: int) -> int:
        return sum(count // size for count in available)

    if fitting(needed) < replicas:
        needs, has = f"{needed} {kind}{'s' * (needed > 1)}", " + ".join(map(str, available)) or "none"
        raise ValueError(
            f"{replicas} replicas with {needs} each do not fit: Ray has {has}, enough for {fitting(needed)}; "
            "lower --replicas or add machines."
        )
    if on_gpus:
        return Bundle(1, ranks, None, 1)
    largest = max(cpus) if config.threads == "auto" else least
    size = next(n for n in range(largest, 0, -1) if n % ranks == 0 and fitting(n) >= replicas)
    return Bundle(size, 0, size // ranks, min(max(cpus) // size, replicas))


def _min_cpus(config: EngineConfig) -> int:
    return config.tensor_parallel_size * (1 if config.threads == "auto" else config.threads)


def last_error(text: str) -> str:
    """Return the message of the last exception in an error report of Ray, or "" if there is none."""
    return (re.findall(r"\w+Error: (.+)", text) or [""])[-1]
