"""What others use of the processors is noticed, said once, and heeded where PyTorch computes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanospec.device import threads
from nanospec.device.threads import Crowd, Usage, fitting, look_around, use_threads

SAID = "Other programs use {} of 2 cores; going on beside them with {}.\n"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (0.0, {(2, 2): 2, (16, 16): 16, (4, 16): 4}),
        (0.4, {(2, 2): 2, (16, 16): 16, (4, 16): 4}),
        (1.0, {(2, 2): 1, (16, 16): 15, (4, 16): 4}),
        (14.0, {(2, 2): 1, (16, 16): 2, (4, 16): 2}),
        (99.0, {(2, 2): 1, (16, 16): 1, (4, 16): 1}),
    ],
)
def test_threads_that_fit(others: float, expected: dict[tuple[int, int], int]) -> None:
    assert {(most, cores): fitting(most, cores, others) for most, cores in expected} == expected


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
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield busy
    torch.set_num_threads(before)


def test_auto_forgets_a_number_that_was_wanted_before(two_cores: list[float]) -> None:
    found = []
    for wanted, used in ((1, 0), ("auto", 0), (1, 0), ("auto", 60), (1, 0), ("auto", 0)):
        use_threads(wanted)  # type: ignore[arg-type]
        two_cores[0] += used
        look_around("always")
        found.append(torch.get_num_threads())
    assert found == [1, 2, 1, 1, 1, 2]


def test_a_neighbour_is_heeded_until_it_has_gone(
    two_cores: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    use_threads("auto")
    found = []
    for used in (0, 60, 60, 0, 60):
        two_cores[0] += used
        look_around("always")
        found.append(torch.get_num_threads())
    assert found == [2, 1, 1, 2, 1]
    use_threads("auto")  # another engine: the most is still two
    look_around("always")
    assert torch.get_num_threads() == 2
    assert capsys.readouterr().err == SAID.format("1.0", "1 thread")


def test_what_is_equal_to_the_bit_keeps_its_threads(
    two_cores: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    use_threads("auto")
    two_cores[0] += 90
    look_around("never")
    assert torch.get_num_threads() == 2
    assert capsys.readouterr().err == SAID.format("1.5", "2 threads")


def test_what_rounds_coarsely_adapts_before_the_first_request_alone(two_cores: list[float]) -> None:
    use_threads("auto")
    two_cores[0] += 60
    look_around("at first")
    assert torch.get_num_threads() == 1
    look_around("at first")  # the neighbour has gone
    assert torch.get_num_threads() == 1


def test_a_neighbour_who_comes_later_changes_no_bit(two_cores: list[float]) -> None:
    use_threads("auto")
    for used in (0, 60):
        two_cores[0] += used
        look_around("at first")
        assert torch.get_num_threads() == 2


def test_a_first_look_that_comes_too_early_was_the_first(
    two_cores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads("auto")
    two_cores[0] += 60
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: -math.inf)
        look_around("at first")
    look_around("at first")
    assert torch.get_num_threads() == 2


def test_all_threads_are_there_again_after_a_model_that_adapted(two_cores: list[float]) -> None:
    use_threads("auto")
    two_cores[0] += 60
    look_around("always")
    assert torch.get_num_threads() == 1
    look_around("never")
    assert torch.get_num_threads() == 2


def test_what_children_used_is_ones_own() -> None:
    """A compiler is no neighbour."""
    before = Usage.now()
    subprocess.run([sys.executable, "-c", "for i in range(5_000_000): pass"], check=True)
    assert Usage.now().own - before.own > 0.03


@pytest.mark.parametrize("chosen", ["option", "environment"])
def test_what_the_user_has_set_stays(
    two_cores: list[float], chosen: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if chosen == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_threads("auto" if chosen == "environment" else 3)
    two_cores[0] += 120
    look_around("always")
    assert torch.get_num_threads() == (2 if chosen == "environment" else 3)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("two_cores")
def test_a_system_that_does_not_tell_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Usage:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(Usage, "now", missing)
    use_threads("auto")
    look_around("always")
    assert torch.get_num_threads() == 2
    assert isinstance(threads._crowd, Crowd)


def test_how_threads_wait_is_left_to_the_user() -> None:
    """It is for all of the program, and for what it starts."""
    code = "import os; before = dict(os.environ); import nanospec, torch; assert os.environ == before"
    subprocess.run([sys.executable, "-c", code], check=True)
