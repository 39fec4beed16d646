"""Recycled tokens: what is kept of a step, and the trees that grow from it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.codes import GUESSED, NOBODY
from nanospec.kernels.sampling import noise
from nanospec.kernels.speculation import grow, learn, recycled, verify
from nanospec.kernels.speculation.grow import Marks
from nanospec.kernels.speculation.layout import naive as lay_out
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.recycled import (
    ANY,
    CODES,
    FIRST,
    FURTHER,
    ID_BITS,
    PAIR,
    TOKEN,
    Recycled,
    place,
)
from tests.kernels.batches import compiled, ints, make_table, random_logits

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage

GROW: dict[str, Callable[..., Any]] = {
    "naive": grow.naive, "kernel": grow.launch, **compiled(native=grow.native)
}  # fmt: skip
LEARN: dict[str, Callable[..., Any]] = {
    "naive": learn.naive, "kernel": learn.launch, **compiled(native=learn.native)
}  # fmt: skip


def empty(S: int, V: int) -> Recycled:
    return Recycled.empty(S, V, "cpu")


def say(state: Recycled, context: tuple[int, int], kind: int, said: dict[int, float], salt: int = 0) -> None:
    """Keep that the target said these tokens, likeliest first, with these probabilities."""
    at = place(ANY if kind == TOKEN else context[0], context[1], salt)
    entry = [i | round(-math.log(p) * CODES) << ID_BITS for i, p in said.items()]
    state.entries[at.row] = torch.tensor(entry + [-1] * (8 - len(entry)), dtype=torch.int32)
    state.tags[at.row] = at.tag


def chain(*rows: list[int], k: int, match: list[int]) -> Proposal:
    """Chains, copied from indices 100, 101, ... of the text."""
    drafts = [row + [0] * (k - len(row)) for row in rows]
    source = [[100 + i for i in range(k)] for _ in rows]
    return Proposal(
        ints_2d(drafts), ints(*map(len, rows)), ints_2d(source), ints(*match), ints(*[0] * len(rows))
    )


def ints_2d(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), -1)


@pytest.mark.parametrize("name", GROW)
def test_a_tree_by_hand(name: str) -> None:
    """7 was followed by 5 (0.6) and 3 (0.3), and as a pair with 2 by 3 (0.5); lookup says 5, 9."""
    table, state = make_table(20, tokens=[[2, 7]], num_tokens=2), empty(1, 20)
    say(state, (2, 7), TOKEN, {5: 0.6, 3: 0.3})
    say(state, (2, 7), PAIR, {3: 0.5, 4: 0.25})
    say(state, (0, 3), TOKEN, {8: 0.9})
    say(state, (0, 4), TOKEN, {8: 0.2})
    tree, marks = GROW[name](chain([5, 9], k=6, match=[2]), state, table, ints(0), 6)
    # Of the chain 2/4, then 3/4; of the pair 0.8 * 0.5 and 0.8 * 0.25; behind 3 half of 0.9, behind 4 of 0.2.
    assert tree.drafts.tolist() == [[5, 3, 9, 4, 8, 8]]
    assert tree.parents.tolist() == [[0, 0, 1, 0, 2, 4]]
    expected = [0.5, 0.4, 0.375, 0.2, 0.4 * 0.45, 0.2 * 0.1]
    torch.testing.assert_close(tree.chances, torch.tensor([expected]), rtol=0.04, atol=0)
    assert tree.source.tolist() == [[100, GUESSED, 101, GUESSED, GUESSED, GUESSED]]
    assert [tree.num_drafts.tolist(), tree.drafter.tolist(), tree.match_len.tolist()] == [[6], [1], [2]]
    assert marks.kind.tolist() == [[FIRST, PAIR, FURTHER, PAIR, TOKEN, TOKEN]]
    shares = [0.5, 0.4, 0.75, 0.2, 0.45, 0.1]
    torch.testing.assert_close(marks.expected, torch.tensor([shares]), rtol=0.04, atol=0)


@pytest.mark.parametrize("name", GROW)
def test_a_chain_that_is_recycled_too_takes_no_node_twice(name: str) -> None:
    table, state = make_table(20, tokens=[[7, 7]], num_tokens=2), empty(1, 20)
    say(state, (7, 7), TOKEN, {5: 0.9})
    tree, _ = GROW[name](chain([5, 6], k=4, match=[1]), state, table, ints(0), 4)
    assert (tree.drafts.tolist(), tree.parents.tolist()) == ([[5, 6, 0, 0]], [[0, 1, 0, 0]])
    assert tree.num_drafts.tolist() == [2]


@pytest.mark.parametrize("name", GROW)
def test_what_came_true_counts(name: str) -> None:
    """A kind of guesses that was mostly wrong falls behind; no chance exceeds MOST."""
    table, state = make_table(20, tokens=[[7, 7]], num_tokens=2), empty(1, 20)
    say(state, (7, 7), PAIR, {5: 0.5})
    state.record[0, FIRST] = torch.tensor([0.0, 6.0])
    state.record[0, PAIR] = torch.tensor([90.0, 5.0])
    tree, marks = GROW[name](chain([3], k=2, match=[2]), state, table, ints(0), 2)
    assert tree.drafts.tolist() == [[5, 3]]
    torch.testing.assert_close(tree.chances, torch.tensor([[grow.MOST, 0.5 * 2 / 8]]), rtol=1e-5, atol=0)
    torch.testing.assert_close(marks.expected, torch.tensor([[0.4, 0.5]]), rtol=0.04, atol=0)


@pytest.mark.parametrize("name", GROW)
def test_who_samples_gets_the_tokens_that_the_noise_favours(name: str) -> None:
    """At temperature 1 the chance of a token is p / E in proportion, of a chain's exp(-E (1 - p) / p)."""
    table = make_table(20, tokens=[[7, 7, 0]], num_tokens=2, temperature=1.0, seed=11)
    state, said = empty(1, 20), {5: 0.5, 3: 0.25, 4: 0.125}
    say(state, (7, 7), TOKEN, said)
    tree, _ = GROW[name](chain([9], k=4, match=[2]), state, table, ints(0), 4)
    e = noise.naive(11, 2, ints(*said, 9)).exp()
    weight = torch.tensor(list(said.values())) / e[:3]
    found = dict(zip(tree.drafts[0].tolist(), tree.chances[0].tolist()))
    for token, w in zip(said, weight.tolist()):
        assert found[token] == pytest.approx(0.5 * w / (float(weight.sum()) + 0.125), rel=0.05)
    assert found[9] == pytest.approx(math.exp(-float(e[3])), rel=1e-4)


