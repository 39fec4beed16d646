"""Guess a tree from what the target said before (`recycled.py`), on a chain that somebody else guessed.

    base     the chain of each row; no drafts where nobody has any
    tree     a Proposal with `parents` and `chances`: the nodes likeliest to be right, best first. Its drafter
             is 0, or if a node is of the chain the chain's drafter + 1
    marks    of each node: its kind, and the chance expected of it once its parent is right, which what
             became of earlier ones has not corrected yet

A tree begins with the last token of the text alone and takes, one by one, the candidate with the largest
chance that it and all before it are right. Candidates are the next token of the chain, and the tokens of the
entry of each node: that of the pair it makes with its parent, else that of its token. So the first n nodes
are the best tree of n nodes, and a chain that recycled tokens agree with takes no node twice. Of equal
chances the chain's comes first, then those of earlier nodes, then the order of the entry.

The chance of a candidate, its parent being right:
- of the chain, n the length of the match that it was copied from: n / (n + 2) for its first token, (n + 1) /
  (n + 2) for the others; 1 / 2 without a match, where a model guessed. Of a request that samples, exp(-E (1 -
  p) / p) for that p: the target draws argmax(p / E), and the noise E of the token is known
  (`sampling/noise.py`);
- of an entry, TRUST in its kind * p, its share of what was said; of a request that samples, p E^-T for p, in
  proportion to the sum of all, where tokens that the entry lacks have E = 1;
- times what became of the row's guesses of that kind: (right + PRIOR) / (expected + PRIOR); at most MOST.
  `bench/recycle.py` has tried other numbers.

Kernel: one program per row; a turn takes a candidate, and looks the entries of the new node up. Limit: k <=
63.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codes import GUESSED, MAX_DRAFTS
from ..codes import NOBODY as NO_DRAFTER
from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..native.call import call, proposal_words
from ..sampling import noise
from ..table import Table
from . import ngram, recycled
from .ngram import wanted_drafts
from .proposal import Proposal
from .recycled import (
    ANY,
    CODES,
    FIRST,
    FURTHER,
    ID_BITS,
    KINDS,
    NO_TOKEN,
    PAIR,
    TOKEN,
    WIDTH,
    Recycled,
    place_of,
)

TRUST = {TOKEN: 0.5, PAIR: 0.8}
PRIOR = 2.0
MOST = 0.98

_GUESSED, _NO_DRAFTER, _NO_TOKEN = tl.constexpr(GUESSED), tl.constexpr(NO_DRAFTER), tl.constexpr(NO_TOKEN)
_FIRST, _FURTHER, _TOKEN, _PAIR = (tl.constexpr(kind) for kind in (FIRST, FURTHER, TOKEN, PAIR))
_KINDS, _WIDTH, _CODES = tl.constexpr(KINDS), tl.constexpr(WIDTH), tl.constexpr(CODES)
_ANY, _ID_BITS, _IDS = tl.constexpr(ANY), tl.constexpr(ID_BITS), tl.constexpr((1 << ID_BITS) - 1)
LOG_TOKEN, LOG_PAIR = tl.constexpr(math.log(TRUST[TOKEN])), tl.constexpr(math.log(TRUST[PAIR]))
LOG_MOST, _PRIOR = tl.constexpr(math.log(MOST)), tl.constexpr(PRIOR)
NEVER = tl.constexpr(-1e30)


class Marks(NamedTuple):
    """[B, K] int32, a kind of `recycled.py`, and [B, K] float32: see the module docstring."""

    kind: Tensor
    expected: Tensor


def grow(base: Proposal, state: Recycled, table: Table, rows: Tensor, k: int) -> tuple[Proposal, Marks]:
    """Up to `k` drafts for each of `rows` [B] int32, request rows or -1, as trees."""
    if use_triton(rows):
        return launch(base, state, table, rows, k)
    return (native if use_native(rows, torch.int32) else naive)(base, state, table, rows, k)


def naive(base: Proposal, state: Recycled, table: Table, rows: Tensor, k: int) -> tuple[Proposal, Marks]:
    limits, (tree, marks) = ngram.allowed(table, k), _empty(base, rows, k)
    for tensor, value in zip((*_columns(tree, marks), tree.num_drafts, tree.drafter), _NOTHING, strict=True):
        tensor.fill_(value)
    for b, s in enumerate(rows.tolist()):
        if s < 0 or limits[s] <= 0:
            continue
        count, match = max(min(int(base.num_drafts[b]), limits[s]), 0), int(base.match_len[b])
        chain = [*zip(base.drafts[b, :count].tolist(), base.source[b, :count].tolist())]
        nodes = _Row(state, table, s).grow(chain, match, limits[s])
        for i, node in enumerate(nodes):
            for column, value in zip(_columns(tree, marks), node, strict=True):
                column[b, i] = value
        of_base = any(node[4] <= FURTHER for node in nodes)
        tree.num_drafts[b] = len(nodes)
        tree.drafter[b] = (int(base.drafter[b]) + 1 if of_base else 0) if nodes else NO_DRAFTER
    return tree, marks


def copied(n: int, i: int) -> float:
    """How likely token i of a chain is, those before it being right; n as above."""
    return 0.5 if n == 0 else (n if i == 0 else n + 1) / (n + 2)


class _Candidate(NamedTuple):
    """A guess behind the place `parent` of the tree; chance and expected are float32 logarithms."""

    chance: Tensor
    token: int
    parent: int
    kind: int
    expected: Tensor
    source: int = GUESSED


class _Row:
    """What is known of one row."""

    def __init__(self, state: Recycled, table: Table, s: int) -> None:
        self.state, self.salt, self.seed = state, int(state.salts[s]), int(table.seed[s])
        self.length, self.temperature = int(table.num_tokens[s]), table.temperature[s]
        text = table.tokens[s, max(self.length - 2, 0) : self.length].tolist()
        self.before, self.last = [NO_TOKEN, *text][-2:]
        right, expected = (state.record[s] + PRIOR).unbind(-1)
        self.ratio = (right / expected).log()

    def grow(self, chain: list[tuple[int, int]], match: int, wanted: int) -> list[tuple[float, ...]]:
        """What `_columns` hold of each node, for a chain of (token, source)."""
        nodes: list[tuple[float, ...]] = []
        tokens, depths, known = [self.last], [0], dict[tuple[int, int], int]()  # (parent, token) -> place
        candidates = self._entry(torch.tensor(0.0), 0, 0, self.before, self.last)
        at, of_chain = 0, self._of_chain(chain, match, 0, torch.tensor(0.0), 0)
        while len(nodes) < wanted and (candidates or of_chain):
            best = max(candidates, key=lambda c: float(c.chance), default=None)  # the first of equals
            if of_chain and not (best and best.chance > of_chain.chance):
                best = of_chain
            assert best is not None
            place = known.get((best.parent, best.token), 0)
            if not place:
                chance, expected = float(best.chance.exp()), float(best.expected.exp())
                nodes.append((best.token, best.source, best.parent, chance, best.kind, expected))
                place = known[best.parent, best.token] = len(nodes)
                tokens.append(best.token)
                depths.append(depths[best.parent] + 1)
                candidates += self._entry(best.chance, place, depths[place], tokens[best.parent], best.token)
            if best is of_chain:
                at += 1
                of_chain = self._of_chain(chain, match, at, best.chance, place)
            else:
                candidates.remove(best)
        return nodes

    def _of_chain(
        self, chain: list[tuple[int, int]], n: int, i: int, chance: Tensor, parent: int
    ) -> _Candidate | None:
        """The chain's token i, the chance of those before it given."""
        if i == len(chain):
            return None
        (token, source), kind = chain[i], FURTHER if i else FIRST
        p = torch.tensor([copied(n, i)])
        expected = p.log()
        if self.temperature > 0:
            expected = self._noise(i, [token]).exp() * (p - 1) / p
        return _Candidate(chance + self._raised(expected, kind)[0], token, parent, kind, expected[0], source)

    def _entry(self, chance: Tensor, place: int, depth: int, before: int, token: int) -> list[_Candidate]:
        """The tokens of the entry behind a place, its own chance given."""
        at = {PAIR: recycled.place(before, token, self.salt), TOKEN: recycled.place(ANY, token, self.salt)}
        kind = next((kind for kind in at if int(self.state.tags[at[kind].row]) == at[kind].tag), None)
        if kind is None:
            return []
        entry = self.state.entries[at[kind].row]
        entry = entry[entry >= 0]
        ids, said = entry & (1 << ID_BITS) - 1, -(entry >> ID_BITS).float() / CODES
        weight = said - self.temperature * self._noise(depth, ids.tolist()) if self.temperature > 0 else said
        rest = (1 - said.exp().sum()).clamp(min=0)
        expected = weight - ((weight.exp().sum() + rest) / (said.exp().sum() + rest)).log()
        expected = expected.clamp(max=0) + math.log(TRUST[kind])
        columns = zip(chance + self._raised(expected, kind), ids.tolist(), expected, strict=True)
        return [_Candidate(c, i, place, kind, x) for c, i, x in columns if c > -math.inf]

    def _raised(self, expected: Tensor, kind: int) -> Tensor:
        """What is expected, corrected by what became of earlier ones."""
        return (expected + self.ratio[kind]).clamp(max=math.log(MOST))

    def _noise(self, depth: int, tokens: list[int]) -> Tensor:
        """log E of tokens that the target may draw behind a node of this depth."""
        return noise.naive(self.seed, self.length + depth, torch.tensor(tokens))


