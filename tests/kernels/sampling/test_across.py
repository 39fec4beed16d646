"""The next token from what ranks know of their parts of the vocabulary is that of the whole."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from nanospec.kernels import NAN_TOKEN
from nanospec.kernels.batch import Batch
from nanospec.kernels.launch import forced
from nanospec.kernels.sampling import across, sample
from nanospec.kernels.table import Table
from tests.kernels.batches import S, make_batch, make_table, random_logits, real

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage


def split(logits: Tensor, ranks: int) -> list[tuple[Tensor, int, int]]:
    """Each rank's part, filled up with what must not count, where it begins, and how much of it counts."""
    V = logits.shape[1]
    width = -(-V // ranks)
    filled = torch.cat([logits, torch.full((len(logits), ranks * width - V), 99.0, dtype=logits.dtype)], 1)
    return [(part, i * width, min(width, V - i * width)) for i, part in enumerate(filled.split(width, 1))]


def drawn(logits: Tensor, ranks: int, table: Table, batch: Batch) -> Tensor:
    parts = split(logits, ranks)
    found = [across.best(part.contiguous(), first, count, table, batch) for part, first, count in parts]
    return across.choose(torch.stack(found))


def random_batch(rng: random.Random, V: int) -> tuple[Table, Batch]:
    """Rows with and without temperature, one of them padding."""
    temperatures = [rng.choice([0.0, 0.3, 1.0, 2.5]) for _ in range(S)]
    seeds = [rng.randrange(-(1 << 63), 1 << 63) for _ in range(S)]
    table = make_table(V, temperature=temperatures, seed=seeds)
    rows = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    lengths = [0 if row < 0 else rng.choice((1, 2, 4)) for row in rows.tolist()]
    return table, make_batch(lengths, [7, 8, 1, 1000], rng.random() < 0.5, rows=rows)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy about NaN
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("V", [7, 64, 4999])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_is_what_is_drawn_from_all_logits(ranks: int, V: int, dtype: torch.dtype) -> None:
    """Flat, peaked, full of ties, with -inf; NaN and infinity anywhere; two chunks of the kernel and more."""
    rng = random.Random(f"{ranks}{V}{dtype}")
    nan = 0
    for turn in range(3):
        table, batch = random_batch(rng, V)
        logits = random_logits(rng, batch.num_tokens, V, dtype)
        for t in range(turn, len(logits), 4):
            logits[t, rng.randrange(V)] = rng.choice([float("nan"), float("inf")])
        logits[rng.randrange(len(logits))] = float("-inf")
        expected, index = sample.naive(logits, table, batch), real(batch)
        nan += int((expected[index] == NAN_TOKEN).sum())
        assert torch.equal(drawn(logits, ranks, table, batch)[index], expected[index])
        if turn == 0 or V < 100:
            with forced("triton"):
                found = drawn(logits, ranks, table, batch)
            assert torch.equal(found[index], expected[index])
    assert nan


def test_of_equal_values_the_lowest_id_wins_across_ranks() -> None:
    logits = torch.zeros(1, 12)
    logits[0, [5, 7, 11]] = 3.0
    table, batch = make_table(12), make_batch([1])
    for backend in ("naive", "triton"):
        with forced(backend):
            assert [drawn(logits, ranks, table, batch).item() for ranks in (1, 2, 3, 4, 6)] == [5] * 5


def test_a_token_depends_neither_on_the_number_of_ranks_nor_on_who_is_beside_it() -> None:
    rng = random.Random(5)
    table, batch = make_table(300, temperature=1.0), make_batch([4, 4], [9, 40])
    logits = random_logits(rng, 8, 300, torch.float32)
    whole, alone = drawn(logits, 2, table, batch), make_batch([4], [9])
    assert torch.equal(drawn(logits, 5, table, batch), whole)
    assert torch.equal(drawn(logits[:4], 3, table, alone), whole[:4])