@pytest.mark.parametrize("name", GROW)
def test_salts_keep_requests_apart(name: str) -> None:
    table, state = make_table(20, tokens=[[7, 7]] * 3, num_tokens=2), empty(3, 20)
    state.salts[:] = ints(5, -6, 5)
    say(state, (7, 7), TOKEN, {1: 0.5}, salt=5)
    say(state, (7, 7), PAIR, {2: 0.5}, salt=-6)
    base = chain([], [], [9], k=1, match=[0, 0, 1])._replace(drafter=ints(NOBODY, 5, 3))
    tree, _ = GROW[name](base, state, table, ints(0, 1, 2), 1)
    assert tree.drafts.tolist() == [[1], [2], [9]]
    assert tree.drafter.tolist() == [0, 0, 4]  # who is in it: none of another's, or the third one's


class Played:
    """Steps of three requests in a small vocabulary, by one implementation."""

    def __init__(self, V: int, seed: int, name: str, packed: bool) -> None:
        self.rng, self.V, self.name, self.packed = random.Random(seed), V, name, packed
        texts = [[self.rng.randrange(V) for _ in range(40)] for _ in range(3)]
        hot = self.rng.choice([1.0, 60.0])
        self.table = make_table(
            V, tokens=texts, num_tokens=[1, 2, 20], max_len=[40, 12, 39], block_table=[[0, 1, 2]] * 3,
            temperature=[0.0, 0.7, hot], seed=[seed, -seed, 3], limit=[63, 63, self.rng.randrange(9)],
        )  # fmt: skip
        self.state = empty(3, V)
        self.state.salts[:] = ints(0, 0, 9)

    def step(self, k: int) -> tuple[Proposal, Marks, Batch]:
        rows = ints(*self.rng.sample([0, 1, 2, -1], 4))
        lengths = [self.rng.randrange(k + 1) for _ in rows]
        chains = [[self.rng.randrange(self.V) for _ in range(n)] for n in lengths]
        base = chain(*chains, k=k, match=[self.rng.randrange(5) if c else 0 for c in chains])
        tree, marks = GROW[self.name](base, self.state, self.table, rows, k)
        cut = tree.num_drafts.clamp(max=self.rng.randrange(k + 1)) if self.packed else tree.num_drafts
        batch = lay_out(self.table, rows, tree._replace(num_drafts=cut))
        batch = batch.packed() if self.packed else batch
        # Logits of few different values, so that there are ties; targets that are often among the drafts.
        logits = random_logits(self.rng, batch.num_tokens, self.V, torch.float32)
        if self.rng.random() < 0.3:
            logits[self.rng.randrange(len(logits)), 0] = math.nan
        targets = logits.nan_to_num(-1e9).argmax(-1).int()
        verdict = verify.naive(targets, batch, self.table, tree)
        LEARN[self.name](self.state, logits, self.table, batch, tree, marks, verdict)
        return tree, marks, batch