_NOTHING = (0, GUESSED, 0, 0.0, 0, 0.0, 0, NO_DRAFTER)  # in place of a node, and of all of a row


def _columns(tree: Proposal, marks: Marks) -> tuple[Tensor, ...]:
    """What is told of each node, [B, K]: token, source, parent, chance, kind, expected."""
    assert tree.parents is not None
    assert tree.chances is not None
    return tree.drafts, tree.source, tree.parents, tree.chances, *marks


def _empty(base: Proposal, rows: Tensor, k: int) -> tuple[Proposal, Marks]:
    """Memory for trees, of which the length of the match is known."""
    B, new = len(rows), rows.new_empty
    if base.drafts.shape != (B, k) or not 0 < k <= MAX_DRAFTS:
        given = list(base.drafts.shape)
        raise ValueError(f"Trees of {k} drafts, which are 1 to {MAX_DRAFTS}, do not fit chains {given}.")
    chances, expected = (new(B, k, dtype=torch.float32) for _ in range(2))
    tree = Proposal(new(B, k), new(B), new(B, k), base.match_len, new(B), new(B, k), chances=chances)
    return tree, Marks(new(B, k), expected)


def native(base: Proposal, state: Recycled, table: Table, rows: Tensor, k: int) -> tuple[Proposal, Marks]:
    """By `native/recycle.cpp`."""
    tree, marks = _empty(base, rows, k)
    proposals = *proposal_words(tree), *proposal_words(base)
    call("nanospec_grow", *table, *proposals, *state, *marks, tree.chances, rows)
    return tree, marks


