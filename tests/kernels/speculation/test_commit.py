"""Commit against a token-by-token reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels import dispatch
from nanospec.kernels.speculation import commit, verify
from nanospec.kernels.speculation.commit import LENGTH, NAN, RUNNING, STOPPED
from tests.kernels.batches import make_rows

S, V, CAPACITY = 5, 12, 20

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage


@dataclass
class Rig:
    """Random state of S request rows and a step's result for some of them."""

    tokens: Tensor
    num_tokens: Tensor
    output_counts: Tensor
    finished: Tensor
    rows: Tensor
    emitted: Tensor
    num_emitted: Tensor
    max_len: Tensor
    stop_ids: Tensor

    def run(self, implementation: object) -> Tensor:
        return implementation(*self.__dict__.values())  # type: ignore[operator]

    def copy(self) -> Rig:
        return Rig(*(tensor.clone() for tensor in self.__dict__.values()))


def make(seed: int, width: int = 5) -> Rig:
    rng = random.Random(seed)
    i32 = torch.int32
    lengths = [rng.randint(1, CAPACITY) for _ in range(S)]
    rows = rng.sample([*range(S), -1, -1], S + 2)
    counts = [rng.randint(0, width) for _ in rows]
    emitted = torch.tensor([[rng.randint(0, V - 1) for _ in range(width)] for _ in rows], dtype=i32)
    for b, n in enumerate(counts):
        if n and rng.random() < 0.2:
            emitted[b, n - 1] = -1  # NaN, which can only come last
        emitted[b, n:] = -1
    return Rig(
        tokens=torch.full((S, CAPACITY), 99, dtype=i32),
        num_tokens=torch.tensor(lengths, dtype=i32),
        output_counts=torch.randint(0, 3, (S, V), dtype=i32),
        finished=torch.tensor([rng.choice([0, 0, 0, 1, 2]) for _ in range(S)], dtype=torch.int8),
        rows=torch.tensor(rows, dtype=i32),
        emitted=emitted,
        num_emitted=torch.tensor(counts, dtype=i32),
        max_len=torch.tensor([min(n + rng.randint(-1, 8), CAPACITY) for n in lengths], dtype=i32),
        stop_ids=torch.tensor([rng.choice([[-1, -1], [3, -1], [0, 7]]) for _ in range(S)], dtype=i32),
    )


def reference(rig: Rig) -> Tensor:
    kept = torch.zeros(len(rig.rows), dtype=torch.int32)
    for b, s in enumerate(rig.rows.tolist()):
        if s < 0 or rig.num_emitted[b] == 0 or rig.finished[s] != RUNNING:
            continue
        code = RUNNING
        for token in rig.emitted[b, : int(rig.num_emitted[b])].tolist():
            n = int(rig.num_tokens[s])
            if n >= rig.max_len[s]:
                code = LENGTH
                break
            if token == -1:
                code = NAN
                break
            rig.tokens[s, n] = token
            rig.output_counts[s, token] += 1
            rig.num_tokens[s] += 1
            kept[b] += 1
            if token in rig.stop_ids[s].tolist():
                code = STOPPED
                break
        if code == RUNNING and rig.num_tokens[s] >= rig.max_len[s]:
            code = LENGTH
        rig.finished[s] = code
    return kept


def check(rig: Rig, implementation: object) -> None:
    expected = rig.copy()
    expected_kept = reference(expected)
    kept = rig.run(implementation)
    assert kept.dtype == torch.int32
    assert kept.tolist() == expected_kept.tolist()
    for name in rig.__dict__:
        assert torch.equal(getattr(rig, name), getattr(expected, name)), name


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 9))
def test_naive_matches_reference(seed: int, width: int) -> None:
    check(make(seed, width), commit.naive)


def one_row(emitted: list[int], length: int, max_len: int, stop: list[int]) -> Rig:
    i32 = torch.int32
    return Rig(
        torch.full((1, CAPACITY), 99, dtype=i32),
        torch.tensor([length], dtype=i32),
        torch.zeros(1, V, dtype=i32),
        torch.zeros(1, dtype=torch.int8),
        torch.tensor([0], dtype=i32),
        torch.tensor([emitted], dtype=i32),
        torch.tensor([len(emitted)], dtype=i32),
        torch.tensor([max_len], dtype=i32),
        torch.tensor([stop], dtype=i32),
    )


