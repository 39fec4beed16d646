"""Batches of request rows' texts: tokens, positions and slots. Host writes into rows."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.table import Table
from nanospec.kernels.transfer import write

BLOCK_SIZE, MAX_CONTEXT = 16, 100
# (request row, first token, number of tokens): several blocks, a block boundary, none, up to the end.
CHUNKS = [Chunk(2, 0, 40), Chunk(0, 15, 2), Chunk(3, 7, 0), Chunk(1, 95, 5)]


def test_batch_of_texts() -> None:
    table = Table.empty(4, MAX_CONTEXT, BLOCK_SIZE, 50, "cpu")
    table.tokens.random_(50)
    table.block_table.copy_(torch.randperm(28).view(4, 7))
    batch = Batch.from_chunks(table, CHUNKS)
    assert (batch.num_rows, batch.prefill, batch.max_q_len, batch.max_kv_len) == (4, True, 40, MAX_CONTEXT)
    scored = []
    for b, (row, start, n) in enumerate(CHUNKS):
        assert batch.rows[b] == (row if n else -1)
        assert (batch.q_len[b], batch.base_len[b]) == (n, start)
        for i in range(n):
            t, j = int(batch.q_start[b]) + i, start + i
            scored.append(t)
            assert (batch.input_ids[t], batch.positions[t]) == (table.tokens[row, j], j)
            assert batch.slots[t] == table.block_table[row, j // BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE
    assert scored == [*range(batch.num_tokens)] == [*range(47)]
    for tensor in vars(batch).values():
        assert not isinstance(tensor, Tensor) or (tensor.dtype, tensor.is_contiguous()) == (torch.int32, True)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.int64, [-(2**63), 2**63 - 1]), (torch.bool, [0, 1]), (torch.float32, [-0.0, 1e-42, math.inf])],
    ids=str,
)
def test_write_keeps_bits_and_repeats_last_value(dtype: torch.dtype, values: list[Any]) -> None:
    pages, n = torch.ones(3, 7).to(dtype), len(values)
    write(pages, 1, values)
    assert torch.equal(pages[1], torch.tensor([*values, *[1] * (7 - n)], dtype=dtype))
    write(pages, 1, values, end=5)
    assert torch.equal(pages[1], torch.tensor([*values, *values[-1:] * (5 - n), 1, 1], dtype=dtype))
    assert pages[[0, 2]].eq(1).all()
    assert dtype != torch.float32 or math.copysign(1, pages[1, 0].item()) == -1