@triton.jit
def _entry(state, table, s, salt, ratios, place, depth, before, token, score, c, ids, chance, kind, expected):
    """The candidates [C], with those behind a place."""
    pair_row, pair_tag = place_of(before, token, salt)
    row, tag = place_of(tl.full([], _ANY, tl.int32), token, salt)
    by_pair = tl.load(state.tags + pair_row) == pair_tag
    by_token = tl.load(state.tags + row) == tag
    row = tl.where(by_pair, pair_row, row)
    i = c - place * _WIDTH
    mine = (i >= 0) & (i < _WIDTH) & (by_pair | by_token)
    entry = tl.load(state.entries + row * _WIDTH + i, mine, other=-1)
    mine = entry >= 0
    found = entry & _IDS
    said = (entry >> _ID_BITS).to(tl.float32) / -_CODES
    weight = said
    temperature = tl.load(table.temperature + s)
    if temperature > 0:
        position = tl.load(table.num_tokens + s) + depth
        weight = said - temperature * noise.block(tl.load(table.seed + s), position, found)
    before_mass = tl.sum(tl.where(mine, tl.exp(said), 0.0))
    mass = tl.sum(tl.where(mine, tl.exp(weight), 0.0))
    rest = tl.maximum(1.0 - before_mass, 0.0)
    own = tl.minimum(weight - tl.log((mass + rest) / (before_mass + rest)), 0.0)
    own += tl.where(by_pair, LOG_PAIR, LOG_TOKEN)
    own_kind = tl.where(by_pair, _PAIR, _TOKEN)
    ratio = tl.sum(tl.where(tl.arange(0, _KINDS) == own_kind, ratios, 0.0))
    raised = score + tl.minimum(own + ratio, LOG_MOST)
    ids, kind = tl.where(mine, found, ids), tl.where(mine, own_kind, kind)
    return ids, tl.where(mine, raised, chance), kind, tl.where(mine, own, expected)


