"""How much of Ray's machines each replica gets, and how Ray is reached."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec.apps.cluster import start
from nanospec.apps.cluster.start import Bundle, bundle_for
from nanospec.config import EngineConfig


@pytest.mark.parametrize(
    ("replicas", "machines", "expected"),
    [
        (2, [{"CPU": 8.0}], Bundle(4, 0, 4, 2)),
        (3, [{"CPU": 8.0}], Bundle(2, 0, 2, 3)),
        (2, [{"CPU": 8.0}, {"CPU": 4.0}], Bundle(4, 0, 4, 2)),
        (3, [{"CPU": 8.0}, {"CPU": 4.0}], Bundle(4, 0, 4, 2)),
        (1, [{"CPU": 8.0}, {"CPU": 4.0}], Bundle(8, 0, 8, 1)),
        (2, [{"CPU": 8.0, "GPU": 2.0}], Bundle(1, 1, None, 1)),
    ],
    ids=["halves", "odd", "two-machines", "three-on-two", "one", "gpus"],
)
def test_resources_are_split_evenly(
    replicas: int, machines: list[dict[str, float]], expected: Bundle
) -> None:
    assert bundle_for(replicas, EngineConfig(), machines) == expected


def test_threads_option_sets_cpus() -> None:
    machines = [{"CPU": 8.0, "GPU": 2.0}]
    assert bundle_for(2, EngineConfig(device="cpu", threads=3), machines) == Bundle(3, 0, 3, 2)


def test_tensor_parallel_replica_is_on_one_machine() -> None:
    on_gpus = EngineConfig(device="cuda", tensor_parallel_size=2)
    assert bundle_for(2, on_gpus, [{"GPU": 2.0}, {"GPU": 3.0}]) == Bundle(1, 2, None, 1)
    threads = bundle_for(2, EngineConfig(tensor_parallel_size=2), [{"CPU": 7.0}])
    assert threads == Bundle(2, 0, 1, 2)  # not 3 CPUs: both ranks get the same number
    with pytest.raises(ValueError, match=r"2 replicas with 2 GPUs each .* has 3 \+ 1, enough for 1;"):
        bundle_for(2, on_gpus, [{"GPU": 3.0}, {"GPU": 1.0}])


@pytest.mark.parametrize(
    ("options", "machines", "sentence"),
    [
        ({"device": "cuda:1"}, [{"CPU": 4.0}], "device='cuda:1' is a single GPU; with --replicas, use"),
        ({"device": "cuda"}, [{"CPU": 4.0}], "with 1 GPU each do not fit: Ray has 0, enough for 0"),
        (
            {"threads": 2},
            [{"CPU": 5.0}],
            "with 2 CPUs each do not fit: Ray has 5, enough for 2",
        ),
        ({}, [], "3 replicas with 1 CPU each do not fit: Ray has none"),
    ],
    ids=["one-gpu", "no-gpu", "threads", "nothing"],
)
def test_replicas_that_do_not_fit_are_rejected(
    options: dict[str, object], machines: list[dict[str, float]], sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:
        bundle_for(3, EngineConfig(**options), machines)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


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


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "127.0.0.1:{}99999", "[::1]:{}"])
def test_unreachable_ray_address_is_reported(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = address.format(free.getsockname()[1])
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(OSError) as caught, start.connect_ray(1, EngineConfig()):
        pass
    assert str(caught.value).startswith(f"RAY_ADDRESS={address}: could not connect (")
    assert str(caught.value).endswith("; start Ray there, or unset RAY_ADDRESS to use a local one.")


def test_reachable_or_auto_ray_address_is_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        for address in ("127.0.0.1:{}", "ray://127.0.0.1:{}", "auto"):
            start.check_reachable(address.format(there.getsockname()[1]))


def test_missing_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="ray")

    monkeypatch.setattr(start, "import_module", missing)
    with pytest.raises(ValueError, match=r"--replicas requires ray: pip install 'nanospec\[ray\]'"):
        start.need_ray("ray.data")
