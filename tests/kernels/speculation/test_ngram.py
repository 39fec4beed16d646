"""n-gram proposals against a plain-Python reference."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels.codes import RUNNING, STOPPED
from nanospec.kernels.speculation import ngram
from nanospec.kernels.speculation.proposal import Proposal
from tests.kernels.batches import compiled, ints
from tests.kernels.histories import Request, check_form, history_table, requests

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage


def reference(text: list[int], min_n: int, max_n: int, wanted: int) -> tuple[list[int], list[int], int]:
    """(drafts, their sources, match length) of one request, by trying every suffix at every place."""
    for n in range(max_n, min_n - 1, -1):
        for source in range(len(text) - 1, n - 1, -1):
            if text[source - n : source] == text[len(text) - n :]:
                longer, origin = list(text), list(range(len(text)))
                for i in range(wanted):
                    longer.append(longer[source + i])
                    origin.append(origin[source + i])
                return longer[len(text) :], origin[len(text) :], n
    return [], [], 0


def check(
    batch: list[Request], rows: list[int], k: int, propose: Callable[..., Proposal], capacity: int = 0
) -> None:
    """Compare `propose` with the reference."""
    result = propose(history_table(batch, capacity), ints(*rows), k, max(r.max_n for r in batch))
    check_form(result, len(rows), k, tree=False)
    for b, s in enumerate(rows):
        drafts, sources, n = list[int](), list[int](), 0
        request = batch[s]
        if s >= 0 and request.wanted(k):  # who wants none is not searched for
            wanted = request.wanted(k)
            drafts, sources, n = reference(request.text, request.min_n, request.max_n, wanted)
        assert int(result.num_drafts[b]) == len(drafts), f"row {b}"
        assert int(result.match_len[b]) == n, f"row {b}"
        assert result.drafts[b].tolist() == drafts + [0] * (k - len(drafts)), f"row {b}"
        assert result.source[b].tolist() == sources + [-1] * (k - len(drafts)), f"row {b}"


ON_CPU = {"naive": ngram.naive, **compiled(native=ngram.native)}
IMPLEMENTATIONS = {**ON_CPU, "kernel": ngram.launch}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@settings(max_examples=100)
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(1, 8), st.randoms())
def test_matches_reference(implementation: str, batch: list[Request], k: int, shuffle: random.Random) -> None:
    if implementation == "kernel":
        batch = batch[:2]  # the interpreter is slow
    rows = shuffle.sample([*range(len(batch)), -1], len(batch) + 1)
    check(batch, rows, k, IMPLEMENTATIONS[implementation])


BY_HAND = {  # text, K, room -> drafts, sources, length of the match
    "a periodic text drafts full length": ([1, 2, 3] * 3, 6, 99, [1, 2, 3, 1, 2, 3], [6, 7, 8, 6, 7, 8], 3),
    "a longer match beats a later one": ([5, 1, 2, 9, 8, 7, 2, 6, 5, 1, 2], 1, 99, [9], [3], 3),
    "the latest of equally long ones": ([1, 2, 7, 1, 2, 8, 1, 2], 1, 99, [8], [5], 2),
    "no text": ([], 4, 99, [], [], 0),
    "a single token": ([7], 4, 99, [], [], 0),
    "no match": ([1, 2], 4, 99, [], [], 0),
    "no room": ([1, 1, 1, 1], 5, 0, [], [], 0),
    "room for the bonus alone": ([1, 1, 1, 1], 5, 1, [], [], 0),
    "room for a draft": ([1, 1, 1, 1], 5, 2, [1], [3], 3),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str, implementation: str) -> None:
    text, k, room, drafts, sources, n = BY_HAND[case]
    table, rest = history_table([Request(text, room=room)], 8), k - len(drafts)
    for code in (RUNNING, STOPPED):  # a row that has finished guesses nothing
        table.finished[:] = code
        result = IMPLEMENTATIONS[implementation](table, ints(0), k, 3)
        if code == RUNNING:
            assert result.drafts.tolist() == [drafts + [0] * rest]
            assert result.source.tolist() == [sources + [-1] * rest]
        wanted = (len(drafts), n) if code == RUNNING else (0, 0)
        assert (int(result.num_drafts), int(result.match_len)) == wanted


# The kernel, in the interpreter.


@pytest.mark.parametrize("programs", [1, 4, 512], ids=lambda n: f"programs{n}")
@pytest.mark.parametrize("length", [1023, 1024, 1025, 3000])
def test_kernel_splits_long_histories(length: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches in the first, a middle and the last block; the longest wins wherever it is."""
    monkeypatch.setattr(ngram, "PROGRAMS", programs)
    rng = random.Random(length)
    batch = []
    for place in (5, length // 2, length - 9):
        text = [rng.randrange(1000, 100_000) for _ in range(length)]
        text[-3:] = [1, 2, 3]
        text[place : place + 3] = [1, 2, 3]
        text[rng.randrange(length - 20)] = 3  # a shorter match elsewhere
        batch.append(Request(text, limit=4, room=9))
    check(batch, [2, 0, 1], 4, ngram.launch, length + 100)
