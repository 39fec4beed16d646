"""Choice of device and current device; number of threads under quotas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanospec import SamplingParams
from nanospec.device import resources
from nanospec.device.resources import cpu_quota, resolve_device, use_device, use_threads
from tests.drive import Job, make_engine, run
from tests.tiny import tiny_model


class DeviceRecorder:
    """Replaces `use_device` and records the devices entered and whether one is entered now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: list[torch.device] = []
        self.depth = 0
        monkeypatch.setattr(resources, "use_device", self._use_device)

    @contextmanager
    def _use_device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        self.depth += 1
        yield
        self.depth -= 1


class OnlyInside(TorchDispatchMode):
    """Rejects operations outside `use_device`."""

    def __init__(self, entered: DeviceRecorder) -> None:
        super().__init__()
        self._entered = entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert self._entered.depth, f"{func} on whatever device is the current one"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{"enforce_eager": True}, {"enforce_eager": False}], ids=["eager", "captured"]
)
def test_worker_runs_on_its_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocation, capture, timing, and all verbs."""
    model = tiny_model(num_layers=1)
    entered = DeviceRecorder(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=9, presence_penalty=0.1, logprobs=1)
    with OnlyInside(entered):
        engine = make_engine(model, "auto", max_num_seqs=2, async_scheduling=True, **options)
        run(engine, [Job([1, 2, 3, 1, 2], params), Job([4] * 20, params), Job([5], params)])
    assert set(entered.devices) == {model.device}
    assert entered.depth == 0


def test_use_device_sets_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered_devices: list[torch.device] = []

    @contextmanager
    def fake(device: torch.device) -> Iterator[None]:
        entered_devices.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", fake)
    with use_device(torch.device("cpu")):
        pass
    assert not entered_devices
    with use_device(torch.device("cuda", 1)):
        pass
    assert entered_devices == [torch.device("cuda", 1)]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, the second of which is current."""
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "expected"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), ("cpu", "cpu")]
)
def test_resolve_device(name: str, expected: str) -> None:
    assert resolve_device(name) == torch.device(expected)


@pytest.mark.usefixtures("two_gpus")
def test_missing_gpu_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"device='cuda:7' .* has 2 GPUs.* the last is 'cuda:1'"):
        resolve_device("cuda:7")


def test_use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(wanted: Any, quota: float) -> int:
        monkeypatch.setattr(resources, "cpu_quota", lambda: quota)
        use_threads(wanted)
        return torch.get_num_threads()

    before = torch.get_num_threads()
    monkeypatch.setattr(resources, "DEFAULT_THREADS", 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        assert [used("auto", quota) for quota in (0.5, 1.2, 7.0, math.inf)] == [1, 2, 2, 2]
        assert used(3, 1.0) == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert used("auto", 1.0) == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 1"}, 2.0),
        ("0::/gone\n", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/../a\n", {}, math.inf),
        ("", {}, math.inf),
    ],
)
def test_cpu_quota(own: str, files: dict[str, str], expected: float, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert cpu_quota(tmp_path / "own", tmp_path / "root") == expected
