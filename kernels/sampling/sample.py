"""The target's own token at every scored position: the first half of verification.

    logits   [T, V]       bf16, fp16 or fp32, one row per token of the batch
    targets  [T] int32    the token drawn; NAN_TOKEN where a score is NaN or the largest is infinite;
                          padding tokens unspecified

A query at absolute position p draws the token for position p + 1, assuming that the drafts before
that are right: penalties count them. In this order, as in vLLM: logit bias, barred stop tokens and
penalties (`penalties.py`); top-k, top-p over what top-k left, min-p (`top_k_top_p.py`). Then
argmax(score - T log E) with the noise of `noise.py`: a draw from softmax(score / T), and plain argmax
for temperature 0. Ties go to the lowest id.

On a CPU `native` does so in one call of `native/sampling.cpp`, a row to a task.

Kernel: two launches. `scan` reads the logits once, by chunks of the vocabulary, and `_finish` compares the
chunks' winners. Rows with top-k, top-p or min-p cannot have winners yet: there the chunks leave what
`top_k_top_p` draws from. A query's bits do not depend on what runs beside it. Limits: those of `scan`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..codes import NAN_TOKEN
from ..dispatch import use_native, use_triton
from ..native.call import batch_words, call
from ..speculation.walk import Row, rows_of
from ..table import Table
from . import noise, penalties, scan, top_k_top_p

_NAN_TOKEN = tl.constexpr(NAN_TOKEN)


def sample(logits: Tensor, table: Table, batch: Batch) -> Tensor:
    """Draw the target's token at each position. See the module docstring."""
    if use_triton(logits):
        return launch(logits, table, batch)
    fast = use_native(logits, torch.bfloat16, torch.float32)
    return (native if fast else naive)(logits, table, batch, lazy=True)


def naive(logits: Tensor, table: Table, batch: Batch, lazy: bool = False) -> Tensor:
    """Drawing takes a CPU some 0.2 ms per query. So with `lazy` only those are drawn that verification will
    read: up to the first draft that is wrong, in a tree along the drafts that are right. The others stay
    the plain argmax.
    """
    targets = argmax(logits).int()
    draws = ((table.temperature > 0) | table.penalized).tolist()
    for row in rows_of(batch):
        if row.request < 0 or not draws[row.request]:
            continue  # the argmax was all
        for place in row.walk(targets) if lazy else range(len(row.ids)):
            t = row.start + place
            if table.penalized[row.request] or targets[t] != NAN_TOKEN:  # of barred tokens nobody asks
                scores, position = scores_of(logits, table, batch, row, place)
                targets[t] = draw(scores, row.request, position, table)
    return targets


def scores_of(logits: Tensor, table: Table, batch: Batch, row: Row, place: int) -> tuple[Tensor, int]:
    """The scores [V] of the query at a place of a row, and the position it draws for."""
    t, s = row.start + place, row.request
    scores, position = logits[t].float(), int(batch.positions[t]) + 1
    if table.penalized[s]:
        scores = penalties.naive(scores, s, position, row.drafts_to(place), table)
    return scores, position


def draw(scores: Tensor, s: int, position: int, table: Table) -> Tensor:
    """Draw a token from scores [V] with the temperature, top-k, top-p, min-p and noise of request row s."""
    temperature = float(table.temperature[s])
    if temperature <= 0:
        return argmax(scores[None])[0]
    best = scores.amax()
    if not torch.isfinite(best):
        return torch.full_like(best, NAN_TOKEN)
    least, seed = threshold(scores, s, table), int(table.seed[s])
    if least > float("-inf"):
        kept = (scores >= least).nonzero().squeeze(1)
    else:
        kept = contenders(scores, temperature, seed, position)
    return kept[(scores[kept] - temperature * noise.naive(seed, position, kept)).argmax()]


def threshold(scores: Tensor, s: int, table: Table) -> Tensor:
    """The least score that top-k, top-p and min-p of request row s keep."""
    temperature, top_k = float(table.temperature[s]), int(table.top_k[s])
    return top_k_top_p.naive(scores, temperature, top_k, float(table.top_p[s]), float(table.min_p[s]))


def contenders(scores: Tensor, temperature: float, seed: int, position: int, first: int = 0) -> Tensor:
    """Places of the few tokens that may win a draw from all, whose ids begin with `first`: only a shortcut,
    since logarithms are slow.

    Some token has a value v = score - T log E, here the likeliest. One with a score below v - 7 T beats
    it only if E < exp(-7), which needs u < exp(-7), since E > u.
    """
    ids = torch.arange(first, first + len(scores), dtype=torch.int32, device=scores.device)
    bits = noise.bits(seed, position, ids)
    likeliest = argmax(scores[None])
    value = scores[likeliest] - temperature * noise.log_exponential(bits[likeliest])
    lucky = bits < math.ceil(1.01 * math.exp(-7) * 2**31)
    return (lucky | (scores >= value - 7 * temperature)).nonzero().squeeze(1)


def argmax(scores: Tensor) -> Tensor:
    """[N] int64: the lowest id of the largest score in each row [N, V], NAN_TOKEN if that is no number.

    A maximum alone is five times as fast on a CPU as one that says where: so first the maximum of
    groups of columns, then where it is among the groups, then where it is in the group.
    """
    N, V = scores.shape
    size = min(V & -V, 1024)  # the largest power of two that divides V, up to a good group size
    groups = scores.view(N, V // size, size)
    best, group = groups.amax(-1).max(-1)
    inside = groups[torch.arange(N, device=scores.device), group].max(-1)[1]
    return (group * size + inside).masked_fill_(~best.isfinite(), NAN_TOKEN)


def native(logits: Tensor, table: Table, batch: Batch, lazy: bool = False) -> Tensor:
    """`naive`; with `lazy` not even the argmax of queries that are not read is taken: those targets are 0."""
    if logits.stride(1) != 1 or logits.shape[1] != table.vocab_size:
        raise ValueError(f"Logits {list(logits.shape)} do not fit a table for {table.vocab_size} tokens.")
    targets = batch.rows.new_empty(logits.shape[0])
    call(
        "nanospec_sample", *table, *batch_words(batch), logits, logits.stride(0),
        logits.dtype == torch.bfloat16, lazy, targets, torch.get_num_threads(),
    )  # fmt: skip
    return targets


@triton.jit
def _finish(inputs, partials, targets):
    query = scan.this_query(inputs.batch)
    s, t = query[0], query[1]
    if s < 0:
        return
    best, invalid = scan.best_score(partials, t)
    if invalid:
        token = tl.full([], _NAN_TOKEN, tl.int32)
    elif top_k_top_p.asked(inputs.table, s):
        mass = scan.whole_mass(partials, t, best, tl.load(inputs.table.temperature + s))
        token = top_k_top_p.draw(inputs, query, partials, best, mass)
    else:
        ids = scan.of_chunks(partials.token, t, partials.CHUNKS, 2147483647)
        _, token = top_k_top_p.best_of(scan.of_chunks(partials.value, t, partials.CHUNKS), ids)
    tl.store(targets + t, token)


def launch(logits: Tensor, table: Table, batch: Batch) -> Tensor:
    inputs = scan.Inputs.of(logits, table, batch)
    partials = scan.scan(inputs, batch.max_q_len)
    targets = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    if batch.num_rows and len(targets):
        # Fewer warps would spill.
        _finish[(batch.max_q_len, batch.num_rows)](inputs, partials, targets, num_warps=16)
    return targets