@settings(max_examples=8)
@given(st.sampled_from([1, 5, 8, 13, 70]), st.integers(0, 1 << 20), st.sampled_from([1, 4, 9]), st.booleans())
@pytest.mark.parametrize("name", [name for name in GROW if name != "naive"])
def test_as_naive(name: str, V: int, seed: int, k: int, packed: bool) -> None:
    """Whole steps, in which each implementation goes on from what it has kept itself."""
    own, naive = Played(V, seed, name, packed), Played(V, seed, "naive", packed)
    for _ in range(3):
        (tree, marks, _), (expected, expected_marks, _) = own.step(k), naive.step(k)
        for actual, right in zip((*tree, *marks), (*expected, *expected_marks)):
            if right is None or actual is None:
                assert right is actual
            elif not right.is_floating_point():
                assert actual.tolist() == right.tolist()
            else:
                torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own.state.record, naive.state.record, rtol=1e-5, atol=1e-6)
        assert torch.equal(own.state.tags, naive.state.tags)
        used = naive.state.tags.nonzero().squeeze(1)
        a, b = own.state.entries[used], naive.state.entries[used]
        assert torch.equal(a & (1 << ID_BITS) - 1, b & (1 << ID_BITS) - 1)
        assert torch.equal(a < 0, b < 0)
        assert ((a >> ID_BITS) - (b >> ID_BITS)).abs().max() <= 1  # on the border of two codes
        own.state.entries.copy_(naive.state.entries)  # so that this does not add up


