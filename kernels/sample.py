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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import filters, noise, shaping
from .dispatch import use_triton
from .launch import next_power_of_2
from .rows import Rows

NAN_TOKEN = -1
CHUNK = 2048  # tokens of the vocabulary per program
MAX_GROUPS = 1024  # per query; 64 to 256 tokens each
MAX_VOCAB = 262144


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


def sample(logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Rows) -> Tensor:
    """Draw the target's token at each position. See the module docstring."""
    if use_triton(logits):
        return launch(logits, input_ids, rows, params, batch)
    return naive(logits, input_ids, rows, params, batch, lazy=batch.ancestors is None)


def naive(
    logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Rows, lazy: bool = False
) -> Tensor:
    """The specification in plain PyTorch; also the CPU path.

    Drawing takes a CPU some 0.2 ms per query. So with `lazy`, for chains, the draw stops at the first
    draft that is wrong: verification reads no further. What follows stays the plain argmax.
    """
    targets = argmax(logits).int()
    shaped, temperature = params.shaped.tolist(), params.temperature.tolist()
    for b, s in enumerate(rows.tolist()):
        if s < 0 or not (shaped[s] or temperature[s] > 0):
            continue  # the argmax was all
        start, n = int(batch.q_start[b]), int(batch.q_len[b])
        for i in range(n):
            if targets[start + i] != NAN_TOKEN:
                scores, position = logits[start + i].float(), int(batch.positions[start + i]) + 1
                if shaped[s]:
                    drafts = input_ids[_drafts_before(batch, start, i)]
                    scores = shaping.naive(scores, s, position, drafts, params)
                targets[start + i] = draw(scores, s, position, params)
            if lazy and i + 1 < n and targets[start + i] != input_ids[start + i + 1]:
                break
    return targets


def _drafts_before(batch: Rows, start: int, i: int) -> list[int]:
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
    threshold = filters.naive(
        scores, temperature, int(params.top_k[s]), float(params.top_p[s]), float(params.min_p[s])
    )
    seed = int(params.seed[s])
    if threshold > float("-inf"):
        kept = (scores >= threshold).nonzero().squeeze(1)
    else:
        kept = _contenders(scores, temperature, seed, position)
    return kept[(scores[kept] - temperature * noise.naive(seed, position, kept)).argmax()]


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


class Inputs(NamedTuple):
    """What the kernels read. A tuple keeps their argument lists short."""

    logits: Tensor
    stride: int
    vocab: int
    input_ids: Tensor
    rows: Tensor
    q_start: Tensor
    q_len: Tensor
    positions: Tensor
    ancestors: Tensor | None
    num_stops: int
    params: Params


class Partials(NamedTuple):
    """What a chunk tells about itself, [T, chunks] each, and about its groups, [T, groups].

    The winner's value and token; the largest score, NaN if a logit is; with filters the mass
    sum(exp((score - largest) / T)) and the groups' largest scores.
    """

    value: Tensor
    token: Tensor
    largest: Tensor
    mass: Tensor
    groups: Tensor


@triton.jit
def _query(inputs, max_q_len):
    """This program's query for `shaping.load_scores`; the request row is -1 if there is none."""
    b = tl.program_id(0) // max_q_len
    i = tl.program_id(0) % max_q_len
    start, n = tl.load(inputs.q_start + b), tl.load(inputs.q_len + b)
    s = tl.where(i < n, tl.load(inputs.rows + b), -1)
    return s, start + i, start, i, n


