"""Resources of each replica, and the connection to Ray."""

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec.apps.cluster import start
from nanospec.apps.cluster.start import Bundle, bundle_for, last_error, load
from nanospec.config import EngineConfig

GPUS = [{"CPU": 8.0, "GPU": 2.0}]


@pytest.mark.parametrize(
    ("replicas", "options", "machines", "expected"),
    [
        (1, {}, [{"CPU": 8.0}, {"CPU": 4.0}], Bundle(8, 0, 1)),
        (2, {}, GPUS, Bundle(1, 1, 1)),
        (2, {"device": "cpu", "threads": 3}, GPUS, Bundle(3, 0, 2)),
        (2, {"tensor_parallel_size": 2}, [{"GPU": 2.0}, {"GPU": 3.0}], Bundle(1, 2, 1)),
        (2, {"tensor_parallel_size": 2}, [{"CPU": 7.0}], Bundle(2, 0, 2)),  # not 3: ranks get the same
        (3, {"device": "cuda"}, [{"CPU": 4.0}], "3 replicas with 1 GPU each do not fit: Ray has 0; lower"),
        (3, {"threads": 2}, [{"CPU": 5.0}], "with 2 CPUs each do not fit: Ray has 5; lower"),
        (2, {"tensor_parallel_size": 2}, [{"GPU": 3.0}, {"GPU": 1.0}], r"2 GPUs .* has 3 \+ 1; lower"),
    ],
)
def test_resources_of_each_replica(
    replicas: int, options: Any, machines: list[dict[str, float]], expected: Bundle | str
) -> None:
    """All replicas are equal and as large as possible. The ranks of a replica are on one machine."""
    if isinstance(expected, Bundle):
        assert bundle_for(replicas, EngineConfig(**options), machines) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            bundle_for(replicas, EngineConfig(**options), machines)


@given(replicas=st.integers(1, 9), cpus=st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_cpus_per_replica_are_maximal(replicas: int, cpus: list[int]) -> None:
    machines = [{"CPU": float(count)} for count in cpus]
    if sum(cpus) < replicas:
        with pytest.raises(ValueError, match="do not fit"):
            bundle_for(replicas, EngineConfig(), machines)
        return
    each = bundle_for(replicas, EngineConfig(), machines).cpus
    assert sum(count // each for count in cpus) >= replicas
    assert sum(count // (each + 1) for count in cpus) < replicas


def test_replicas_on_one_machine_share_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "spare_memory", lambda device, sharing: (1 << 20) // sharing)
    monkeypatch.setattr(start, "resolve_model", lambda name: f"{name} on the hub")
    monkeypatch.setattr(start, "LLM", lambda folder, **options: (folder, options))
    for replicas, ranks, memory in ((1, 2, None), (2, 1, 1 << 19), (2, 2, 1 << 18)):
        loaded: Any = load(tmp_path, "", Bundle(6, 0, replicas), {"tensor_parallel_size": ranks})
        assert (loaded[1].get("kv_cache_memory"), loaded[1]["threads"]) == (memory, 6 // ranks)
    elsewhere: Any = load(tmp_path / "none", "m", Bundle(1, 1, 1), {"seed": 1}, seed=2)
    assert elsewhere == ("m on the hub", {"seed": 2})


def test_missing_or_unreachable_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    with pytest.raises(ValueError, match=r"--replicas requires ray: pip install 'nanospec\[ray\]'"):
        start.need_ray("ray")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=Mock(side_effect=ConnectionError)))
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        for address in ("auto", f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with pytest.raises(OSError, match=f"RAY_ADDRESS={address}: no Ray cluster found; start"):
                start.connect_ray(1, EngineConfig()).__enter__()
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{port}")
    with pytest.raises(OSError, match=r"Connection refused; start Ray there or unset RAY_ADDRESS"):
        start.connect_ray(1, EngineConfig()).__enter__()
    assert last_error("ValueError: one\nat 0x1\n  OSError: two\nsee logs") == "two"
    assert last_error("no exception") == ""
