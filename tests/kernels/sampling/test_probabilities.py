"""What the kernels of acceptance take a token's probability for: against all of them in torch."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.sampling import probabilities
from nanospec.kernels.sampling.probabilities import TILE
from nanospec.kernels.sampling.scores import Inputs, scores_of, this_query
from nanospec.kernels.speculation.walk import rows_of
from nanospec.kernels.table import Table
from tests.kernels.batches import S, ints, make_batch, random_logits, random_table

pytestmark = pytest.mark.usefixtures("poison")  # fresh memory holds garbage


@triton.jit
def _all(inputs, distribution, out):  # type: ignore[no-untyped-def]
    query = this_query(inputs.batch)
    if query.s >= 0:
        V = inputs.table.vocab_size
        for first in range(0, V, TILE):
            ids = first + tl.arange(0, TILE)
            found = probabilities.log_probs(inputs, query, distribution, ids)
            tl.store(out + query.t * V + ids, found, ids < V)


def measured(logits: Tensor, table: Table, batch: Batch) -> tuple[Tensor, Tensor]:
    """The kernel's: log p [T, V], and the entropies [T]."""
    inputs = Inputs.of(logits, table, batch)
    found = probabilities.measure(inputs, batch.max_q_len)
    out = torch.empty(logits.shape, dtype=torch.float32)
    _all[(batch.max_q_len, batch.num_rows)](inputs, found, out)
    return out, found.entropy


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("seed", "V"), [(0, 63), (1, 100), (3, 5000)])
def test_every_token_of_every_query(seed: int, V: int, tree: bool) -> None:
    rng = random.Random(seed)
    rows = rng.sample([0, 1, 2, 3, -1], 5)
    q_len = [n if s >= 0 else 0 for n, s in zip([4, 2, 3, 5, 3], rows)]
    batch = make_batch(q_len, [rng.randint(0, 20) for _ in rows], False, tree, rows=ints(*rows))
    batch.input_ids.random_(0, V, generator=torch.Generator().manual_seed(seed))
    table = random_table(rng, V)
    table.temperature[:] = torch.tensor(rng.sample([0.3, 0.7, 1.0, 1.7], S))
    logits = random_logits(rng, batch.num_tokens, V, torch.float32)
    log_p, entropy = measured(logits, table, batch)
    seen = 0
    for row in rows_of(batch):
        for place in range(len(row.ids)):
            t = row.start + place
            scores, _ = scores_of(logits, table, batch, row, place)
            expected = probabilities.naive(scores, row.request, table)
            assert torch.equal(log_p[t].isinf(), expected.isinf())
            torch.testing.assert_close(log_p[t], expected, rtol=1e-5, atol=1e-5)
            own = torch.special.entr(expected.exp()).sum()
            torch.testing.assert_close(entropy[t], own, rtol=1e-4, atol=1e-4)
            seen += 1
    assert seen == sum(q_len)
