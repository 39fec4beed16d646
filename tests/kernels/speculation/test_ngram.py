"""N-gram lookup: comparison with a plain Python reference, and invariants of trees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels import RUNNING, STOPPED
from nanospec.kernels.native import library
from nanospec.kernels.speculation import ngram
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from tests.kernels.batches import ints, make_table

pytestmark = pytest.mark.usefixtures("poison")  # new memory is filled with NaN

IMPLEMENTATIONS: dict[str, Callable[..., Proposal]] = {
    "naive": ngram.naive,
    **({"native": ngram.native} if library() else {}),
    "kernel": ngram.launch,
}


class Node(NamedTuple):
    """A draft: its token, the index it was copied from, and the node of its parent."""

    token: int
    source: int
    parent: int


class Request(NamedTuple):
    """A request row: its text and settings. `room` is the number of tokens it may still grow by."""

    text: list[int]
    min_n: int = 1
    max_n: int = 3
    max_k: int = 63
    room: int = 1000
    tree_width: int = 1

    def max_drafts(self, k: int) -> int:
        """Return the number of drafts it can use."""
        return max(min(self.max_k, k, self.room - 1), 0)


def history_table(requests: list[Request], capacity: int = 0) -> Table:
    capacity = max([capacity, 1, *(len(r.text) for r in requests)])
    columns: dict[str, Any] = {
        name: [getattr(r, name) for r in requests] for name in ("min_n", "max_n", "max_k", "tree_width")
    }
    # Memory after a text repeats it, so that reading past the end would find better matches.
    return make_table(
        1,
        tokens=[((r.text or [7]) * capacity)[:capacity] for r in requests],
        num_tokens=[len(r.text) for r in requests],
        max_len=[len(r.text) + r.room for r in requests],
        **columns,
    )


@st.composite
def texts(draw: st.DrawFn, max_size: int = 40) -> list[int]:
    """Draw a text with many matches: few different tokens, or a repeated piece with some errors."""
    text: list[int] = draw(st.lists(st.integers(0, 3), max_size=max_size))
    if draw(st.booleans()) and text:
        piece = text[: draw(st.integers(1, 6))]
        text = (piece * max_size)[: draw(st.integers(1, max_size))]
        for place in draw(st.lists(st.integers(0, len(text) - 1), max_size=3)):
            text[place] = draw(st.integers(0, 3))
    return text


@st.composite
def requests(draw: st.DrawFn) -> Request:
    min_n = draw(st.integers(1, 4))
    numbers = [(0, 3), (0, 20), (-2, 22), (0, 8)]
    more, limit, room, width = (draw(st.integers(*bounds)) for bounds in numbers)
    return Request(draw(texts()), min_n, min_n + more, limit, room, width)


def matched(text: list[int], p: int, max_n: int) -> int:
    """Return the number of tokens before p that equal the last tokens of the text."""
    m = 0
    while m < min(p, max_n) and text[p - 1 - m] == text[-1 - m]:
        m += 1
    return m


def common(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    return next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def reference(text: list[int], min_n: int, max_n: int, D: int, width: int) -> tuple[list[Node], int]:
    """Return the nodes of one request, and the match length of its first chain."""
    n = len(text)
    order = sorted(((matched(text, p, max_n), p) for p in range(1, n)), reverse=True)
    first: dict[int, tuple[int, int]] = {}  # by next token
    for m, p in order:
        if m >= max(min_n, 1):
            first.setdefault(text[p], (m, p))
    chains = list(first.values())
    best = chains[0][0] if chains else 0
    nodes: list[Node] = []
    for i, (_, p) in enumerate(chains := chains[: 1 if best > ngram.LONG_MATCH.value else max(width, 1)], 1):
        rest = D - len(nodes)
        for j in range(rest if i == len(chains) else -(-rest // 2)):
            source = p + j % (n - p)
            nodes.append(Node(text[source], source, len(nodes) if j else 0))
    return nodes, best


def check(
    requests: list[Request],
    rows: list[int],
    k: int,
    max_width: int = 1,
    which: str = "kernel",
    capacity: int = 0,
) -> None:
    """Compare an implementation with the reference."""
    requests = [r._replace(tree_width=min(r.tree_width, max_width)) for r in requests]
    table, max_n = history_table(requests, capacity), max(r.max_n for r in requests)
    result = IMPLEMENTATIONS[which](table, ints(*rows), k, max_n, max_width)
    assert result[6:] == (None, None)
    assert all(part.dtype == ints().dtype for part in result if part is not None)
    assert result.drafts.shape == result.source.shape == (len(rows), k)
    assert result.drafter.tolist() == [0] * len(rows)
    assert (result.parents is not None) == (max_width > 1)
    for b, s in enumerate(rows):
        nodes, n, request = list[Node](), 0, requests[s]
        if s >= 0 and (D := request.max_drafts(k)):  # rows without drafts are not searched
            nodes, n = reference(request.text, request.min_n, request.max_n, D, request.tree_width)
        assert (int(result.num_drafts[b]), int(result.match_len[b])) == (len(nodes), n), f"row {b}"
        columns = zip(*nodes, *[Node(0, -1, 0)] * (k - len(nodes)))
        for ours, column in zip((result.drafts, result.source, result.parents), columns):
            assert ours is None or ours[b].tolist() == [*column], f"row {b}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=150)
@given(st.lists(requests(), min_size=1, max_size=4), st.sampled_from([1, 2, 5, 8, 17, 63]), st.randoms())
def test_matches_reference(implementation: str, batch: list[Request], k: int, shuffle: random.Random) -> None:
    if implementation == "kernel":
        batch = batch[:2]  # the interpreter is slow
    rows = shuffle.sample([*range(len(batch)), -1], len(batch) + 1)
    check(batch, rows, k, shuffle.choice([1, 1, 2, 3, 8]), implementation)


BY_HAND = {  # text, K, room -> drafts, sources, match length
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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", BY_HAND)
def test_chain_examples(case: str, implementation: str) -> None:
    text, k, room, drafts, sources, n = BY_HAND[case]
    table, rest = history_table([Request(text, room=room)], 8), k - len(drafts)
    for code in (RUNNING, STOPPED):  # a finished row has no drafts
        table.finished[:] = code
        result = IMPLEMENTATIONS[implementation](table, ints(0), k, 3)
        if code == RUNNING:
            assert result.drafts.tolist() == [drafts + [0] * rest]
            assert result.source.tolist() == [sources + [-1] * rest]
        expected = (len(drafts), n) if code == RUNNING else (0, 0)
        assert (int(result.num_drafts), int(result.match_len)) == expected


def tree_of(text: list[int], k: int, width: int, min_n: int = 1, max_n: int = 3) -> tuple[list[Node], int]:
    """Return the nodes proposed for one request, and the match length."""
    table = history_table([Request(text, min_n, max_n, k, tree_width=width)])
    result = ngram.naive(table, ints(0), k, max_n, 8)  # a chain as a tree, for a width of 1
    assert result.parents is not None
    columns = (part[0].tolist() for part in (result.drafts, result.source, result.parents))
    return [Node(*row) for row in zip(*columns)][: int(result.num_drafts)], int(result.match_len)


def test_tree_example() -> None:
    """The continuations of "1 2" are "3 4" and later "3 5"; another "2" is followed by "6"."""
    text = [1, 2, 3, 4, 7, 1, 2, 3, 5, 7, 9, 2, 6, 7, 1, 2]
    assert tree_of(text, k=7, width=3)[0] == [
        # The latest of the longest matches gets 4 of 7 drafts ...
        Node(3, 7, 0), Node(5, 8, 1), Node(7, 9, 2), Node(9, 10, 3),
        # ... and a match of one token the others, since the earlier long match also continues with 3.
        Node(6, 12, 0), Node(7, 13, 5), Node(1, 14, 6),
    ]  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_match_is_not_branched(implementation: str) -> None:
    for length in (ngram.LONG_MATCH.value, ngram.LONG_MATCH.value + 1):
        suffix = list(range(1, length + 1))
        text = [*suffix, 11, *suffix, 12, *suffix]
        check([Request(text, max_n=8, tree_width=2)], [0], 6, 2, implementation)


@settings(max_examples=200)
@given(texts(60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 63), st.integers(1, 8))
def test_tree_invariants(text: list[int], min_n: int, more: int, k: int, width: int) -> None:
    nodes, match_len = tree_of(text, k, width, min_n, min_n + more)
    chain, of_chain = tree_of(text, k, 1, min_n, min_n + more)
    assert match_len == of_chain
    assert len(nodes) == len(chain) == (k if of_chain else 0)
    # Parents come first, so the first n nodes are always a tree; siblings differ.
    assert all(0 <= x.parent < place for place, x in enumerate(nodes, 1))
    assert len({(x.parent, x.token) for x in nodes}) == len(nodes)
    assert all(text[x.source] == x.token for x in nodes)
    # The best chain gets the first half of the nodes.
    assert nodes[: -(-k // 2)] == chain[: -(-k // 2)]


# The kernel, in the interpreter.


@pytest.mark.parametrize("length", [1023, 1024, 1025, 3000])
def test_kernel_with_long_texts(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches in the first, a middle and the last block; the longest wins. For trees, next tokens in all
    blocks: equal ones in several blocks, and more in one block than the width."""
    monkeypatch.setattr(ngram, "BLOCK", 1024)
    rng = random.Random(length)

    def text() -> list[int]:
        return [*(rng.randrange(1000, 100_000) for _ in range(length - 3)), 1, 2, 3]

    chains = [text() for _ in range(3)]
    for place, one in zip((5, length // 2, length - 9), chains):
        one[place : place + 3] = [1, 2, 3]
        one[rng.randrange(length - 20)] = 3  # a shorter match elsewhere
    check([Request(one, max_k=4, room=9) for one in chains], [2, 0, 1], 4, capacity=length + 100)
    trees = [text() for _ in range(2)]
    for one in trees:
        for _ in range(12):
            place = rng.randrange(length - 20)
            one[place : place + 4] = [1, 2, 3, rng.randrange(4)]
    batch = [Request(one, 1, 3, 6, 9, width) for one, width in zip(trees, (2, 4))]
    check(batch, [1, 0], 6, max_width=4, capacity=length + 100)


EDGES = {  # text, max_n, K, capacity
    "end of a block, of the text and of the memory": ([3, 1] + [9] * 1021 + [3, 2, 3], 4, 7, 1026),
    "start of the text": ([5, 5], 2, 4, 0),
    # Memory after the text, here its first tokens, is not part of any continuation.
    "back to the start of each candidate": ([9] + [0] * 12, 3, 8, 40),
    "back to the start of a pair": ([9, 8] + [1, 2] * 7, 3, 8, 40),
}


@pytest.mark.parametrize("case", EDGES)
def test_kernel_stays_within_the_text(case: str) -> None:
    text, max_n, k, capacity = EDGES[case]
    check([Request(text, 1, max_n, k, 99, 4)], [0], k, max_width=4, capacity=capacity)


@pytest.mark.parametrize("max_width", [1, 2])
@pytest.mark.parametrize(("B", "k"), [(0, 4), (1, 0), (2, 0)])
def test_kernel_without_rows_or_drafts(B: int, k: int, max_width: int) -> None:
    table = history_table([Request([1, 1])])
    result = ngram.launch(table, ints(*[0] * B), k, 2, max_width)
    assert result.drafts.shape == (B, k)
    assert result.num_drafts.tolist() == [0] * B
