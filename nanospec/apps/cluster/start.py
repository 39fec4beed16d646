"""Start Ray or connect to it, and divide its machines among replicas."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...config import EngineConfig
from ...device.hardware import cpu_quota
from ...device.memory import spare_memory
from ...llm import LLM
from ...models.folders import resolve_model

LOCAL = {"address": "local", "include_dashboard": False, "object_store_memory": 256 << 20}  # small requests
QUIET = {  # environment variables that are set unless the user has set them
    "RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}  # fmt: skip


class Bundle(NamedTuple):
    """The resources of a replica, which are on one machine."""

    cpus: int
    gpus: int
    replicas_per_machine: int


def load(folder: Path, model: str, bundle: Bundle, options: dict[str, Any], **more: Any) -> LLM:
    """Load a replica's engine in its process. On a machine without the command's `folder`, `model` is looked
    up by name."""
    options, ranks = {**options, **more}, options.get("tensor_parallel_size", 1)
    if not bundle.gpus:
        options |= {"device": "cpu", "threads": bundle.cpus // ranks}
        if bundle.replicas_per_machine > 1:  # all start and see the same free memory
            spare = spare_memory(torch.device("cpu"), bundle.replicas_per_machine * ranks)
            options.setdefault("kv_cache_memory", spare)
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

    local: dict[str, Any] = {}
    if (address := os.environ.get("RAY_ADDRESS")) is None:
        cpus = int(max(min(len(os.sched_getaffinity(0)), cpu_quota()), replicas * _min_cpus(config)))
        local = {**LOCAL, "num_cpus": cpus}
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if port.isdecimal():  # Ray would retry for two minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(**local, logging_level="CRITICAL", log_to_driver=log_to_driver)
    except (OSError, OverflowError) as error:  # a port above 65535 overflows
        if address is None:
            raise
        reason = getattr(error, "strerror", None) or "no Ray cluster found"
        raise OSError(f"RAY_ADDRESS={address}: {reason}; start Ray there or unset RAY_ADDRESS.") from None
    try:
        yield bundle_for(replicas, config, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:
        ray.shutdown()


def bundle_for(replicas: int, config: EngineConfig, machines: Sequence[dict[str, float]]) -> Bundle:
    """Return the bundle of each replica: GPUs if the machines have any, else as many CPUs as possible such
    that all replicas fit. Raises ValueError if there are too few."""
    ranks = config.tensor_parallel_size
    on_gpus = config.device != "cpu" and (config.device != "auto" or any(m.get("GPU") for m in machines))
    kind, least = ("GPU", ranks) if on_gpus else ("CPU", _min_cpus(config))
    available = [int(machine.get(kind, 0)) for machine in machines]
    most = least if on_gpus or config.threads != "auto" else max(available)
    for size in range(most - most % ranks, least - 1, -ranks):
        if sum(count // size for count in available) >= replicas:
            return Bundle(1, size, 1) if on_gpus else Bundle(size, 0, min(max(available) // size, replicas))
    needs, has = f"{least} {kind}{'s' * (least > 1)}", " + ".join(map(str, available))
    raise ValueError(f"{replicas} replicas with {needs} each do not fit: Ray has {has}; lower --replicas.")


def _min_cpus(config: EngineConfig) -> int:
    return config.tensor_parallel_size * (1 if config.threads == "auto" else config.threads)


def last_error(text: str) -> str:
    """Return the message of the last exception in an error report of Ray, or "" if there is none."""
    return (re.findall(r"\w+Error: (.+)", text) or [""])[-1]
