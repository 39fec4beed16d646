"""Verification: comparison with a plain loop over drafts that appends token by token."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanospec.kernels import FROM_TARGET, LENGTH, MAX_STOP_IDS, NAN, RUNNING, STOPPED
from nanospec.kernels.speculation import report, verify
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.speculation.report import RowReport
from nanospec.kernels.table import Table
from tests.kernels.batches import compiled, emitted, ints, make_batch, make_table

S, V, CAPACITY = 6, 12, 20

pytestmark = pytest.mark.usefixtures("poison")

IMPLEMENTATIONS = {"naive": verify.naive, **compiled(native=verify.native), "kernel": verify.launch}


def walk(x: list[int], ids: list[int], parent: list[int]) -> list[int]:
    """Return the accepted path: from each node to its first child that equals the node's target."""
    path = [0]
    while True:
        node = path[-1]
        for child in range(1, len(ids)):
            if parent[child] == node and ids[child] == x[node]:
                path.append(child)
                break
        else:
            return path


def append(table: Table, s: int, run: list[int]) -> int:
    """Commit a run of tokens to request row s one by one; return the number kept."""
    if s < 0 or not run or table.finished[s] != RUNNING:
        return 0
    code, kept = RUNNING, 0
    for token in run:
        n = int(table.num_tokens[s])
        if n >= table.max_len[s]:
            code = LENGTH
            break
        if token == -1:
            code = NAN
            break
        table.tokens[s, n] = token
        table.output_counts[s, token] += 1
        table.num_tokens[s] += 1
        kept += 1
        if token in table.stop_ids[s].tolist():
            code = STOPPED
            break
    if code == RUNNING and table.num_tokens[s] >= table.max_len[s]:
        code = LENGTH
    table.finished[s] = code
    return kept


def random_table(rng: random.Random) -> Table:
    """Return requests in all states, some close to or at their limit."""
    lengths = [rng.randint(1, CAPACITY) for _ in range(S)]
    rest, stops = [-1] * (MAX_STOP_IDS - 2), [[-1, -1], [3, -1], [0, 7], [7, 2]]
    return make_table(
        V, tokens=torch.full((S, CAPACITY), 99), num_tokens=lengths,
        max_len=[min(n + rng.randint(-1, 8), CAPACITY) for n in lengths],
        finished=[rng.choice([0, 0, 0, 1, 2]) for _ in range(S)],
        stop_ids=[[first, *rest, last] for first, last in rng.choices(stops, k=S)],
        output_counts=[[rng.randrange(3) for _ in range(V)] for _ in range(S)],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=70)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 1 << 30), st.booleans(), st.booleans()
)
@example([64, 0, 63, 1], 3, False, True)
@example([64, 0, 63, 1], 3, True, True)
def test_matches_reference(name: str, q_len: list[int], seed: int, tree: bool, uniform: bool) -> None:
    """Random tokens are from a small set, so that drafts are accepted."""
    rng = random.Random(seed)
    batch = make_batch(q_len, uniform=uniform, tree=tree)
    rows = [s if n else -1 for s, n in zip(rng.sample([*range(S), -1, -1], len(q_len)), q_len)]
    kinds = rng.choice([[0, 1, 2], [0, 0, 1, 1, 2, 3, 7, 8]])
    T = batch.num_tokens
    ids, targets = (ints(*rng.choices(kinds, k=T)) for _ in range(2))
    targets[torch.rand(T, generator=torch.Generator().manual_seed(seed)) < 0.1] = -1  # NaN matches no draft
    for start, n in zip(batch.q_start.tolist(), q_len):
        for i in range(1, n):
            if not tree and targets[start + i - 1] >= 0 and rng.random() < 0.7:
                ids[start + i] = targets[start + i - 1]  # long accepted runs
    batch = replace(batch, rows=ints(*rows), input_ids=ids)
    table = random_table(rng)
    expected = Table._make(x.clone() if isinstance(x, Tensor) else x for x in table)
    B, k = len(q_len), batch.max_q_len - 1 + rng.choice([0, 0, 3])
    columns = (B, k), (B,), (B, k), (B,), (B,)
    proposal = Proposal(*(torch.randint(99, shape, dtype=torch.int32) for shape in columns))
    verdict = IMPLEMENTATIONS[name](targets, batch, table, proposal)
    assert all(part.dtype == torch.int32 for part in verdict)
    assert verdict.path.shape == emitted(verdict).shape == (B, batch.max_q_len)
    reports = report.decode(verdict.report.tolist())
    for b, n in enumerate(q_len):
        own = slice(int(batch.q_start[b]), int(batch.q_start[b]) + n)
        parents = list(range(-1, n - 1)) if batch.parents is None else batch.parents[own].tolist()
        path = walk(targets[own].tolist(), ids[own].tolist(), parents) if n else []
        run = [int(targets[own][p]) for p in path]
        rest = batch.max_q_len - len(path)
        assert int(verdict.num_emitted[b]) == len(path)
        assert verdict.path[b].tolist() == path + [0] * rest
        assert emitted(verdict)[b].tolist() == run + [-1] * rest
        kept = append(expected, rows[b], run)
        source = [int(proposal.source[b, place - 1]) for place in path[1:]] + [FROM_TARGET]
        by, match_len = int(proposal.drafter[b]), int(proposal.match_len[b])
        code = int(expected.finished[rows[b]]) if rows[b] >= 0 else RUNNING
        drafted, accepted = max(n - 1, 0), max(len(path) - 1, 0)
        row_report = RowReport(run[:kept], drafted, accepted, by, match_len, code, source[:kept])
        assert reports[b] == row_report
    for column, actual in table._asdict().items():
        assert not isinstance(actual, Tensor) or torch.equal(actual, getattr(expected, column)), column