CASES = {
    "plain": ([1, 2, 1], 4, 20, [-1], [1, 2, 1], RUNNING),
    "stop inside the accepted run": ([1, 7, 2], 4, 20, [7], [1, 7], STOPPED),
    "stop token 0 is not padding": ([1, 0, 2], 4, 20, [0], [1, 0], STOPPED),
    "two stops, the first counts": ([5, 7, 5], 4, 20, [7, 5], [5], STOPPED),
    "limit inside the run": ([1, 2, 3], 4, 6, [-1], [1, 2], LENGTH),
    "limit at the end of the run": ([1, 2], 4, 6, [-1], [1, 2], LENGTH),
    "stop at the limit is a stop": ([1, 2], 4, 6, [2], [1, 2], STOPPED),
    "stop behind the limit is cut": ([1, 2, 3], 4, 6, [3], [1, 2], LENGTH),
    "no room at all": ([1, 2], 6, 6, [-1], [], LENGTH),
    "NaN at once": ([-1], 4, 20, [-1], [], NAN),
    "NaN after accepted drafts": ([1, 2, -1], 4, 20, [-1], [1, 2], NAN),
    "NaN behind the limit": ([1, 2, -1], 4, 6, [-1], [1, 2], LENGTH),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_where_a_run_ends(case: str) -> None:
    emitted, length, max_len, stop, kept, code = CASES[case]
    rig = one_row(emitted, length, max_len, stop)
    assert rig.run(commit.naive).tolist() == [len(kept)]
    assert rig.tokens[0, length:].tolist() == kept + [99] * (CAPACITY - length - len(kept))
    assert int(rig.num_tokens) == length + len(kept)
    assert int(rig.finished) == code
    assert rig.output_counts[0].tolist() == [kept.count(v) for v in range(V)]


def test_finished_rows_are_left_alone() -> None:
    rig = one_row([1, 2], 4, 20, [-1])
    rig.finished[0] = STOPPED
    before = rig.copy()
    assert rig.run(commit.naive).tolist() == [0]
    assert torch.equal(rig.tokens, before.tokens)
    assert int(rig.num_tokens) == 4


# The kernels, in the interpreter.


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 5, 9]))
def test_kernel_matches_reference(seed: int, width: int) -> None:
    check(make(seed, width), commit.launch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_ends_a_run_where_naive_does(case: str) -> None:
    emitted, length, max_len, stop, *_ = CASES[case]
    check(one_row(emitted, length, max_len, stop), commit.launch)


@pytest.mark.parametrize("backend", ["naive", "triton"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_verify_and_commit_is_both(tree: bool, backend: dispatch.Backend) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        rig = make(seed)
        B, Q = len(rig.rows), 5
        q_len = [rng.randint(0, Q) if s >= 0 else 0 for s in rig.rows.tolist()]
        batch = make_rows(q_len, [0] * B, uniform=True)
        T, Q = batch.num_tokens, batch.max_q_len
        targets, ids = torch.randint(0, 2, (2, T), dtype=torch.int32)
        parents = torch.tensor([max(t % Q - 1 - t % 2, 0) for t in range(T)], dtype=torch.int32)
        tree_parents = parents if tree else None
        verdict = verify.naive(targets, ids, batch, tree_parents)
        expected = rig.copy()
        expected.emitted, expected.num_emitted = verdict.emitted, verdict.num_emitted
        expected_kept = expected.run(commit.naive)
        with dispatch.forced(backend):
            actual, kept = commit.verify_and_commit(
                targets, ids, batch, tree_parents, rig.tokens, rig.num_tokens, rig.output_counts,
                rig.finished, rig.rows, rig.max_len, rig.stop_ids,
            )  # fmt: skip
        assert len(kept) == B
        assert torch.equal(kept, expected_kept)
        for ours, theirs in zip(actual, verdict):
            assert torch.equal(ours, theirs)
        for name in ("tokens", "num_tokens", "output_counts", "finished"):
            assert torch.equal(getattr(rig, name), getattr(expected, name)), name