@triton.jit(do_not_specialize=["max_q_len"])
def _scan(inputs, partials, max_q_len, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    query = _query(inputs, max_q_len)
    s, t = query[0], query[1]
    if s < 0:
        return
    chunk, num_chunks = tl.program_id(1), tl.num_programs(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = shaping.load_scores(inputs, query, ids)
    invalid = tl.max((scores != scores).to(tl.int32)) > 0
    largest = tl.max(tl.where(scores == scores, scores, float("-inf")))
    out = t * num_chunks + chunk
    tl.store(partials.largest + out, tl.where(invalid, float("nan"), largest))
    temperature = tl.load(inputs.params.temperature + s)
    if filters.asked(inputs, s):
        below = tl.where(scores == largest, 0.0, scores - largest)  # 0 also where all are -inf
        tl.store(partials.mass + out, tl.sum(tl.exp(below / temperature)))
        groups = tl.max(tl.reshape(scores, [CHUNK // GROUP, GROUP]), 1)
        g = tl.arange(0, CHUNK // GROUP)
        tl.store(partials.groups + out.to(tl.int64) * (CHUNK // GROUP) + g, groups)
    else:
        if temperature > 0:
            position = tl.load(inputs.positions + t) + 1
            scores -= temperature * noise.block(tl.load(inputs.params.seed + s), position, ids)
        value, token = filters.best_of(scores, ids)
        tl.store(partials.value + out, value)
        tl.store(partials.token + out, token)


@triton.jit(do_not_specialize=["max_q_len"])
def _finish(
    inputs, partials, targets, max_q_len,
    CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, GROUP: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    query = _query(inputs, max_q_len)
    s, t = query[0], query[1]
    if s < 0:
        return
    c = tl.arange(0, CHUNKS_PADDED)
    inside, at = c < CHUNKS, t * CHUNKS + c
    largest = tl.load(partials.largest + at, inside, other=float("-inf"))
    best = tl.max(tl.where(largest == largest, largest, float("-inf")))
    invalid = tl.max((largest != largest).to(tl.int32)) > 0
    if invalid | (tl.abs(best) == float("inf")):
        token = tl.full([], -1, tl.int32)  # NAN_TOKEN
    elif filters.asked(inputs, s):
        below = (largest - best) / tl.load(inputs.params.temperature + s)
        mass = tl.sum(tl.load(partials.mass + at, inside, other=0.0) * tl.exp(below))
        groups = partials.groups + t.to(tl.int64) * GROUPS
        token = filters.draw(inputs, query, groups, best, mass, GROUPS, GROUPS_PADDED, GROUP, BF16)
    else:
        value = tl.load(partials.value + at, inside, other=float("-inf"))
        _, token = filters.best_of(value, tl.load(partials.token + at, inside, other=2147483647))
    tl.store(targets + t, token)


def launch(logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Rows) -> Tensor:
    T, V = logits.shape
    if V > MAX_VOCAB:
        raise ValueError(f"A vocabulary of {V} exceeds the sampling kernel's limit of {MAX_VOCAB}.")
    if logits.stride(1) != 1:
        raise ValueError("The rows of the logits must be contiguous.")
    for name in ("bias", "in_prompt", "output_counts"):
        table = getattr(params, name)
        if table.shape[1] != V or not table.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous [S, {V}], not {tuple(table.shape)}.")
    inputs = Inputs(
        logits, logits.stride(0), V, input_ids, rows, batch.q_start, batch.q_len, batch.positions,
        batch.ancestors, params.stop_ids.shape[1], params,
    )  # fmt: skip
    group = max(64, next_power_of_2(-(-V // MAX_GROUPS)))
    chunks = -(-V // CHUNK)
    groups = chunks * (CHUNK // group)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(T, columns, dtype=dtype, device=logits.device)

    f32, i32 = torch.float32, torch.int32
    partials = Partials(
        empty(chunks, f32), empty(chunks, i32), empty(chunks, f32), empty(chunks, f32),
        empty(groups, f32),
    )  # fmt: skip
    targets = torch.empty(T, dtype=i32, device=logits.device)
    queries = batch.num_rows * batch.max_q_len
    if queries and T:
        _scan[(queries, chunks)](inputs, partials, batch.max_q_len, CHUNK=CHUNK, GROUP=group, num_warps=4)
        _finish[(queries,)](
            inputs, partials, targets, batch.max_q_len,
            CHUNKS=chunks, CHUNKS_PADDED=next_power_of_2(chunks),
            GROUPS=groups, GROUPS_PADDED=next_power_of_2(groups), GROUP=group,
            BF16=logits.dtype == torch.bfloat16, num_warps=16,  # fewer would spill
        )  # fmt: skip
    return targets
