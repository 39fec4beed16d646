"""N-gram lookup: comparison with a plain Python reference."""

import random
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanospec.kernels import FROM_REFERENCE, LENGTH, RUNNING
from nanospec.kernels.speculation import ngram
from tests.kernels.batches import compiled, ints, make_table

pytestmark = pytest.mark.usefixtures("poison")

IMPLEMENTATIONS = {"naive": ngram.naive, **compiled(native=ngram.native), "kernel": ngram.launch}


class Node(NamedTuple):
    """A draft: its token, the index it was copied from, and the node of its parent."""

    token: int
    source: int
    parent: int


class Request(NamedTuple):
    """A request row. `room` is the number of tokens that may be appended."""

    text: list[int]
    reference: list[int] = []  # noqa: RUF012
    min_n: int = 1
    max_n: int = 3
    max_k: int = 63
    room: int = 1000
    tree_width: int = 1
    finished: int = RUNNING

    def max_drafts(self, k: int) -> int:
        """Return the number of drafts it can use."""
        return max(min(self.max_k, k, self.room - 1), 0) if self.finished == RUNNING else 0


@st.composite
def texts(draw: st.DrawFn, max_size: int = 40) -> list[int]:
    """Draw a text with many matches: few different tokens, or a repeated piece with some errors."""
    text: list[int] = draw(st.lists(st.integers(0, 3), max_size=max_size))
    if draw(st.booleans()) and text:
        text = (text[: draw(st.integers(1, 6))] * max_size)[: draw(st.integers(1, max_size))]
        for place in draw(st.lists(st.integers(0, len(text) - 1), max_size=3)):
            text[place] = draw(st.integers(0, 3))
    return text


@st.composite
def requests(draw: st.DrawFn) -> Request:
    bounds = (1, 4), (0, 3), (0, 20), (-2, 22), (0, 8)
    min_n, more, limit, room, width = (draw(st.integers(*each)) for each in bounds)
    finished = draw(st.sampled_from([RUNNING] * 4 + [LENGTH]))
    text, reference = draw(texts()), draw(texts(30)) if draw(st.booleans()) else []
    for place in draw(st.lists(st.integers(0, len(reference) - 1), max_size=3)) if reference else []:
        reference[place] = -1
    return Request(text, reference, min_n, min_n + more, limit, room, width, finished)


def matched(source: list[int], p: int, text: list[int], max_n: int) -> int:
    """Return the number of tokens before source[p] that equal the last tokens of the text."""
    m = 0
    while m < min(p, len(text), max_n) and source[p - 1 - m] == text[-1 - m]:
        m += 1
    return m


def reference(request: Request, D: int) -> tuple[list[Node], int]:
    """Return the nodes of one request, and the match length of its first chain."""
    text, other, n = request.text, request.reference, len(request.text)
    order = [(-matched(text, p, text, request.max_n), 0, -p) for p in range(1, n)]
    order += [(-matched(other, p, text, request.max_n), 1, -p) for p in range(1, len(other)) if other[p] >= 0]
    first: dict[int, tuple[int, bool, int]] = {}  # by next token
    for minus_m, copied, minus_p in sorted(order):
        if -minus_m >= max(request.min_n, 1):
            first.setdefault((other if copied else text)[-minus_p], (-minus_m, not copied, -minus_p))
    chains = list(first.values())
    best = chains[0][0] if chains else 0
    nodes: list[Node] = []
    chains = chains[: 1 if best > ngram.LONG_MATCH.value else max(request.tree_width, 1)]
    kept = 0  # nodes of earlier chains that the next one does not replace
    for _, own, p in chains:
        rest, del_from = D - kept, kept
        if not rest:
            break
        nodes = nodes[:del_from]
        for j in range(rest):
            source = p + j % (n - p) if own else p + j
            if not own and (source >= len(other) or other[source] < 0):
                break
            token = text[source] if own else other[source]
            code = source if own else FROM_REFERENCE - source
            nodes.append(Node(token, code, len(nodes) if j else 0))
        kept = min(kept + -(-rest // 2), len(nodes))
    return nodes, best


# The continuations of "1 2" are "3 4" and later "3 5"; another "2" is followed by "6".
FORKED = Request([1, 2, 3, 4, 7, 1, 2, 3, 5, 7, 9, 2, 6, 7, 1, 2], tree_width=3)
# The reference's longer matches, the latest first, precede those of the own text.
PREDICTED = Request([1, 2, 3, 5, 1, 2], [1, 2, 4, -1, 1, 2, 6, 0, 1, 2, 8], tree_width=3)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=90)
@given(st.lists(requests(), min_size=1, max_size=4), st.sampled_from([0, 1, 2, 5, 8, 17, 63]), st.randoms())
@example([FORKED], 7, random.Random(0))
@example([FORKED], 0, random.Random(0))
@example([PREDICTED, FORKED._replace(reference=FORKED.text)], 7, random.Random(1))
def test_matches_reference(implementation: str, batch: list[Request], k: int, rng: random.Random) -> None:
    """Memory after a text repeats it, so that reading past the end would find better matches. The kernel
    reads a text in several blocks."""
    if implementation == "kernel":
        batch = batch[:2]  # the interpreter is slow
    max_width = rng.choice([1, 1, 2, 3, 8])
    capacity = max(1, *(len(each.text) for each in batch)) + rng.choice([0, 1, 40])
    rows = rng.sample([*range(len(batch)), -1], len(batch) + 1)
    batch = [each._replace(tree_width=min(each.tree_width, max_width)) for each in batch]
    width = max(1, *(len(each.reference) for each in batch))
    capacity = max(capacity, width)
    names = ("min_n", "max_n", "max_k", "tree_width", "finished")
    columns: dict[str, Any] = {name: [getattr(each, name) for each in batch] for name in names}
    table = make_table(
        1, tokens=[((each.text or [7]) * capacity + [7])[:capacity] for each in batch],
        reference=[((each.reference or [7]) * capacity)[:capacity] for each in batch],
        num_reference=[len(each.reference) for each in batch],
        num_tokens=[len(each.text) for each in batch], max_len=[len(each.text) + each.room for each in batch],
        **columns,
    )  # fmt: skip
    with mock.patch.object(ngram, "BLOCK", rng.choice([16, 4096])):
        result = IMPLEMENTATIONS[implementation](table, ints(*rows), k, max(columns["max_n"]), max_width)
    assert all(part.dtype == ints().dtype for part in result if part is not None)
    assert result.drafts.shape == result.source.shape == (len(rows), k)
    assert result.drafter.tolist() == [0] * len(rows)
    assert (result.parents is not None) == (max_width > 1)
    for b, s in enumerate(rows):
        nodes, n = list[Node](), 0
        if s >= 0 and (D := batch[s].max_drafts(k)):  # rows without drafts are not searched
            nodes, n = reference(batch[s], D)
        assert (int(result.num_drafts[b]), int(result.match_len[b])) == (len(nodes), n), f"row {b}"
        columns_of = zip(*nodes, *[Node(0, -1, 0)] * (k - len(nodes)))
        for actual, column in zip((result.drafts, result.source, result.parents), columns_of):
            assert actual is None or actual[b].tolist() == [*column], f"row {b}"
