"""The target's own token at every scored position: the first half of verification.

    logits     [T, V]        bf16, fp16 or fp32, one row per flat token (see `rows`)
    input_ids  [T] int32     the token each row of logits follows: a row's last committed token, then
                             its drafts
    rows       [B] int32     the request row in `Params` of each batch row, -1 for padding
    targets    [T] int32     the token drawn; -1 where a logit is NaN or the largest score is infinite;
                             padding tokens unspecified

A query at absolute position p draws the token for position p + 1, assuming that the drafts before
that are right: penalties count them. In this order, as in vLLM: logit bias, barred stop tokens and
penalties (`shaping.py`); top-k, top-p over what top-k left, min-p (`filters.py`). Then
argmax(score - T log E) with the noise of `noise.py`: a draw from softmax(score / T), and plain argmax
for temperature 0. Ties go to the lowest id.

Kernel: two launches. `_scan` reads the logits once, each program a chunk of 2048 tokens of one query
(so a single query still fills the GPU) and leaves the chunk's winner; `_finish` compares the winners.
Rows with filters cannot have a winner yet: their chunks leave the largest scores of groups of tokens
and the chunk's probability mass, and `_finish` draws (`filters.py`). Chunks and groups depend on V
alone, so a query's bits do not depend on what runs beside it. Limits: V <= 262144, and the logits'
rows, the tables of `Params` and everything else contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..dispatch import use_triton
from . import noise, penalties, scan, top_k_top_p

NAN_TOKEN = -1


class Params(NamedTuple):
    """Sampling parameters, one entry per request row [S].

    Attributes:
        temperature, top_p, min_p, repetition, presence, frequency: [S] float32.
        top_k: [S] int32, 0 switches it off.
        seed: [S] int64.
        min_len: [S] int32, tokens at absolute positions below it must not be stop tokens.
        stop_ids: [S, M] int32, padded with -1.
        shaped: [S] bool, whether any of bias, min_len or penalties is set, so that plain rows skip them.
        bias: [S, V] float32, added to the logits.
        in_prompt: [S, V] bool, whether a token occurs in the prompt.
        output_counts: [S, V] int32, how often a token occurs in the committed output.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    min_len: Tensor
    stop_ids: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    shaped: Tensor
    bias: Tensor
    in_prompt: Tensor
    output_counts: Tensor


def sample(logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Batch) -> Tensor:
    """Draw the target's token at each position. See the module docstring."""
    if use_triton(logits):
        return launch(logits, input_ids, rows, params, batch)
    return naive(logits, input_ids, rows, params, batch, lazy=walks_lazily(batch))


def walks_lazily(batch: Batch) -> bool:
    """Whether `naive` draws only what verification reads: it must know whom a draft follows."""
    return batch.ancestors is None or batch.parents is not None


def naive(
    logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Batch, lazy: bool = False
) -> Tensor:
    """The specification in plain PyTorch; also the CPU path.

    Drawing takes a CPU some 0.2 ms per query. So with `lazy` only those are drawn that verification will
    read: up to the first draft that is wrong, in a tree along the drafts that are right. The others stay
    the plain argmax.
    """
    targets = argmax(logits).int()
    shaped, temperature = params.shaped.tolist(), params.temperature.tolist()
    for b, s in enumerate(rows.tolist()):
        if s < 0 or not (shaped[s] or temperature[s] > 0):
            continue  # the argmax was all
        start, n = int(batch.q_start[b]), int(batch.q_len[b])
        tree = None if batch.parents is None else batch.parents[start : start + n].tolist()
        i = 0
        for _ in range(n):  # ends a walk through parents in a circle too
            if targets[start + i] != NAN_TOKEN:
                scores, position = scores_of(logits, input_ids, s, params, batch, start, i)
                targets[start + i] = draw(scores, s, position, params)
            after: Iterable[int] = [i + 1] if i + 1 < n else []
            if lazy:
                children = after if tree is None else (c for c in range(1, n) if tree[c] == i)
                after = [c for c in children if input_ids[start + c] == targets[start + i]]
            i = next(iter(after), -1)
            if i < 0:
                break
    return targets


