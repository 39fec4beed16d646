"""What becomes of a job: clocks, and who is told what."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from nanospec.extras.tensor_parallel.team import RankFailed, Team


@pytest.fixture
def pair() -> Iterator[tuple[Team, Connection]]:
    """A team of one rank that was not started here and has 0.3 seconds to answer; and its end."""
    ours, theirs = Pipe()
    team = Team([ours], (), 0.3)
    yield team, theirs
    team.close()


def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_loading_takes_as_long_as_it_takes(pair: tuple[Team, Connection]) -> None:
    team, _ = pair
    with team.together():
        time.sleep(1)
    assert team.failure is None


def test_an_answer_does_not(pair: tuple[Team, Connection]) -> None:
    """Whoever waits for a device is freed, and gets an error instead of what was computed without a rank."""
    team, rank = pair
    freed: list[bool] = []
    team.give_up = lambda: freed.append(True)
    sentence = r"A rank has not answered 'step' for 0.3 seconds, which is .* distributed_timeout sets; all of"
    with pytest.raises(RankFailed, match=sentence), team.together(("step", 1)):
        eventually(lambda: freed)
    assert rank.recv() == ("step", 1)
    with pytest.raises(RankFailed, match=sentence), team.together():
        pytest.fail("nothing is begun any more")


def test_a_rank_that_is_gone_ends_what_is_loading(pair: tuple[Team, Connection]) -> None:
    team, rank = pair
    rank.close()
    with pytest.raises(RankFailed, match=r"Rank 1 is gone, and the others with it\."), team.together():
        eventually(lambda: team.failure)


def test_where_the_leader_waits_for_ever_its_process_ends(
    pair: tuple[Team, Connection], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    team, _ = pair
    ended: list[int] = []
    monkeypatch.setattr("nanospec.extras.tensor_parallel.team.GRACE", 0.3)
    monkeypatch.setattr("os._exit", ended.append)
    with pytest.raises(RankFailed), team.together(("step", 1)):
        eventually(lambda: ended)
    assert ended == [1]
    assert capfd.readouterr().err.startswith("A rank has not answered 'step' for 0.3 seconds, which is")


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_what_a_rank_says_is_the_error(pair: tuple[Team, Connection], is_asked_for: bool) -> None:
    """Also where the leader looks only when the job is over."""
    team, rank = pair
    rank.send(("max_model_len=7 is too short.", is_asked_for))
    eventually(lambda: team.failure)
    sentence = r"^Rank 1 failed, and the others with it: max_model_len=7 is too short\.$"
    with pytest.raises(RankFailed, match=sentence) as raised, team.together():
        pytest.fail("nothing is begun any more")
    assert isinstance(raised.value.__cause__, ValueError) == is_asked_for


def test_ranks_have_time_to_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    Team((), [process], 1).close()
    assert process.returncode == 0


def test_ranks_are_told_of_the_end_once(pair: tuple[Team, Connection]) -> None:
    team, rank = pair
    for _ in range(2):
        team.dismiss()
    assert rank.recv() == ("end",)
    assert not rank.poll(0.1)
    with pytest.raises(RuntimeError, match="has been closed; make a new LLM"), team.together():
        pytest.fail("nothing is begun any more")
