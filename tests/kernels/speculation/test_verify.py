"""Verification walks the drafts as a plain loop does."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec.kernels.speculation import verify
from tests.kernels.batches import make_rows

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage


def walk(x: list[int], ids: list[int], parent: list[int]) -> list[int]:
    """Places visited: from each node to its first child that carries the node's target."""
    path = [0]
    while True:
        node = path[-1]
        for child in range(1, len(ids)):
            if parent[child] == node and ids[child] == x[node]:
                path.append(child)
                break
        else:
            return path


def check(q_len: list[int], seed: int, tree: bool, uniform: bool, implementation: object) -> None:
    """Random tokens of a tiny vocabulary (so that drafts are accepted) against the walk."""
    rng = random.Random(seed)
    batch = make_rows(q_len, [0] * len(q_len), uniform)
    T = batch.num_tokens
    ids = torch.tensor([rng.randrange(3) for _ in range(T)], dtype=torch.int32)
    # A target of -1 marks NaN and never equals a draft.
    x = torch.tensor([rng.choice([0, 0, 1, 1, 2, -1]) for _ in range(T)], dtype=torch.int32)
    parents = torch.full((T,), 77, dtype=torch.int32)
    for start, n in zip(batch.q_start.tolist(), q_len):
        for i in range(n):
            parents[start + i] = rng.randrange(i) if tree and i else i - 1
            if not tree and i and rng.random() < 0.6:
                ids[start + i] = x[start + i - 1]  # long accepted runs
    verdict = implementation(x, ids, batch, parents if tree else None)  # type: ignore[operator]
    for part in verdict:
        assert part.dtype == torch.int32
    assert verdict.emitted.shape == verdict.path.shape == (len(q_len), batch.max_q_len)
    for b, n in enumerate(q_len):
        own = slice(int(batch.q_start[b]), int(batch.q_start[b]) + n)
        path = walk(x[own].tolist(), ids[own].tolist(), parents[own].tolist()) if n else []
        rest = batch.max_q_len - len(path)
        assert int(verdict.num_emitted[b]) == len(path)
        assert verdict.path[b].tolist() == path + [0] * rest
        assert verdict.emitted[b].tolist() == [int(x[own][p]) for p in path] + [-1] * rest


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(0, 1 << 30), st.booleans(), st.booleans())
def test_naive_matches_walk(q_len: list[int], seed: int, tree: bool, uniform: bool) -> None:
    check(q_len, seed, tree, uniform, verify.naive)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_all_accepted_emits_the_bonus(k: int) -> None:
    x = torch.arange(1, k + 2, dtype=torch.int32)
    verdict = verify.naive(x, x - 1, make_rows([k + 1], [0], uniform=True))
    assert verdict.emitted.tolist() == [list(range(1, k + 2))]
    assert int(verdict.num_emitted) == k + 1


def test_match_after_a_mismatch_is_not_accepted() -> None:
    ids = torch.tensor([0, 1, 9, 3], dtype=torch.int32)
    x = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    verdict = verify.naive(x, ids, make_rows([4], [0], uniform=True))
    assert verdict.emitted.tolist() == [[1, 2, -1, -1]]


# The kernel, in the interpreter.


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 1 << 30), st.booleans(), st.booleans())
def test_kernel_matches_walk(q_len: list[int], seed: int, tree: bool, uniform: bool) -> None:
    check(q_len, seed, tree, uniform, verify.launch)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_kernel_walks_64_nodes(tree: bool) -> None:
    check([64, 0, 63, 1], 3, tree, True, verify.launch)


@pytest.mark.parametrize("implementation", [verify.naive, verify.launch], ids=["naive", "kernel"])
def test_parents_in_a_circle_end(implementation: object) -> None:
    """Malformed trees give nonsense, but neither hang nor write beyond their row."""
    same = torch.zeros(4, dtype=torch.int32)
    parents = torch.tensor([0, 2, 1, 1], dtype=torch.int32)
    parents[1] = 1
    for first in (0, 1):
        parents[2] = first
        verdict = implementation(same, same, make_rows([4], [0], True), parents)  # type: ignore[operator]
        assert 1 <= int(verdict.num_emitted) <= 4
