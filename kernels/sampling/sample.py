"""The target's own token at every scored position: the first half of verification.

    logits   [T, V]       bf16, fp16 or fp32, one row per token of the batch
    targets  [T] int32    the token drawn; NAN_TOKEN where a score is NaN or the largest is infinite;
                          padding tokens unspecified

A query at absolute position p draws the token for position p + 1, assuming that the drafts before it
are right: penalties count them. In this order, as in vLLM: logit bias, barred stop tokens and
penalties (`scores.py`); top-k, top-p over what top-k left, min-p (`top_k_top_p.py`). Then
argmax(score - T log E) with the noise of `noise.py`: a draw from softmax(score / T), and plain argmax
for temperature 0. Ties go to the lowest id.

`scan.py` does so on a GPU, where V <= 262144; `native/sampling.cpp` on a CPU, a row to a task.
"""

import torch
from torch import Tensor

from .. import NAN_TOKEN
from ..batch import Batch, rows_of
from ..launch import use_native, use_triton
from ..native import call
from ..table import Table
from . import noise, top_k_top_p
from .scan import launch
from .scores import scores_of


def sample(logits: Tensor, table: Table, batch: Batch) -> Tensor:
    """Draw the target's token at each position. On a CPU only at those that verification will read."""
    if use_triton(logits):
        return launch(logits, table, batch)
    compiled = use_native(logits, torch.bfloat16, torch.float32)
    return (native if compiled else naive)(logits, table, batch, lazy=True)


def naive(logits: Tensor, table: Table, batch: Batch, lazy: bool = False) -> Tensor:
    """With `lazy`, draw only the targets that verification will read, up to the first wrong draft: `walk`
    yields a place, then reads its target. The others stay the plain argmax."""
    targets = argmax(logits)
    draws = ((table.temperature > 0) | table.penalized).tolist()
    for row in rows_of(batch):
        if row.request < 0 or not draws[row.request]:
            continue  # argmax is enough
        for place in row.walk(targets) if lazy else range(len(row.ids)):
            scores, position = scores_of(logits, table, batch, row, place)
            targets[row.start + place] = draw(scores, row.request, position, table)
    return targets


def draw(scores: Tensor, s: int, position: int, table: Table) -> Tensor:
    """Draw a token from scores [V] with the temperature, top-k, top-p, min-p and noise of request row s."""
    temperature = float(table.temperature[s])
    if temperature > 0 and scores.amax().isfinite():
        left_out = scores < top_k_top_p.naive(scores, s, table)
        log_e = noise.naive(int(table.seed[s]), position, torch.arange(len(scores), device=scores.device))
        scores = (scores - temperature * log_e).masked_fill_(left_out, float("-inf"))
    return argmax(scores[None])[0]


def argmax(logits: Tensor) -> Tensor:
    """Return [N] int32: the lowest id of the largest in each row [N, V], NAN_TOKEN if that is no number."""
    best, token = logits.float().max(-1)
    return token.masked_fill_(~best.isfinite(), NAN_TOKEN).int()


def native(logits: Tensor, table: Table, batch: Batch, lazy: bool = False) -> Tensor:
    """`naive`; with `lazy` not even the argmax of queries that are not read is taken: those targets are 0."""
    targets, is_bf16 = batch.rows.new_empty(len(logits)), logits.dtype == torch.bfloat16
    given = logits, logits.stride(0), is_bf16, lazy, targets, torch.get_num_threads()
    call("nanospec_sample", *table, *batch.words, *given)
    return targets
