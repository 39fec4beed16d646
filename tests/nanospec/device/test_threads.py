"""The number of threads heeds the user, the container's quota and busy neighbours."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanospec.device import devices
from nanospec.device.devices import cpu_quota, settle_threads, usage, use_threads


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that other processes have used so far, a list of one; a minute passes between two looks."""
    before, busy, minutes = torch.get_num_threads(), [0.0], iter(range(10**6))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(devices, "usage", lambda: (busy[0], 0.0, next(minutes) * 60.0))
    monkeypatch.setattr(devices, "cpu_quota", lambda: math.inf)
    monkeypatch.setattr(devices, "DEFAULT_THREADS", 2)
    monkeypatch.setattr(devices, "computed_by", lambda model: model)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield busy
    torch.set_num_threads(before)


def loaded(others: list[float], cores: float, by: Any = "PyTorch") -> int:
    """Threads after a model was loaded beside processes that used so many cores."""
    before = use_threads("auto")
    others[0] += 60 * cores
    settle_threads(before, by)
    return torch.get_num_threads()


def test_neighbours_lower_the_number_once(others: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert [loaded(others, cores) for cores in (0, 0.4, 1.0, 9.0, 0)] == [2, 2, 1, 1, 2]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "Other programs use 1.0 of 2 cores; using 1 threads."
    assert len(said) == 2


def test_compiled_models_keep_their_threads(others: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert loaded(others, 1.5, by="C++") == 2
    assert capsys.readouterr().err == "Other programs use 1.5 of 2 cores; using 2 threads.\n"


@pytest.mark.parametrize("chosen", ["option", "environment"])
def test_the_users_number_stays(others: list[float], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if chosen == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        torch.set_num_threads(2)
    assert use_threads("auto" if chosen == "environment" else 3) is None
    others[0] += 120
    assert torch.get_num_threads() == (2 if chosen == "environment" else 3)


def test_a_quota_lowers_the_number(others: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for quota in (0.5, 1.2, 7.0):
        monkeypatch.setattr(devices, "cpu_quota", lambda quota=quota: quota)
        use_threads("auto")
        found.append(torch.get_num_threads())
    assert found == [1, 2, 2]


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
def test_quotas(own: str, files: dict[str, str], expected: float, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert cpu_quota(tmp_path / "own", tmp_path / "root") == expected


def test_usage_counts_own_processors_without_idling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  999 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 5000 600 1 2 47 9 9\n\ncpu1 200 0 0 7 7 0 0 0 0 0\n"
        "cpu10 1 1 1 1 1 1 1 1 0 0\nintr 5 6\n"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert usage(stat)[0] == 400 / os.sysconf("SC_CLK_TCK")


def test_child_processes_are_no_neighbours() -> None:
    before = usage()
    subprocess.run([sys.executable, "-c", "for i in range(5_000_000): pass"], check=True)
    assert usage()[1] - before[1] > 0.03
