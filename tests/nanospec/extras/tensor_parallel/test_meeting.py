"""How ranks find the leader: by whom it is not deterred, and what comes over a connection."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

from nanospec.extras.tensor_parallel import meeting
from nanospec.extras.tensor_parallel.meeting import (
    ADDRESS,
    KEY,
    Meeting,
    hand_over,
    messages_of,
    new_key,
    visit,
)
from nanospec.extras.tensor_parallel.ranks import follow
from nanospec.extras.tensor_parallel.team import RankFailed


@pytest.fixture
def store() -> Store:
    return dist.HashStore()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", 1)


def met(place: Meeting, store: Store, count: int, key: str = "") -> list[Connection]:
    """The leader's connections to so many ranks, which come in another order."""
    with ThreadPoolExecutor(count) as pool:
        ranks = [pool.submit(visit, store, rank, key) for rank in range(count, 0, -1)]
        found = place.await_ranks(count, (), 20)
        for connection, rank in zip(found, [each.result() for each in reversed(ranks)], strict=True):
            connection.send("hello")
            assert rank.recv() == "hello"
    return found


def test_a_key_given_to_ranks_is_not_in_the_store(store: Store) -> None:
    key = new_key()
    met(Meeting("127.0.0.1", store, key), store, 3, key)
    assert not store.check([KEY])


def test_ranks_that_others_have_started_find_the_key_in_the_store(store: Store) -> None:
    met(Meeting("localhost", store), store, 2)


@pytest.mark.parametrize("name", ["127.0.0.1", "::1"])
def test_ranks_on_other_machines_come_to_any_address(store: Store, name: str) -> None:
    if name == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    place = Meeting("what-others-call-it.invalid", store, everywhere=True)
    store.set(ADDRESS, store.get(ADDRESS).decode().replace("what-others-call-it.invalid", name))
    met(place, store, 1)


def test_the_silent_and_those_without_the_key_are_not_waited_for(store: Store) -> None:
    place = Meeting("127.0.0.1", store)
    host, port = store.get(ADDRESS).decode().split()
    silent = socket.create_connection((host, int(port)))
    wrong = socket.create_connection((host, int(port)))
    wrong.sendall(b"\0\0\0\x04nope" * 9)
    met(place, store, 2)
    silent.close()
    wrong.close()


def test_a_leader_without_the_key_is_refused(store: Store) -> None:
    place = Meeting("127.0.0.1", store, new_key())
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(visit, store, 1, new_key())
        with pytest.raises(RankFailed, match=r"1 of 2 ranks did not start within 1 s\."):
            place.await_ranks(1, (), 1)
        with pytest.raises(Exception, match="digest"):
            rank.result()


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_rank_that_says_nothing_of_its_parts_has_failed(pipe: tuple[Connection, Connection]) -> None:
    with pytest.raises(RankFailed, match=r"Rank 1 did not answer for 0\.2 s"):
        hand_over(pipe[:1], "parts", 0.2)
    pipe[1].send(("no such model", True))
    with pytest.raises(RankFailed, match="Rank 1 failed: no such model"):
        hand_over(pipe[:1], "parts", 0.2)




def test_a_rank_fails_of_a_message_that_it_cannot_read(
    pipe: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for ever, and the others for it."""
    monkeypatch.setattr(meeting, "GRACE", 3600)  # then it ends its process, which is here that of the test
    pipe[0].send_bytes(pickle.dumps(("end",))[:-3])
    with pytest.raises(Exception, match=r"truncated|Ran out of input"):
        follow(Follower(), messages_of(pipe[1]))  # type: ignore[arg-type]


def test_a_rank_ends_with_its_leader(
    pipe: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, or, if it waits for something else, after a while."""
    ended: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(meeting, "GRACE", 0.2)
    monkeypatch.setattr("os._exit", ended.put)
    pipe[0].close()
    follow(Follower(), messages_of(pipe[1]))  # type: ignore[arg-type]
    assert ended.get(timeout=10) == 1


class Follower:
    """Queues steps, and notes which are fetched."""

    drafters, device = (), torch.device("cpu")

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def step(self, order: int, cut: Any) -> int:
        return order

    def fetch(self, flight: int) -> None:
        self.fetched.append(flight)


def test_a_rank_forgets_what_the_leader_forgets() -> None:
    worker = Follower()
    messages: list[Any] = [("step", 0), ("step", 1), ("fetch", 0), ("step", 2), ("step", 3), ("fetch", 1)]
    messages += [("step", 4), ("step", 5), ("step", 6), ("fetch", 2), ("fetch", 0), ("end",)]
    follow(worker, iter(messages))  # type: ignore[arg-type]
    assert worker.fetched == [0, 2, 5, 6]