@triton.jit
def _of_chain(base, table, s, b, i, count, ratios, score, k):
    """(token, chance, expected) of the chain's token i; NEVER behind its end."""
    n = tl.load(base.match_len + b).to(tl.float32)
    inside = i < count
    token = tl.load(base.drafts + b * k + i, inside, other=0)
    p = tl.where(n > 0, (n + tl.where(i > 0, 1.0, 0.0)) / (n + 2.0), 0.5)
    expected = tl.log(p)
    if tl.load(table.temperature + s) > 0:
        position = tl.load(table.num_tokens + s) + i
        expected = tl.exp(noise.block(tl.load(table.seed + s), position, token)) * (p - 1.0) / p
    own_kind = tl.where(i > 0, _FURTHER, _FIRST)
    ratio = tl.sum(tl.where(tl.arange(0, _KINDS) == own_kind, ratios, 0.0))
    return token, tl.where(inside, score + tl.minimum(expected + ratio, LOG_MOST), NEVER), expected


@triton.jit(do_not_specialize=["k"])
def _grow(base, state, table, rows, tree, marks, k, CANDIDATES: tl.constexpr, PLACES: tl.constexpr):
    b = tl.program_id(0)
    given = tl.load(rows + b)
    length, wanted = wanted_drafts(table, given, k)
    s = tl.maximum(given, 0)
    text = table.tokens + s.to(tl.int64) * table.max_context
    last = tl.load(text + tl.maximum(length - 1, 0))
    before = tl.load(text + tl.maximum(length - 2, 0), length > 1, other=_NO_TOKEN)
    salt = tl.load(state.salts + s)
    record = state.record + s * (2 * _KINDS) + tl.arange(0, _KINDS) * 2
    ratios = tl.log((tl.load(record) + _PRIOR) / (tl.load(record + 1) + _PRIOR))

    c, place = tl.arange(0, CANDIDATES), tl.arange(0, PLACES)
    ids, kind = tl.zeros([CANDIDATES], tl.int32), tl.zeros([CANDIDATES], tl.int32)
    chance, expected = tl.full([CANDIDATES], NEVER, tl.float32), tl.zeros([CANDIDATES], tl.float32)
    # By place, of which 0 is the last token of the text.
    tokens, depths = tl.where(place == 0, last, 0), tl.zeros([PLACES], tl.int32)
    above, sources = tl.full([PLACES], -1, tl.int32), tl.full([PLACES], _GUESSED, tl.int32)
    chances, expectations = tl.zeros([PLACES], tl.float32), tl.zeros([PLACES], tl.float32)
    kinds = tl.zeros([PLACES], tl.int32)
    made, at, end, of_base = wanted * 0, wanted * 0, wanted * 0, wanted * 0
    score = wanted * 0.0
    if wanted > 0:
        ids, chance, kind, expected = _entry(
            state, table, s, salt, ratios, made, made, before, last, score, c, ids, chance, kind, expected
        )
    count = tl.minimum(tl.load(base.num_drafts + b), wanted)
    next_token, next_score, next_expected = _of_chain(base, table, s, b, at, count, ratios, score, k)
    best = tl.maximum(tl.max(chance), next_score)
    while (made < wanted) & (best > NEVER):
        of_chain = next_score == best
        i = tl.min(tl.where(chance == best, c, CANDIDATES))
        token = tl.where(of_chain, next_token, tl.sum(tl.where(c == i, ids, 0)))
        parent = tl.where(of_chain, end, i // _WIDTH)
        known = tl.min(tl.where((above == parent) & (tokens == token), place, PLACES))
        if known == PLACES:
            made += 1
            known = made
            of_base |= of_chain.to(tl.int32)
            new = place == made
            depth = tl.sum(tl.where(place == parent, depths, 0)) + 1
            own_kind = tl.sum(tl.where(c == i, kind, 0))
            own_kind = tl.where(of_chain, tl.where(at > 0, _FURTHER, _FIRST), own_kind)
            own_expected = tl.where(of_chain, next_expected, tl.sum(tl.where(c == i, expected, 0.0)))
            source = tl.load(base.source + b * k + at, of_chain, other=_GUESSED)
            behind = tl.sum(tl.where(place == parent, tokens, 0))
            tokens, depths = tl.where(new, token, tokens), tl.where(new, depth, depths)
            above, sources = tl.where(new, parent, above), tl.where(new, source, sources)
            chances, expectations = tl.where(new, best, chances), tl.where(new, own_expected, expectations)
            kinds = tl.where(new, own_kind, kinds)
            if made < wanted:
                ids, chance, kind, expected = _entry(
                    state, table, s, salt, ratios, made, depth, behind, token, best,
                    c, ids, chance, kind, expected,
                )  # fmt: skip
        if of_chain:
            at += 1
            end = known
            next_token, next_score, next_expected = _of_chain(base, table, s, b, at, count, ratios, best, k)
        else:
            chance = tl.where(c == i, NEVER, chance)
        best = tl.maximum(tl.max(chance), next_score)

    node = (place > 0) & (place <= made)
    to, inside = b * k + place - 1, (place > 0) & (place <= k)
    tl.store(tree.drafts + to, tl.where(node, tokens, 0), inside)
    tl.store(tree.source + to, sources, inside)
    tl.store(tree.parents + to, tl.where(node, above, 0), inside)
    tl.store(tree.chances + to, tl.where(node, tl.exp(chances), 0.0), inside)
    tl.store(marks.kind + to, kinds, inside)
    tl.store(marks.expected + to, tl.where(node, tl.exp(expectations), 0.0), inside)
    tl.store(tree.num_drafts + b, made)
    drafter = tl.where(of_base > 0, tl.load(base.drafter + b) + 1, 0)
    tl.store(tree.drafter + b, tl.where(made > 0, drafter, _NO_DRAFTER))


def launch(base: Proposal, state: Recycled, table: Table, rows: Tensor, k: int) -> tuple[Proposal, Marks]:
    tree, marks = _empty(base, rows, k)
    if len(rows):
        _grow[(len(rows),)](
            base, state, table, rows, tree, marks, k,
            CANDIDATES=next_power_of_2(k * WIDTH), PLACES=next_power_of_2(k + 1),
            num_warps=1 if k <= 16 else 4,
        )  # fmt: skip
    return tree, marks
