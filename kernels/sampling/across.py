"""The target's own token where every rank has the logits of a part of the vocabulary
(`layer/vocab_parallel.py`).

    logits      [T, n]           the rank's: of the tokens from `first` on
    candidates  [2, T, C] f32    the largest value of each of C chunks of them, and its token
    targets     [T] int32        as `sample` gives them, from the candidates [ranks, 2, T, C] of all

Ranks exchange candidates, not logits. That is enough for requests that draw from all tokens as the model
has them: greedily, or with temperature (as `sample`: argmax(score - T log E), ties to the lowest id;
NAN_TOKEN where a logit is NaN or the largest is infinite). Requests that ask for more need the logits of all.
A float32 holds a token's id exactly, as they are below 2^24.
"""

import torch
from torch import Tensor

from .. import NAN_TOKEN
from ..batch import Batch
from ..launch import use_triton
from ..speculation.walk import rows_of
from ..table import Table
from . import noise
from .scan import scan
from .scores import Inputs


def best(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    """Return a rank's candidates from its first `count` logits; the rest are padding. Candidates of padding
    queries are unspecified."""
    return (launch if use_triton(logits) else naive)(logits, first, count, table, batch)


def choose(candidates: Tensor) -> Tensor:
    """Return the targets, from the candidates of all ranks."""
    values, ids = candidates.unbind(1)  # [ranks, T, C] each
    largest = values.amax((0, 2))
    token = torch.where(values == largest[:, None], ids, float("inf")).amin((0, 2))
    return torch.where(largest.isfinite(), token, NAN_TOKEN).int()


def naive(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    scores = logits[:, :count].to(torch.float32, copy=True)
    ids = torch.arange(first, first + count, device=logits.device)
    for row in rows_of(batch):
        temperature = float(table.temperature[row.request]) if row.request >= 0 else 0
        for t in range(row.start, row.start + len(row.ids)) if temperature > 0 else ():
            log_e = noise.naive(int(table.seed[row.request]), int(batch.positions[t]) + 1, ids)
            scores[t] -= temperature * log_e
    value, place = scores.max(-1)
    return torch.stack([value, ids[place].float()])[..., None]


def launch(logits: Tensor, first: int, count: int, table: Table, batch: Batch) -> Tensor:
    # Chunks of the padding too: as many on all ranks.
    partials = scan(Inputs.of(logits, table, batch, part=(first, count)), batch.max_q_len)
    return torch.stack([partials.value, partials.token.float()])
