"""Proposals by lookup against a plain-Python reference, and what must hold for any tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels import RUNNING, STOPPED
from nanospec.kernels.native.build import library
from nanospec.kernels.speculation import ngram, ngram_tree, verify
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from tests.kernels.batches import guessed, ints, make_batch, make_table

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage

IMPLEMENTATIONS: dict[str, tuple[Callable[..., Proposal], ...]] = {  # of chains, of trees
    "naive": (ngram.naive, ngram_tree.naive),
    **({"native": (ngram.native, ngram.native)} if library() else {}),
    "kernel": (ngram.launch, ngram_tree.launch),
}


def propose(which: str, table: Table, rows: Tensor, k: int, max_n: int, max_width: int = 1) -> Proposal:
    chains, trees = IMPLEMENTATIONS[which]
    return trees(table, rows, k, max_n, max_width) if max_width > 1 else chains(table, rows, k, max_n)


class Node(NamedTuple):
    """A draft: its token, the index that it was copied from, and the place that it follows."""

    token: int
    source: int
    parent: int


class Request(NamedTuple):
    """A request row: its text and settings. `room`: how many tokens it may still grow by."""

    text: list[int]
    min_n: int = 1
    max_n: int = 3
    limit: int = 63
    room: int = 1000
    width: int = 1

    def wanted(self, k: int) -> int:
        """Return how many drafts it can use."""
        return max(min(self.limit, k, self.room - 1), 0)


def history_table(requests: list[Request], capacity: int = 0) -> Table:
    capacity = max([capacity, 1, *(len(r.text) for r in requests)])
    columns: dict[str, Any] = {
        name: [getattr(r, name) for r in requests] for name in ("min_n", "max_n", "limit", "width")
    }
    # What lies behind a text repeats it, so that reading beyond the end finds better matches.
    return make_table(
        1,
        tokens=[((r.text or [7]) * capacity)[:capacity] for r in requests],
        num_tokens=[len(r.text) for r in requests],
        max_len=[len(r.text) + r.room for r in requests],
        **columns,
    )


@st.composite
def texts(draw: st.DrawFn, max_size: int = 40) -> list[int]:
    """Draw a text of few different tokens, or a repeated piece with some errors: many matches."""
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
    """Return how many tokens before p equal the last ones of the text."""
    m = 0
    while m < min(p, max_n) and text[p - 1 - m] == text[-1 - m]:
        m += 1
    return m


def common(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix."""
    return next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def reference(text: list[int], min_n: int, max_n: int, D: int, width: int) -> tuple[list[Node], int]:
    """Return the nodes of one request by place, and the match length of its first chain."""
    n = len(text)
    order = sorted(((matched(text, p, max_n), p) for p in range(1, n)), reverse=True)
    chains: list[tuple[int, list[int]]] = []
    best = 0
    width = 1 if order and order[0][0] > ngram_tree.LONG_MATCH.value else max(width, 1)
    for m, p in order:
        chain = [text[p + j % (n - p)] for j in range(D)]
        if m >= max(min_n, 1) and len(chains) < width and chain not in [c for _, c in chains]:
            best = best or m
            chains.append((p, chain))
    nodes: list[Node] = []
    places: list[list[int]] = []  # of each chain's tokens, as deep as it goes
    for i, (p, chain) in enumerate(chains):
        rest = D - len(nodes)
        share = rest if i + 1 == len(chains) else -(-rest // 2)
        shared = [min(common(chain, chains[e][1]), len(places[e])) for e in range(i)]
        start = max(shared, default=0)
        # Begins with the places of the earliest chain that shares most.
        own = places[shared.index(start)][:start] if start else []
        for j in range(start, min(start + share, D)):
            nodes.append(Node(chain[j], p + j % (n - p), own[-1] if own else 0))
            own.append(len(nodes))
        places.append(own)
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
    table, max_n = history_table(requests, capacity), max(r.max_n for r in requests)
    result = propose(which, table, ints(*rows), k, max_n, max_width)
    assert result[6:] == (None, None)
    assert all(part.dtype == ints().dtype for part in result if part is not None)
    assert result.drafts.shape == result.source.shape == (len(rows), k)
    assert result.drafter.tolist() == [0] * len(rows)
    assert (result.parents is not None) == (max_width > 1)
    for b, s in enumerate(rows):
        nodes, n, request = list[Node](), 0, requests[s]
        if s >= 0 and (D := request.wanted(k)):  # a row that wants none is not searched for
            width = min(request.width, max_width)
            nodes, n = reference(request.text, request.min_n, request.max_n, D, width)
        assert (int(result.num_drafts[b]), int(result.match_len[b])) == (len(nodes), n), f"row {b}"
        columns = zip(*nodes, *[Node(0, -1, 0)] * (k - len(nodes)))
        for ours, column in zip((result.drafts, result.source, result.parents), columns):
            assert ours is None or ours[b].tolist() == [*column], f"row {b}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=150)
@given(st.lists(requests(), min_size=1, max_size=4), st.sampled_from([1, 2, 5, 8, 17]), st.randoms())
def test_matches_reference(implementation: str, batch: list[Request], k: int, shuffle: random.Random) -> None:
    if implementation == "kernel":
        batch = batch[:2]  # the interpreter is slow
    rows = shuffle.sample([*range(len(batch)), -1], len(batch) + 1)
    check(batch, rows, k, shuffle.choice([1, 1, 2, 3, 8]), implementation)


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", BY_HAND)
def test_a_chain_by_hand(case: str, implementation: str) -> None:
    text, k, room, drafts, sources, n = BY_HAND[case]
    table, rest = history_table([Request(text, room=room)], 8), k - len(drafts)
    for code in (RUNNING, STOPPED):  # a row that has finished guesses nothing
        table.finished[:] = code
        result = propose(implementation, table, ints(0), k, 3)
        if code == RUNNING:
            assert result.drafts.tolist() == [drafts + [0] * rest]
            assert result.source.tolist() == [sources + [-1] * rest]
        wanted = (len(drafts), n) if code == RUNNING else (0, 0)
        assert (int(result.num_drafts), int(result.match_len)) == wanted


def tree_of(text: list[int], k: int, width: int, min_n: int = 1, max_n: int = 3) -> tuple[list[Node], int]:
    """Return what is proposed for one request: its nodes, and the length of the match."""
    table = history_table([Request(text, min_n, max_n, k, width=width)])
    result = ngram_tree.naive(table, ints(0), k, max_n, 8)
    assert result.parents is not None
    columns = (part[0].tolist() for part in (result.drafts, result.source, result.parents))
    return [Node(*row) for row in zip(*columns)][: int(result.num_drafts)], int(result.match_len)


def path_to(nodes: list[Node], place: int) -> list[int]:
    """Return the tokens from the root's child down to `place`."""
    path = []
    while place:
        path.append(nodes[place - 1].token)
        place = nodes[place - 1].parent
    return path[::-1]


def accepted(nodes: list[Node], last: int, target: list[int]) -> int:
    """Return how many drafts `verify` accepts if the target goes on with `target` after the token `last`."""
    ids, parents = ints(last, *(x.token for x in nodes)), [0, *(x.parent for x in nodes)]
    batch = make_batch([len(ids)], parents=parents, input_ids=ids)
    drawn = ints(*[[*target, -1][min(int(depth), len(target))] for depth in batch.positions])
    return int(verify.naive(drawn, batch, make_table(10, max_len=0), guessed(batch)).num_emitted) - 1


def test_a_tree_by_hand() -> None:
    """After "1 2" came "3 4", later "3 5"; after another "2" came "6"."""
    text = [1, 2, 3, 4, 7, 1, 2, 3, 5, 7, 9, 2, 6, 7, 1, 2]
    assert tree_of(text, k=7, width=3)[0] == [
        # The latest of the longest matches gets 4 of 7 drafts ...
        Node(3, 7, 0), Node(5, 8, 1), Node(7, 9, 2), Node(9, 10, 3),
        # ... the earlier one 2 of the other 3, and shares the first token ...
        Node(4, 3, 1), Node(7, 4, 5),
        # ... and the match of one token the last.
        Node(6, 12, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_long_match_is_not_branched(implementation: str) -> None:
    for length in (ngram_tree.LONG_MATCH.value, ngram_tree.LONG_MATCH.value + 1):
        suffix = list(range(1, length + 1))
        text = [*suffix, 11, *suffix, 12, *suffix]
        check([Request(text, max_n=8, width=2)], [0], 6, 2, implementation)


@settings(max_examples=300)
@given(texts(60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 63), st.integers(1, 8))
def test_what_holds_for_any_tree(text: list[int], min_n: int, more: int, k: int, width: int) -> None:
    max_n, n = min_n + more, len(text)
    nodes, match_len = tree_of(text, k, width, min_n, max_n)
    chain, of_chain = tree_of(text, k, 1, min_n, max_n)
    assert match_len == of_chain
    assert len(nodes) == len(chain) == (k if of_chain else 0)
    if not nodes:
        return
    # Parents come first, so that the first n nodes are a tree; siblings differ.
    assert all(0 <= x.parent < place for place, x in enumerate(nodes, 1))
    assert len({(x.parent, x.token) for x in nodes}) == len(nodes)
    assert all(text[x.source] == x.token for x in nodes)
    # The best chain has the first half, or more where nothing shares the tree with it.
    half = -(-k // 2)
    assert nodes[:half] == chain[:half]
    # Every path to a leaf is how the text went on after an earlier occurrence of a suffix.
    after = [p for p in range(1, n) if matched(text, p, max_n) >= min_n]
    leaves = set(range(1, len(nodes) + 1)) - {x.parent for x in nodes}
    paths = [path_to(nodes, leaf) for leaf in leaves]
    ways = {tuple(text[p + j % (n - p)] for j in range(k)) for p in after}
    assert all(any(list(way[: len(path)]) == path for way in ways) for path in paths)
    assert len(leaves) <= min(width, len(ways))
    # Whatever the target says, the tree accepts what it has of it: never less than a chain of half as
    # many drafts, and all of any path.
    for target in [*paths, *map(list, ways)][:12]:
        count = accepted(nodes, text[-1], target)
        assert count == max(common(path, target) for path in paths)
        assert count >= min(accepted(chain, text[-1], target), half)


# The kernel, in the interpreter.


@pytest.mark.parametrize("k", [32, 63])
def test_kernel_grows_large_trees(k: int) -> None:
    """Many ways on, which leave each other early and late."""
    rng = random.Random(k)
    base = [rng.randrange(50) for _ in range(70)]
    text: list[int] = []
    for _ in range(9):
        copy = list(base)
        copy[rng.randrange(3, 60)] = 50 + rng.randrange(3)
        text += copy
    text += base[:3]
    check([Request(text, 1, 3, k, 999, width) for width in (1, 2, 5, 8)], [3, 0, -1, 1, 2], k, max_width=8)
    assert len({x.parent for x in tree_of(text, k, 8)[0] if x.parent}) > 5


@pytest.mark.parametrize("length", [1023, 1024, 1025, 3000])
def test_kernel_goes_through_long_histories(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches in the first, a middle and the last block; the longest wins wherever it is. For trees, ways on
    in all blocks: alike across blocks, and more in one block than are wanted."""
    for module in (ngram, ngram_tree):
        monkeypatch.setattr(module, "BLOCK", 1024)
    rng = random.Random(length)

    def text() -> list[int]:
        return [*(rng.randrange(1000, 100_000) for _ in range(length - 3)), 1, 2, 3]

    chains = [text() for _ in range(3)]
    for place, one in zip((5, length // 2, length - 9), chains):
        one[place : place + 3] = [1, 2, 3]
        one[rng.randrange(length - 20)] = 3  # a shorter match elsewhere
    check([Request(one, limit=4, room=9) for one in chains], [2, 0, 1], 4, capacity=length + 100)
    trees = [text() for _ in range(2)]
    for one in trees:
        for _ in range(12):
            place = rng.randrange(length - 20)
            one[place : place + 6] = [1, 2, 3, rng.randrange(4), rng.randrange(2), rng.randrange(2)]
    batch = [Request(one, 1, 3, 6, 9, width) for one, width in zip(trees, (2, 4))]
    check(batch, [1, 0], 6, max_width=4, capacity=length + 100)


def test_kernel_compares_all_drafts_and_no_more() -> None:
    """The second chain leaves the first at the third token, and below a first of two it has the rest."""
    text = [1, 2, 3, 4, 7, 1, 2, 3, 5, 8, 1]
    for k, expected in ((2, [2, 3]), (3, [2, 3, 4]), (5, [2, 3, 5, 4, 7])):
        check([Request(text, 1, 1, k, 99, 4)], [0], k, max_width=4)
        assert [x.token for x in tree_of(text, k, 4, max_n=1)[0]] == expected


EDGES = {  # text, max_n, K, capacity
    "the end of a block, of the text and of the memory": ([3, 1] + [9] * 1021 + [3, 2, 3], 4, 7, 1026),
    "the start of the text": ([5, 5], 2, 4, 0),
    # What lies behind the text, here its first tokens, is part of no continuation.
    "back to the start of each candidate": ([9] + [0] * 12, 3, 8, 40),
    "back to the start of a pair": ([9, 8] + [1, 2] * 7, 3, 8, 40),
}


@pytest.mark.parametrize("case", EDGES)
def test_kernel_sees_only_the_text_between_its_ends(case: str) -> None:
    text, max_n, k, capacity = EDGES[case]
    check([Request(text, 1, max_n, k, 99, 4)], [0], k, max_width=4, capacity=capacity)


@pytest.mark.parametrize("max_width", [1, 2])
@pytest.mark.parametrize(("B", "k"), [(0, 4), (1, 0), (2, 0)])
def test_kernel_without_rows_or_drafts(B: int, k: int, max_width: int) -> None:
    table = history_table([Request([1, 1])])
    result = propose("kernel", table, ints(*[0] * B), k, 2, max_width)
    assert result.drafts.shape == (B, k)
    assert result.num_drafts.tolist() == [0] * B
