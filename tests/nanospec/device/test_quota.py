"""How many threads a container's quota leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanospec.device import quota, threads
from nanospec.device.quota import cpu_quota
from tests.nanospec.test_llm import folder, make

__all__ = ["folder"]

V1 = "2:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "max 1"}, 2.0),
        ("0::/gone\n", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/../a\n", {}, math.inf),
        (V1, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/\n", {"cpu.max": "nonsense"}, math.inf),
        (None, {"cpu.max": "100000 100000"}, math.inf),
        ("what is this", {"cpu.max": "100000 100000"}, math.inf),
    ],
)
def test_quota(tmp_path: Path, own: str | None, files: dict[str, str], expected: float) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert cpu_quota(tmp_path / "own", root) == expected


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_crowd", None)  # as in a process that has had no engine yet
    monkeypatch.setattr(threads, "_unasked", None)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("granted", "threads"), [(1.5, 2), (2.0, 2), (0.3, 1), (4.0, 4), (math.inf, 4)], ids=str
)
def test_threads(monkeypatch: pytest.MonkeyPatch, granted: float, threads: int) -> None:
    monkeypatch.setattr(quota, "cpu_quota", lambda: granted)
    quota.heed_quota()
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("four_threads")
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "cpu_quota", lambda: 1.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    quota.heed_quota()
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_an_engine_heeds_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "cpu_quota", lambda: 2.0)
    make(folder, device="cpu")
    assert torch.get_num_threads() == 2
