"""What others use of the processors is noticed, said once, and heeded where PyTorch computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanospec import threads
from nanospec.threads import Crowd, Usage, fitting, look_around, use_threads

SAID = "Other programs use {} of 2 cores; going on beside them with {}.\n"


@pytest.mark.parametrize(
    ("others", "patient", "expected"),
    [
        (0.0, False, {2: 2, 16: 16}),
        (0.4, False, {2: 2, 16: 16}),
        (1.0, False, {2: 1, 16: 15}),
        (1.0, True, {2: 2, 16: 15}),
        (4.0, True, {2: 2, 16: 12}),
        (12.0, True, {2: 2, 16: 16}),
        (99.0, False, {2: 1, 16: 1}),
    ],
)
def test_threads_that_fit(others: float, patient: bool, expected: dict[int, int]) -> None:
    assert {cores: fitting(cores, cores, others, patient) for cores in expected} == expected


def test_fewer_threads_than_cores_stay_while_there_is_room() -> None:
    assert fitting(4, 16, 11.0, False) == 4
    assert fitting(4, 16, 14.0, False) == 2


def test_usage_counts_own_processors_without_idling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  999 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 5000 600 1 2 47 9 9\n\ncpu1 200 0 0 7 7 0 0 0 0 0\n"
        "cpu10 1 1 1 1 1 1 1 1 0 0\nintr 5 6\n"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert Usage.now(stat).busy == 400 / os.sysconf("SC_CLK_TCK")


def test_others_are_what_this_process_is_not() -> None:
    assert Usage(10.0, 4.0, 100.0).others_until(Usage(14.0, 6.0, 102.0)) == 1.0
    assert Usage(10.0, 4.0, 100.0).others_until(Usage(11.0, 6.0, 102.0)) == 0.0  # clocks tick apart


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds that others have used so far, a list of one; with every look a minute has passed."""
    before, busy, minutes = torch.get_num_threads(), [0.0], iter(range(10**6))
    torch.set_num_threads(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(Usage, "now", lambda: Usage(busy[0], 0.0, next(minutes) * 60.0 - 10**9))
    monkeypatch.setattr(threads, "_crowd", None)
    monkeypatch.setattr(threads, "_unasked", None)
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    yield busy
    torch.set_num_threads(before)


def test_auto_forgets_a_number_that_was_wanted_before(two_cores: list[float]) -> None:
    found = []
    for wanted, used in ((1, 0), ("auto", 0), (1, 0), ("auto", 60), (1, 0), ("auto", 0)):
        use_threads(wanted)  # type: ignore[arg-type]
        two_cores[0] += used
        look_around(may_adapt=True)
        found.append(torch.get_num_threads())
    assert found == [1, 2, 1, 1, 1, 2]


def test_a_neighbour_is_heeded_until_it_has_gone(
    two_cores: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    use_threads("auto")
    found = []
    for used in (0, 60, 60, 0, 60):
        two_cores[0] += used
        look_around(may_adapt=True)
        found.append(torch.get_num_threads())
    assert found == [2, 1, 1, 2, 1]
    use_threads("auto")  # another engine: the most is still two
    look_around(may_adapt=True)
    assert torch.get_num_threads() == 2
    assert capsys.readouterr().err == SAID.format("1.0", "1 thread")


def test_what_is_equal_to_the_bit_keeps_its_threads(
    two_cores: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    use_threads("auto")
    two_cores[0] += 90
    look_around(may_adapt=False)
    assert torch.get_num_threads() == 2
    assert capsys.readouterr().err == SAID.format("1.5", "2 threads")


@pytest.mark.parametrize("chosen", ["option", "environment"])
def test_what_the_user_has_set_stays(
    two_cores: list[float], chosen: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_threads("auto" if chosen == "environment" else 3)
    two_cores[0] += 120
    look_around(may_adapt=True)
    assert torch.get_num_threads() == (2 if chosen == "environment" else 3)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("two_cores")
def test_a_system_that_does_not_tell_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Usage:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(Usage, "now", missing)
    use_threads("auto")
    look_around(may_adapt=True)
    assert torch.get_num_threads() == 2
    assert isinstance(threads._crowd, Crowd)


@pytest.mark.parametrize(
    ("first", "environment", "expected"),
    [("", {}, "2000"), ("import torch; ", {}, "None"), ("", {"GOMP_SPINCOUNT": "7"}, "7"),
     ("", {"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["alone", "after torch", "spins set", "policy set"],
)  # fmt: skip
def test_threads_wait_briefly_unless_told_otherwise(
    first: str, environment: dict[str, str], expected: str
) -> None:
    names = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    env = {name: value for name, value in os.environ.items() if name not in names} | environment
    code = f"{first}import os, nanospec; print(os.environ.get('GOMP_SPINCOUNT'))"
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == expected