def scores_of(
    logits: Tensor, input_ids: Tensor, s: int, params: Params, batch: Batch, start: int, i: int
) -> tuple[Tensor, int]:
    """The scores [V] of query i of the row from `start` on, and the position it draws for."""
    scores, position = logits[start + i].float(), int(batch.positions[start + i]) + 1
    if params.shaped[s]:
        drafts = input_ids[_drafts_before(batch, start, i)]
        scores = penalties.naive(scores, s, position, drafts, params)
    return scores, position


def _drafts_before(batch: Batch, start: int, i: int) -> list[int]:
    """Flat indices of the drafts that precede what query i draws: its ancestors and itself."""
    if batch.ancestors is None:
        return list(range(start + 1, start + i + 1))
    mask = int(batch.ancestors[start + i])
    return [start + j for j in range(1, batch.max_q_len) if mask >> j & 1]


def draw(scores: Tensor, s: int, position: int, params: Params) -> Tensor:
    """Draw a token from scores [V] with the filters and the noise of request row s."""
    temperature = float(params.temperature[s])
    if temperature <= 0:
        return argmax(scores[None])[0]
    best = scores.amax()
    if not torch.isfinite(best):
        return torch.full_like(best, NAN_TOKEN)
    least, seed = threshold(scores, s, params), int(params.seed[s])
    if least > float("-inf"):
        kept = (scores >= least).nonzero().squeeze(1)
    else:
        kept = _contenders(scores, temperature, seed, position)
    return kept[(scores[kept] - temperature * noise.naive(seed, position, kept)).argmax()]


def threshold(scores: Tensor, s: int, params: Params) -> Tensor:
    """The least score that the filters of request row s keep."""
    temperature, top_k = float(params.temperature[s]), int(params.top_k[s])
    return top_k_top_p.naive(scores, temperature, top_k, float(params.top_p[s]), float(params.min_p[s]))


def _contenders(scores: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Ids of the few tokens that may win a draw from all: only a shortcut, since logarithms are slow.

    Some token has a value v = score - T log E, here the likeliest. One with a score below v - 7 T beats
    it only if E < exp(-7), which needs u < exp(-7), since E > u.
    """
    bits = noise.bits(seed, position, torch.arange(len(scores), dtype=torch.int32, device=scores.device))
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


@triton.jit(do_not_specialize=["max_q_len"])
def _finish(
    inputs, partials, targets, max_q_len,
    CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    query = scan.this_query(inputs, max_q_len)
    s, t = query[0], query[1]
    if s < 0:
        return
    best, invalid = scan.best_score(partials, t, CHUNKS, CHUNKS_PADDED)
    if invalid:
        token = tl.full([], -1, tl.int32)  # NAN_TOKEN
    elif top_k_top_p.asked(inputs, s):
        mass = scan.whole_mass(inputs, partials, s, t, best, CHUNKS, CHUNKS_PADDED)
        groups = partials.groups + t.to(tl.int64) * GROUPS
        token = top_k_top_p.draw(inputs, query, groups, best, mass, GROUPS, GROUPS_PADDED, GROUP, BF16)
    else:
        c = tl.arange(0, CHUNKS_PADDED)
        inside, at = c < CHUNKS, t * CHUNKS + c
        value = tl.load(partials.value + at, inside, other=float("-inf"))
        _, token = top_k_top_p.best_of(value, tl.load(partials.token + at, inside, other=2147483647))
    tl.store(targets + t, token)


def launch(logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Batch) -> Tensor:
    inputs = scan.make_inputs(logits, input_ids, rows, params, batch)
    partials, constants = scan.scan(inputs, batch.max_q_len)
    targets = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    queries = batch.num_rows * batch.max_q_len
    if queries and len(targets):
        # Fewer warps would spill.
        _finish[(queries,)](inputs, partials, targets, batch.max_q_len, **constants, num_warps=16)
    return targets