@settings(max_examples=30)
@given(st.sampled_from([3, 9, 30]), st.integers(0, 1 << 20), st.sampled_from([1, 2, 7, 20]))
def test_any_tree(V: int, seed: int, k: int) -> None:
    """Parents come first, siblings differ, chances fall, and a larger tree begins with the smaller one."""
    played = Played(V, seed, "naive", False)
    for _ in range(3):
        played.step(k)
    base = chain([0, 1, 0], [], [2], k=max(k, 3), match=[3, 0, 1])
    whole, _ = grow.naive(base, played.state, played.table, ints(0, 1, 2), max(k, 3))
    columns = whole.drafts, whole.parents, whole.chances
    for b, n in enumerate(whole.num_drafts.tolist()):
        drafts, parents, chances = (column[b, :n].tolist() for column in columns if column is not None)
        assert all(0 <= parent <= i for i, parent in enumerate(parents))
        assert len(set(zip(parents, drafts))) == n
        above = [1.0, *chances]
        assert all(0 <= c <= above[parent] * grow.MOST * 1.001 for c, parent in zip(chances, parents))
        assert chances == sorted(chances, reverse=True)
    fewer = max(k, 3) - 1
    smaller = base._replace(drafts=base.drafts[:, :fewer], source=base.source[:, :fewer])
    part, _ = grow.naive(smaller, played.state, played.table, ints(0, 1, 2), fewer)
    for b, n in enumerate(part.num_drafts.tolist()):
        assert part.drafts[b, :n].tolist() == whole.drafts[b, :n].tolist()


@pytest.mark.parametrize("name", LEARN)
def test_the_later_of_two_is_kept(name: str) -> None:
    """Rows 0 and 1 end in the same two tokens; row 2 in one of them; a NaN is left out."""
    V, state = 30, empty(3, 30)
    texts = [[4, 5, 0, 0], [4, 5, 0, 0], [6, 5, 0, 0]]
    table = make_table(V, tokens=texts, num_tokens=2, block_table=[[0]] * 3)
    rows = ints(0, 1, 2)
    none = chain([], [], [], k=0, match=[0, 0, 0])
    batch = lay_out(table, rows, none)
    logits = torch.zeros(3, V)
    logits[0, 1], logits[1, 2], logits[2, 3] = 9.0, 9.0, 9.0
    targets = logits.argmax(-1).int()
    LEARN[name](state, logits, table, batch, none, None, verify.naive(targets, batch, table, none))
    own, pair = place(ANY, 5, 0), place(4, 5, 0)
    assert int(state.entries[own.row, 0]) & (1 << ID_BITS) - 1 == 3
    assert int(state.entries[pair.row, 0]) & (1 << ID_BITS) - 1 == 2
    assert (int(state.tags[own.row]), int(state.tags[pair.row])) == (own.tag, pair.tag)
    probability = math.exp(-(int(state.entries[own.row, 0]) >> ID_BITS) / CODES)
    assert probability == pytest.approx(float(logits[2].softmax(0)[3]), rel=0.04)
    before = state.entries.clone()
    verdict = verify.naive(targets, batch, table, none)
    LEARN[name](state, torch.full((3, V), math.nan), table, batch, none, None, verdict)
    assert torch.equal(state.entries, before)


def test_entries_that_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens and of pairs, by their hashes: the later one's stays, of the same token the pair's."""
    monkeypatch.setattr(recycled, "ROWS", 4)
    monkeypatch.setattr(recycled, "_ROWS", recycled.tl.constexpr(4))
    rng, V, n = random.Random(2), 12, 9
    texts = [[rng.randrange(V), rng.randrange(V), 0] for _ in range(n)]
    table = make_table(V, tokens=texts, num_tokens=2, block_table=[[0]] * n)
    none = chain(*[[]] * n, k=0, match=[0] * n)
    batch = lay_out(table, torch.arange(n, dtype=torch.int32), none)
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(1))
    kept = []
    for name in ("naive", "kernel"):
        state = empty(n, V)
        state.entries.fill_(-1)
        LEARN[name](state, logits, table, batch, none, None, None)
        kept.append(state)
    assert torch.equal(kept[0].tags, kept[1].tags)
    assert torch.equal(kept[0].entries & (1 << ID_BITS) - 1, kept[1].entries & (1 << ID_BITS) - 1)
    assert bool(kept[0].tags.all())


@pytest.mark.parametrize("name", GROW)
def test_all_that_is_left_of_a_hot_request_is_certain(name: str) -> None:
    """Where all weights of an entry that leaves nothing out are too small for a number, and nothing was seen
    to fail, no more is expected than there can be."""
    table, state = make_table(1, tokens=[[0, 0]], num_tokens=2, temperature=100.0, max_len=40), empty(1, 1)
    say(state, (0, 0), TOKEN, {0: 1.0})
    for seed in range(40):
        table.seed.fill_(seed)
        _, marks = GROW[name](chain([], k=2, match=[0]), state, table, ints(0), 2)
        assert float(marks.expected[0].max()) <= grow.TRUST[TOKEN] * 1.001


@pytest.mark.parametrize("name", GROW)
def test_a_chain_of_another_number_than_it_may_be(name: str) -> None:
    """Of a drafter of the user's: fewer than none are none, more than there is room for are cut."""
    table, state = make_table(20, tokens=[[7, 7]] * 2, num_tokens=2), empty(2, 20)
    base = chain([3, 4], [3, 4], k=2, match=[2, 2])._replace(num_drafts=ints(-1, 9))
    tree, _ = GROW[name](base, state, table, ints(0, 1), 2)
    assert tree.num_drafts.tolist() == [0, 2]


