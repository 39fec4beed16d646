"""The target's own token at every scored position: the first half of verification.

    logits     [T, V]        bf16, fp16 or fp32, one row per flat token (see `rows`)
    input_ids  [T] int32     the token each row of logits follows: a row's last committed token, then
                             its drafts
    rows       [B] int32     the request row in `Params` of each batch row, -1 for padding
    targets    [T] int32     the token drawn; -1 where a logit is NaN or the largest score is infinite;
                             padding tokens unspecified

A query at absolute position p draws the token for position p + 1, assuming the drafts before that
were right: penalties count them. In this order, as in vLLM: logit bias, barred stop tokens
and penalties (`shaping.py`); top-k, top-p over what top-k left, min-p (`filters.py`). All three filters keep the tokens above a threshold, ties included, so that the
result depends on no sort order. Then argmax(score - T log E) with the noise of `noise.py`: a draw from
softmax(score / T), and plain argmax for temperature 0. Ties go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import filters, noise, shaping
from .rows import Rows

NAN_TOKEN = -1


@dataclass
class Params:
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
    return naive(logits, input_ids, rows, params, batch)


def naive(logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Rows) -> Tensor:
    """The specification in plain PyTorch; also the CPU path."""
    targets = argmax(logits).int()
    shaped, temperature = params.shaped.tolist(), params.temperature.tolist()
    for b, s in enumerate(rows.tolist()):
        if s < 0 or not (shaped[s] or temperature[s] > 0):
            continue  # the argmax was all
        start = int(batch.q_start[b])
        for i in range(int(batch.q_len[b])):
            if targets[start + i] != NAN_TOKEN:
                scores, position = logits[start + i].float(), int(batch.positions[start + i]) + 1
                if shaped[s]:
                    drafts = input_ids[_drafts_before(batch, start, i)]
                    scores = shaping.naive(scores, s, position, drafts, params)
                targets[start + i] = draw(scores, s, position, params)
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
    # Only a shortcut: no noise lifts a token over the best one from further below than this.
    seed = int(params.seed[s])
    least = best - temperature * (noise.LARGEST + noise.naive(seed, position, scores.argmax()))
    kept = (scores >= torch.maximum(least, threshold)).nonzero().squeeze(1)
    return kept[(scores[kept] - temperature * noise.naive(seed, position, kept)).argmax()]


def argmax(scores: Tensor) -> Tensor:
    """[N] int64: the lowest id of the largest score in each row [N, V], NAN_TOKEN if that is no number.

    A maximum alone is five times as fast on a CPU as one that says where: so first the maximum of
    groups of columns, then where it is among the groups, then where it is in the group.
    """
    N, V = scores.shape
    size = min(V & -V, 256)  # the largest power of two that divides V
    groups = scores.view(N, V // size, size)
    best, group = groups.amax(-1).max(-1)
    inside = groups[torch.arange(N, device=scores.device), group].max(-1)[1]
    return (group * size + inside).masked_fill_(~best.isfinite(), NAN_TOKEN)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the model itself (before bias, penalties and temperature), as in vLLM.

    logits [N, V], tokens [N] int -> (of `tokens` [N], the `num_top` largest [N, num_top], their ids),
    float32.
    """
    values = logits.float().log_softmax(-1)
    own = values.gather(1, tokens.long().clamp(min=0)[:, None])[:, 0]
    top = values.topk(num_top, -1)
    return own, top.values, top.indices
