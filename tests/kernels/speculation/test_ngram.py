"""n-gram proposals against a plain-Python reference."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels.speculation import ngram
from nanospec.kernels.speculation.proposal import NGRAM, Proposal

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
    texts: list[list[int]],
    rows: list[int],
    min_n: list[int],
    max_n: list[int],
    limit: list[int],
    max_len: list[int],
    k: int,
    propose: object,
    capacity: int = 0,
) -> None:
    """Compare `propose` with the reference for request rows that hold `texts`."""
    capacity = max([capacity, 1, *(len(text) for text in texts)])
    # What lies behind a text repeats it, so that reading beyond the end finds better matches.
    tokens = torch.tensor([((t or [7]) * capacity)[:capacity] for t in texts], dtype=torch.int32)
    tensors = [torch.tensor(v, dtype=torch.int32) for v in (rows, min_n, max_n, limit, max_len)]
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    result = propose(tokens, lengths, *tensors, k, max(max_n))  # type: ignore[operator]
    assert isinstance(result, Proposal)
    assert result[5:] == (None, None)
    assert all(part.dtype == torch.int32 for part in result[:5])
    assert result.drafts.shape == result.source.shape == (len(rows), k)
    assert result.drafter.tolist() == [NGRAM] * len(rows)
    for b, s in enumerate(rows):
        drafts: list[int] = []
        sources: list[int] = []
        n = 0
        wanted = max(min(limit[s], k, max_len[s] - len(texts[s]) - 1), 0)
        if s >= 0 and wanted > 0:  # who wants none is not searched for
            drafts, sources, n = reference(texts[s], min_n[s], max_n[s], wanted)
        assert int(result.num_drafts[b]) == len(drafts), f"row {b}"
        assert int(result.match_len[b]) == n, f"row {b}"
        assert result.drafts[b].tolist() == drafts + [0] * (k - len(drafts)), f"row {b}"
        assert result.source[b].tolist() == sources + [-1] * (k - len(drafts)), f"row {b}"


REQUEST = st.tuples(
    st.lists(st.integers(0, 3), max_size=40),  # few different tokens: many matches
    st.integers(1, 4),  # min_n
    st.integers(0, 3),  # max_n - min_n
    st.integers(0, 9),  # limit
    st.integers(-2, 12),  # room after the text
)


@settings(max_examples=300, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=5), st.integers(1, 8), st.randoms())
def test_naive_matches_reference(
    requests: list[tuple[list[int], int, int, int, int]], k: int, shuffle: random.Random
) -> None:
    rows = [*range(len(requests)), -1]
    shuffle.shuffle(rows)
    texts, min_n, more, limit, room = (list(column) for column in zip(*requests))
    max_n = [a + b for a, b in zip(min_n, more)]
    max_len = [len(text) + r for text, r in zip(texts, room)]
    check(texts, rows, min_n, max_n, limit, max_len, k, ngram.naive)


def propose_one(text: list[int], min_n: int = 1, max_n: int = 3, k: int = 6) -> Proposal:
    one = torch.ones(1, dtype=torch.int32)
    return ngram.naive(
        torch.tensor([text], dtype=torch.int32),
        one * len(text), one * 0, one * min_n, one * max_n, one * k, one * 10_000, k, max_n,
    )  # fmt: skip


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
    one = torch.ones(1, dtype=torch.int32)
    text = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.int32)
    for max_len, expected in ((4, 0), (5, 0), (6, 1), (8, 3)):
        result = ngram.naive(text, one * 4, one * 0, one, one * 2, one * 9, one * max_len, 5, 2)
        assert int(result.num_drafts) == expected


@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_texts_have_no_match(length: int) -> None:
    check([list(range(length))], [0], [1], [3], [4], [99], 4, ngram.naive, capacity=8)


# The kernel, in the interpreter.


@settings(max_examples=25, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=4), st.sampled_from([1, 3, 8]), st.randoms())
def test_kernel_matches_reference(
    requests: list[tuple[list[int], int, int, int, int]], k: int, shuffle: random.Random
) -> None:
    rows = [*range(len(requests)), -1]
    shuffle.shuffle(rows)
    texts, min_n, more, limit, room = (list(column) for column in zip(*requests))
    max_n = [a + b for a, b in zip(min_n, more)]
    max_len = [len(text) + r for text, r in zip(texts, room)]
    check(texts, rows, min_n, max_n, limit, max_len, k, ngram.launch)


@pytest.mark.parametrize("programs", [1, 4, 512], ids=lambda n: f"programs{n}")
@pytest.mark.parametrize("length", [1023, 1024, 1025, 3000])
def test_kernel_splits_long_histories(length: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches in the first, a middle and the last block; the longest wins wherever it is."""
    monkeypatch.setattr(ngram, "PROGRAMS", programs)
    rng = random.Random(length)
    texts = []
    for place in (5, length // 2, length - 9):
        text = [rng.randrange(1000, 100_000) for _ in range(length)]
        text[-3:] = [1, 2, 3]
        text[place : place + 3] = [1, 2, 3]
        text[rng.randrange(length - 20)] = 3  # a shorter match elsewhere
        texts.append(text)
    ones = [1] * 3
    check(texts, [2, 0, 1], ones, [3] * 3, [4] * 3, [length + 9] * 3, 4, ngram.launch, length + 100)


def test_kernel_refuses_what_it_cannot_pack() -> None:
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="n from 1 to 127"):
        ngram.launch(torch.zeros(1, 8, dtype=torch.int32), one, one, one, one, one, one, 4, 200)
