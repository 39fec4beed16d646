"""Trees of n-gram proposals against a plain-Python reference, and what must hold for any tree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels.speculation import ngram, ngram_tree, verify
from nanospec.kernels.speculation.proposal import Proposal
from tests.kernels.batches import compiled, guessed, ints, make_batch, make_table
from tests.kernels.histories import Request, check_form, history_table, requests, texts

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage

Propose = Callable[..., Proposal]
ON_CPU: dict[str, Propose] = {"naive": ngram_tree.naive, **compiled(native=ngram.native)}
KERNEL: Propose = ngram_tree.launch
IMPLEMENTATIONS = {**ON_CPU, "kernel": KERNEL}


class Node(NamedTuple):
    token: int
    source: int
    parent: int


def matched(text: list[int], p: int, max_n: int) -> int:
    """How many tokens before p equal the last ones of the text."""
    m = 0
    while m < min(p, max_n) and text[p - 1 - m] == text[-1 - m]:
        m += 1
    return m


def common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def reference(text: list[int], min_n: int, max_n: int, D: int, width: int) -> tuple[list[Node], int]:
    """The nodes of one request by place, and the match length of its first chain."""
    n = len(text)
    order = sorted(((matched(text, p, max_n), p) for p in range(1, n)), reverse=True)
    chains: list[tuple[int, list[int]]] = []
    best = 0
    if order and order[0][0] > ngram_tree.LONG_MATCH:
        width = min(width, 1)
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
    propose: Propose,
    max_width: int = 0,
    capacity: int = 0,
) -> None:
    """Compare `propose` with the reference."""
    bound, max_n = max_width or max(r.width for r in requests), max(r.max_n for r in requests)
    result = propose(history_table(requests, capacity), ints(*rows), k, max_n, bound)
    check_form(result, len(rows), k, tree=True)
    assert result.parents is not None
    assert result.parents.shape == (len(rows), k)
    for b, s in enumerate(rows):
        nodes: list[Node] = []
        n = 0
        request = requests[s]
        D = request.wanted(k)
        if s >= 0 and D > 0:
            nodes, n = reference(request.text, request.min_n, request.max_n, D, min(request.width, bound))
        rest = k - len(nodes)
        assert int(result.num_drafts[b]) == len(nodes), f"row {b}"
        assert int(result.match_len[b]) == n, f"row {b}"
        assert result.drafts[b].tolist() == [x.token for x in nodes] + [0] * rest, f"row {b}"
        assert result.source[b].tolist() == [x.source for x in nodes] + [-1] * rest, f"row {b}"
        assert result.parents[b].tolist() == [x.parent for x in nodes] + [0] * rest, f"row {b}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@settings(max_examples=100)
@given(st.lists(requests(), min_size=1, max_size=4), st.sampled_from([1, 2, 5, 8, 17]), st.randoms())
def test_matches_reference(implementation: str, batch: list[Request], k: int, shuffle: random.Random) -> None:
    if implementation == "kernel":
        batch = batch[:2]  # the interpreter is slow
    rows = shuffle.sample([*range(len(batch)), -1], len(batch) + 1)
    check(batch, rows, k, IMPLEMENTATIONS[implementation], max_width=shuffle.randint(1, 8))


def propose_one(text: list[int], k: int, width: int, min_n: int = 1, max_n: int = 3) -> Proposal:
    table = history_table([Request(text, min_n, max_n, k, width=width)])
    return ngram_tree.naive(table, ints(0), k, max_n, max(width, 1))


def nodes_of(result: Proposal) -> list[Node]:
    """The nodes of a proposal of one row."""
    assert result.parents is not None
    columns = (result.drafts[0], result.source[0], result.parents[0])
    return [Node(*row) for row in zip(*(c.tolist() for c in columns))][: int(result.num_drafts)]


def path_to(nodes: list[Node], place: int) -> list[Node]:
    """From the root's child down to `place`."""
    path = []
    while place:
        path.append(nodes[place - 1])
        place = nodes[place - 1].parent
    return path[::-1]


def accepted(nodes: list[Node], last: int, target: list[int]) -> int:
    """How many drafts `verify` accepts if the target goes on with `target` after the token `last`."""
    ids, parents = ints(last, *(x.token for x in nodes)), [0, *(x.parent for x in nodes)]
    batch = make_batch([len(ids)], parents=parents, input_ids=ids)
    drawn = ints(*[[*target, -1][min(int(depth), len(target))] for depth in batch.positions])
    return int(verify.naive(drawn, batch, make_table(10, max_len=0), guessed(batch)).num_emitted) - 1


def test_a_tree_by_hand() -> None:
    """After "1 2" came "3 4", later "3 5"; after another "2" came "6"."""
    text = [1, 2, 3, 4, 7, 1, 2, 3, 5, 7, 9, 2, 6, 7, 1, 2]
    assert nodes_of(propose_one(text, k=7, width=3)) == [
        # The latest of the longest matches gets 4 of 7 drafts ...
        Node(3, 7, 0), Node(5, 8, 1), Node(7, 9, 2), Node(9, 10, 3),
        # ... the earlier one 2 of the other 3, and shares the first token ...
        Node(4, 3, 1), Node(7, 4, 5),
        # ... and the match of one token the last.
        Node(6, 12, 0),
    ]  # fmt: skip


