"""n-gram proposals against a plain-Python reference."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("implementation", ON_CPU, ids=str)
@settings(max_examples=300)
@given(st.lists(requests(), min_size=1, max_size=5), st.integers(1, 8), st.randoms())
def test_on_a_cpu_matches_reference(
    implementation: str, batch: list[Request], k: int, shuffle: random.Random
) -> None:
    rows = shuffle.sample([*range(len(batch)), -1], len(batch) + 1)
    check(batch, rows, k, ON_CPU[implementation])


def propose_one(text: list[int], k: int = 6, room: int = 1000) -> Proposal:
    return ngram.naive(history_table([Request(text, room=room)], 8), ints(0), k, 3)


def test_periodic_text_drafts_full_length() -> None:
    """The match runs into the end of the text, and copying goes on from the draft."""
    result = propose_one([1, 2, 3] * 3)
    assert result.drafts.tolist() == [[1, 2, 3, 1, 2, 3]]
    assert result.source.tolist() == [[6, 7, 8, 6, 7, 8]]
    assert int(result.match_len) == 3


def test_longer_match_beats_later_match() -> None:
    assert propose_one([5, 1, 2, 9, 8, 7, 2, 6, 5, 1, 2], k=1).drafts.tolist() == [[9]]


def test_latest_of_equally_long_matches() -> None:
    assert propose_one([1, 2, 7, 1, 2, 8, 1, 2], k=1).drafts.tolist() == [[8]]


def test_token_limit_leaves_room_for_the_bonus() -> None:
    for room, expected in ((0, 0), (1, 0), (2, 1), (4, 3)):
        assert int(propose_one([1, 1, 1, 1], k=5, room=room).num_drafts) == expected


@pytest.mark.parametrize("implementation", ON_CPU, ids=str)
@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_texts_have_no_match(length: int, implementation: str) -> None:
    check([Request(list(range(length)))], [0], 4, ON_CPU[implementation], capacity=8)


# The kernel, in the interpreter.


@settings(max_examples=25)
@given(st.lists(requests(), min_size=1, max_size=4), st.sampled_from([1, 3, 8]), st.randoms())
def test_kernel_matches_reference(batch: list[Request], k: int, shuffle: random.Random) -> None:
    check(batch, shuffle.sample([*range(len(batch)), -1], len(batch) + 1), k, ngram.launch)


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


def test_kernel_refuses_what_it_cannot_pack() -> None:
    with pytest.raises(ValueError, match="n from 1 to 127"):
        ngram.launch(history_table([Request([1, 1])]), ints(0), 4, 200)