@pytest.mark.parametrize("name", LEARN)
def test_many_tokens_of_one_entry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a program of the kernel compares at once: 40 rows that all end in token 5."""
    monkeypatch.setattr(learn, "BLOCK", learn.tl.constexpr(16))
    V, n = 9, 40
    state, table = empty(n, V), make_table(V, tokens=[[5, 0]] * n, num_tokens=1, block_table=[[0]] * n)
    none = chain(*[[]] * n, k=0, match=[0] * n)
    batch = lay_out(table, torch.arange(n, dtype=torch.int32), none)
    logits = torch.zeros(n, V)
    logits[torch.arange(n), torch.arange(n) % V] = 9.0
    targets = logits.argmax(-1).int()
    verdict = verify.naive(targets, batch, table, none)
    table.num_tokens.fill_(1)
    LEARN[name](state, logits, table, batch, none, None, verdict)
    assert int(state.entries[place(ANY, 5, 0).row, 0]) & (1 << ID_BITS) - 1 == (n - 1) % V
    assert int((state.tags != 0).sum()) == 2


@pytest.mark.parametrize("name", LEARN)
@pytest.mark.parametrize("others", [False, True])
def test_the_record(name: str, others: bool) -> None:
    """Node 1 is right, its child 3 is, 2 and 4 are not; 5 follows 2, which was wrong, and says nothing."""
    V, k, state = 30, 5, empty(1, 30)
    table = make_table(V, tokens=[[7] * 10], num_tokens=1, block_table=[[0]])
    tree = chain([10, 11, 12, 13, 14], k=k, match=[1])._replace(
        parents=ints_2d([[0, 0, 1, 1, 2]]), drafter=ints(NOBODY if others else 0)
    )
    batch = lay_out(table, ints(0), tree)
    marks = Marks(ints_2d([[PAIR, TOKEN, PAIR, TOKEN, TOKEN]]), torch.tensor([[0.5, 0.25, 0.75, 0.125, 0.9]]))
    targets = ints(10, 12, 0, 1, 0, 0)
    logits = torch.nn.functional.one_hot(targets.long(), V).float()
    state.record[0] = torch.tensor([[1.0, 2.0], [0.0, 0.0], [4.0, 8.0], [2.0, 1.0]])
    LEARN[name](state, logits, table, batch, tree, marks, verify.naive(targets, batch, table, tree))
    d = learn.DECAY
    expected = [[d, 2 * d], [0, 0], [4 * d, 8 * d + 0.25 + 0.125], [2 * d + 2, d + 0.5 + 0.75]]
    if others:
        expected = [[1.0, 2.0], [0.0, 0.0], [4.0, 8.0], [2.0, 1.0]]
    torch.testing.assert_close(state.record[0], torch.tensor(expected))
    before = {10: 7, 11: 7, 12: 10, 13: 10, 14: 11}
    for token, above in before.items():
        assert int(state.tags[place(above, token, 0).row]) == place(above, token, 0).tag
