"""Batches of request rows' texts: tokens, positions and slots in every layout."""

from __future__ import annotations

import pytest
import torch

from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.table import Table

BLOCK_SIZE, MAX_CONTEXT = 16, 100
# (request row, first token, number of tokens): several blocks, a block boundary, none, up to the end.
CHUNKS = [Chunk(2, 0, 40), Chunk(0, 15, 2), Chunk(3, 7, 0), Chunk(1, 95, 5)]


def random_table() -> Table:
    table = Table.empty(4, MAX_CONTEXT, BLOCK_SIZE, 50, "cpu")
    table.tokens.random_(50)
    table.block_table.copy_(torch.randperm(28).view(4, 7))
    return table


@pytest.mark.parametrize("layout", ["chunks", "grid", "packed"])
def test_batch_of_texts(layout: str) -> None:
    table = random_table()
    if layout == "chunks":
        batch = Batch.from_chunks(table, CHUNKS)
    else:
        rows, first, count = torch.tensor(CHUNKS, dtype=torch.int32).T.contiguous()
        batch = Batch.from_grid(table, rows, first, count, 41)
        batch = batch if layout == "grid" else batch.to_packed()
    assert (batch.num_rows, batch.prefill, batch.padded) == (4, layout == "chunks", layout == "grid")
    assert batch.max_q_len == (41 if layout == "grid" else 40)
    assert batch.max_kv_len == MAX_CONTEXT
    assert batch.num_tokens == (4 * 41 if layout == "grid" else 47)
    scored = []
    for b, (row, start, n) in enumerate(CHUNKS):
        assert batch.rows[b] == (row if n or layout == "chunks" else -1)
        assert (batch.q_len[b], batch.base_len[b]) == (n, start)
        for i in range(n):
            t, j = int(batch.q_start[b]) + i, start + i
            scored.append(t)
            assert (batch.input_ids[t], batch.positions[t]) == (table.tokens[row, j], j)
            assert batch.slots[t] == table.block_table[row, j // BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE
    assert (batch.slots >= 0).nonzero().squeeze(1).tolist() == scored
    padding = batch.slots < 0
    assert not batch.positions[padding].any()
    for name in ("rows", "input_ids", "positions", "slots", "block_table", "q_start", "q_len", "base_len"):
        assert getattr(batch, name).dtype == torch.int32, name
        assert getattr(batch, name).is_contiguous(), name


def test_padding_rows() -> None:
    one, table = torch.ones(3, dtype=torch.int32), random_table()
    batch = Batch.from_grid(table, torch.tensor([-1, 2, -1], dtype=torch.int32), one, one, 2)
    assert batch.rows.tolist() == [-1, 2, -1]
    assert batch.q_len.tolist() == [0, 1, 0]
    assert (batch.slots >= 0).tolist() == [False, False, True, False, False, False]
    packed = batch.to_packed()
    assert (packed.num_tokens, packed.max_q_len, packed.max_kv_len) == (1, 1, 2)