@settings(max_examples=300)
@given(texts(60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 63), st.integers(1, 8))
def test_what_holds_for_any_tree(text: list[int], min_n: int, more: int, k: int, width: int) -> None:
    max_n, n = min_n + more, len(text)
    result = propose_one(text, k, width, min_n, max_n)
    nodes = nodes_of(result)
    chain = propose_one(text, k, 1, min_n, max_n)
    assert len(nodes) == int(chain.num_drafts) == (k if int(chain.match_len) else 0)
    assert int(result.match_len) == int(chain.match_len)
    if not nodes:
        return
    # Parents come first, so that the first n nodes are a tree; siblings differ.
    assert all(0 <= x.parent < place for place, x in enumerate(nodes, 1))
    assert len({(x.parent, x.token) for x in nodes}) == len(nodes)
    assert all(text[x.source] == x.token for x in nodes)
    # The best chain has the first half, or more where nothing shares the tree with it.
    half = -(-k // 2)
    assert nodes[:half] == nodes_of(chain)[:half]
    # Every path to a leaf is how the text went on after an earlier occurrence of a suffix.
    after = [p for p in range(1, n) if matched(text, p, max_n) >= min_n]
    leaves = set(range(1, len(nodes) + 1)) - {x.parent for x in nodes}
    paths = [[x.token for x in path_to(nodes, leaf)] for leaf in leaves]
    ways = {tuple(text[p + j % (n - p)] for j in range(k)) for p in after}
    assert all(any(list(way[: len(path)]) == path for way in ways) for path in paths)
    assert len(leaves) <= min(width, len(ways))
    # Whatever the target says, the tree accepts what it has of it: never less than a chain of half as
    # many drafts, and all of any path.
    for target in [*paths, *map(list, ways)][:12]:
        count = accepted(nodes, text[-1], target)
        assert count == max(common(path, target) for path in paths)
        assert count >= min(accepted(nodes_of(chain), text[-1], target), half)


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
    batch = [Request(text, 1, 3, k, 999, width) for width in (1, 2, 5, 8)]
    check(batch, [3, 0, -1, 1, 2], k, KERNEL, max_width=8)
    branches = {x.parent for x in nodes_of(propose_one(text, k, 8)) if x.parent}
    assert len(branches) > 5


@pytest.mark.parametrize("programs", [1, 3, 512], ids=lambda n: f"programs{n}")
@pytest.mark.parametrize("length", [1023, 1025, 3000])
def test_kernel_splits_long_histories(length: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways on in all blocks: alike across blocks, and more in one block than are wanted."""
    monkeypatch.setattr(ngram, "PROGRAMS", programs)
    rng = random.Random(length)
    batch = []
    for width in (2, 4):
        text = [rng.randrange(1000, 100_000) for _ in range(length)]
        for _ in range(12):
            place = rng.randrange(length - 20)
            text[place : place + 6] = [1, 2, 3, rng.randrange(4), rng.randrange(2), rng.randrange(2)]
        text[-3:] = [1, 2, 3]
        batch.append(Request(text, 1, 3, 6, 9, width))
    check(batch, [1, 0], 6, KERNEL, max_width=4, capacity=length + 100)


def test_kernel_sees_only_the_text_between_its_ends() -> None:
    """The end of a block, of the text and of the memory are different places."""
    text = [3, 1] + [9] * 1021 + [3, 2, 3]
    check([Request(text, 1, 4, 7, 99, 3)], [0], 7, KERNEL, capacity=1026)
    check([Request([5, 5], 1, 2, 4, 99, 8)], [0], 4, KERNEL)


def test_kernel_compares_all_drafts_and_no_more() -> None:
    """The second chain leaves the first at the third token, and below a first of two it has the rest."""
    text = [1, 2, 3, 4, 7, 1, 2, 3, 5, 8, 1]
    for k, expected in ((2, [2, 3]), (3, [2, 3, 4]), (5, [2, 3, 5, 4, 7])):
        check([Request(text, 1, 1, k, 99, 4)], [0], k, KERNEL)
        assert [x.token for x in nodes_of(propose_one(text, k, 4, max_n=1))] == expected


def test_kernel_goes_back_to_the_start_of_each_candidate() -> None:
    """What lies behind the text, here its first tokens, is part of no continuation."""
    check([Request([9] + [0] * 12, 1, 3, 8, 99, 4)], [0], 8, KERNEL, capacity=40)
    check([Request([9, 8] + [1, 2] * 7, 1, 3, 8, 99, 4)], [0], 8, KERNEL, capacity=40)


@pytest.mark.parametrize(("B", "k"), [(0, 4), (1, 0), (2, 0)])
def test_kernel_without_rows_or_drafts(B: int, k: int) -> None:
    result = KERNEL(history_table([Request([1, 1])]), ints(*[0] * B), k, 2, 1)
    assert result.drafts.shape == (B, k)
    assert result.num_drafts.tolist() == [0] * B
