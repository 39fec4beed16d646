"""Sample the target's own token at every scored position: the first half of verification.

    logits   [T, V]       bf16, fp16 or fp32, one row per token of the batch
    targets  [T] int32    the sampled token; NAN_TOKEN if a score is NaN or the largest is infinite;
                          unspecified for unused tokens

A query at absolute position p samples the token of position p + 1, given that the drafts before it are
accepted: penalties count them. The order: logit bias, masked stop tokens and penalties (`scores.py`, as in
vLLM); top-k, top-p over the tokens that top-k keeps, min-p (`top_k_top_p.py`; vLLM applies min-p first). The
target is argmax(score - T log E) with the noise of `noise.py`, which is a sample of softmax(score / T), and
plain argmax if the temperature T is 0. Ties are broken by the lowest token ID.

On a GPU this runs in `scan.py` (V <= 262144), on a CPU in `native/sampling.cpp`, one task per row.
"""

import torch
from torch import Tensor

from .. import NAN_TOKEN
from ..batch import Batch, draft_trees
from ..launch import use_native, use_triton
from ..native import call
from ..table import Table
from . import noise, top_k_top_p
from .scan import launch
from .scores import scores_of


def sample(logits: Tensor, table: Table, batch: Batch) -> Tensor:
    """Return the target's tokens [T] int32. On a CPU, only those that verification reads are sampled."""
    if use_triton(logits):
        return launch(logits, table, batch)
    compiled = use_native(logits, torch.bfloat16, torch.float32)
    return (native if compiled else naive)(logits, table, batch, lazy=True)


def naive(logits: Tensor, table: Table, batch: Batch, lazy: bool = False) -> Tensor:
    """Sample the targets. With `lazy`, only those that verification reads, up to the first rejected draft
    (`walk` yields a node before it reads its target); the others remain the argmax of the logits."""
    targets = argmax(logits)
    draws = ((table.temperature > 0) | table.penalized).tolist()
    for tree in draft_trees(batch):
        if tree.row < 0 or not draws[tree.row]:
            continue  # the argmax is the target
        for node in tree.walk(targets) if lazy else range(len(tree.ids)):
            scores, position = scores_of(logits, table, batch, tree, node)
            targets[tree.start + node] = draw(scores, tree.row, position, table)
    return targets


def draw(scores: Tensor, s: int, position: int, table: Table) -> Tensor:
    """Sample a token from scores [V] with the sampling parameters and the seed of request row s."""
    temperature = float(table.temperature[s])
    if temperature > 0 and scores.amax().isfinite():
        filtered = scores < top_k_top_p.naive(scores, s, table)
        log_e = noise.naive(int(table.seed[s]), position, torch.arange(len(scores), device=scores.device))
        scores = (scores - temperature * log_e).masked_fill_(filtered, float("-inf"))
    return argmax(scores[None])[0]


def argmax(logits: Tensor) -> Tensor:
    """Return the argmax [N] int32 of rows [N, V], ties by the lowest ID; NAN_TOKEN if not finite."""
    best, token = logits.float().max(-1)
    return token.masked_fill_(~best.isfinite(), NAN_TOKEN).int()


def native(logits: Tensor, table: Table, batch: Batch, lazy: bool = False) -> Tensor:
    """Run `nanospec_sample` of `native/sampling.cpp`. With `lazy`, unread targets are 0."""
    targets, is_bf16 = batch.rows.new_empty(len(logits)), logits.dtype == torch.bfloat16
    args = logits, logits.stride(0), is_bf16, lazy, targets, torch.get_num_threads()
    call("nanospec_sample", *table, *batch.native_args, *args)
    return targets
