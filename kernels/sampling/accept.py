"""Two further rules of acceptance: they change targets between `sample` and `verify`.

`verify` accepts a draft iff it equals the target of the token before it. A row of another rule gets
other targets, and the same walk does the rest:

    targets      [T] int32     from `sample`; the result is the same for rows that keep to EXACT
    rule         [S] int8      per request row: EXACT, REJECTION or TYPICAL
    parents      [T] int32     trees only, as for `verify`
    draft_logits [B, K, V]     what the draft at place j + 1 of its row was drawn from; rows contiguous
    has_probs    [B] bool      whether a row's drafts were drawn from them at all, as a chain; None: all
                               were, but no trees

REJECTION (Leviathan et al., 2023; Chen et al., 2023) is lossless in distribution, though which tokens a
seed gives depends on the drafts: with p the target's and q the draft model's probabilities, a draft d
becomes the target with probability min(1, p(d) / q(d)), and a draw from max(p - q, 0) does otherwise.
So sum(min(p, q)) of the drafts are accepted, the most that a lossless rule can. EXACT accepts somewhat
fewer if both draws share their noise, and sum(p q) if they do not. p is what `sample` draws from; q is
the same of the draft's logits, but penalties count committed tokens only. The last query keeps its
target, and so do queries that no q is given for (n-gram guesses, trees): with all of q on the draft,
a draw from p that may equal it *is* rejection sampling.

TYPICAL (Medusa; Cai et al., 2024) is lossy. Where no draft equals the target's draw, the likeliest of
the drafts that follow a query becomes the target if p(draft) > min(EPSILON, DELTA * exp(-H(p))), H the
entropy in nats. So whatever EXACT accepts is accepted, and more.

Rows with temperature 0 keep to EXACT, whatever they ask for. The noise here depends only on the
request's seed and the absolute position, as in `sample`. Drafts and targets at a position may share
their noise, so acceptance and residual have streams of their own (`noise.py`, with seeds that differ
in constant bits): u = exp(-E) of token 0 of the one, all tokens of the other.

Kernel: `_select` lists the rows that ask, and programs of others end at once. `scan` goes over
the logits again, and over the draft's; `law` reduces each distribution to four numbers, with the
threshold that `sample` has; `_decide` changes targets, at most one pass over the vocabulary for a
residual draw. Limits: those of `sample` and `verify`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..dispatch import use_triton
from ..launch import next_power_of_2
from ..speculation.verify import MAX_Q_LEN
from . import noise, penalties, probabilities, sample, scan, top_k_top_p
from .sample import NAN_TOKEN, Params

EXACT, REJECTION, TYPICAL = 0, 1, 2
RULES = ("exact", "rejection", "typical")  # their names, by code
EPSILON, DELTA = 0.09, 0.3  # of TYPICAL: the defaults of Medusa's reference implementation
ACCEPTANCE = tl.constexpr(0x5851F42D4C957F2D)  # arbitrary bits that tell the streams apart
RESIDUAL = tl.constexpr(0x14057B7EF767814F)
TILE = tl.constexpr(4096)  # tokens of the vocabulary per iteration
_REJECTION, _TYPICAL = tl.constexpr(REJECTION), tl.constexpr(TYPICAL)
_EPSILON, _DELTA = tl.constexpr(EPSILON), tl.constexpr(DELTA)


def accept(
    targets: Tensor,
    logits: Tensor,
    input_ids: Tensor,
    rows: Tensor,
    params: Params,
    batch: Batch,
    rule: Tensor,
    parents: Tensor | None = None,
    draft_logits: Tensor | None = None,
    has_probs: Tensor | None = None,
) -> Tensor:
    """The targets [T] int32 to verify the drafts against. See the module docstring."""
    further = (rule, parents, draft_logits, has_probs)
    if use_triton(logits):
        return launch(targets, logits, input_ids, rows, params, batch, *further)
    return naive(targets, logits, input_ids, rows, params, batch, *further, lazy=True)


def naive(
    targets: Tensor, logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Batch,
    rule: Tensor, parents: Tensor | None = None, draft_logits: Tensor | None = None,
    has_probs: Tensor | None = None, lazy: bool = False,
) -> Tensor:  # fmt: skip
    """The specification in plain PyTorch; also the CPU path.

    With `lazy` only the queries that verification will read get their targets, and `targets` may come
    from a lazy `sample`.
    """
    asked, ids = rule.tolist(), input_ids.tolist()
    if all(s < 0 or asked[s] == EXACT for s in rows.tolist()):
        return targets
    targets = targets.clone()
    for b, s in enumerate(rows.tolist()):
        if s < 0 or asked[s] == EXACT or params.temperature[s] <= 0:
            continue
        guesses = []
        if asked[s] == REJECTION:
            drawn_from = parents is None if has_probs is None else bool(has_probs[b])
            if draft_logits is None or not drawn_from:
                continue
            guesses = list(draft_logits[b])
        start, n = int(batch.q_start[b]), int(batch.q_len[b])
        above = range(-1, n - 1) if parents is None else parents[start : start + n].tolist()
        node, drawn = 0, True  # whether `sample` has drawn the target here
        for _ in range(n):  # ends a walk through parents in a circle too
            t = start + node
            children = [c for c in range(1, n) if above[c] == node]
            scores, position = sample.scores_of(logits, input_ids, s, params, batch, start, node)
            token = NAN_TOKEN if int(targets[t]) == NAN_TOKEN else None
            if token is None and children and node < len(guesses):
                token = _rejection(scores, guesses[node].float(), ids[t + 1], s, position, params)
            if token is None and not drawn:
                token = int(sample.draw(scores, s, position, params))
            token = int(targets[t]) if token is None else token
            if asked[s] == TYPICAL and children and token != NAN_TOKEN:
                token = _typical(scores, [ids[start + c] for c in children], token, s, params)
            matched = [c for c in children if ids[start + c] == token]
            if lazy:
                drawn = drawn and (not sample.walks_lazily(batch) or int(targets[t]) == token)
            targets[t] = token
            if lazy and not matched:
                break
            node = matched[0] if lazy else (node + 1) % n
    return targets


def _rejection(
    scores: Tensor, guess: Tensor, draft: int, s: int, position: int, params: Params
) -> int | None:
    """The target by rejection sampling; None where there is no p or no q."""
    if params.shaped[s]:
        guess = penalties.naive(guess, s, position, guess.new_empty(0, dtype=torch.int32), params)
    if not (torch.isfinite(scores.amax()) and torch.isfinite(guess.amax())):
        return None
    log_p, log_q = probabilities.naive(scores, s, params), probabilities.naive(guess, s, params)
    seed = int(params.seed[s])
    e = noise.naive(seed ^ ACCEPTANCE.value, position, guess.new_zeros(1, dtype=torch.int32)).exp()
    if e > log_q[draft] - log_p[draft]:  # exp(-e) < p / q
        return draft
    residual = log_p.exp() - log_q.exp()
    left = (residual > 0).nonzero().squeeze(1)
    if not len(left):  # rounding has made p equal to q
        return None
    value = residual[left].log() - noise.naive(seed ^ RESIDUAL.value, position, left)
    return int(left[value.argmax()])


def _typical(scores: Tensor, drafts: list[int], x: int, s: int, params: Params) -> int:
    """The target by typical acceptance, where `sample` has drawn x."""
    if x in drafts:
        return x
    p = probabilities.naive(scores, s, params).exp()
    entropy = torch.special.entr(p).sum()
    likeliest = max(drafts, key=lambda d: float(p[d]))
    bound = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    return likeliest if p[likeliest] > bound else x


class Selected(NamedTuple):
    """Who asks, [B] int32 each: request rows or -1, and the number of queries; the same for the drafts.

    And of each row of draft logits the first in its batch row, its position, and no token before it.
    """

    rows: Tensor
    q_len: Tensor
    draft_rows: Tensor
    draft_len: Tensor
    draft_start: Tensor
    positions: Tensor
    input_ids: Tensor


@triton.jit(do_not_specialize=["K", "pitch"])
def _select(
    rows, q_start, q_len, positions, temperature, rule, has_probs, selected, K, pitch,
    TREE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b, j = tl.program_id(0), tl.arange(0, WIDTH)
    s, start, n = tl.load(rows + b), tl.load(q_start + b), tl.load(q_len + b)
    asks = (s >= 0) & (tl.load(temperature + s, s >= 0, other=0.0) > 0)
    asked = tl.load(rule + s, asks, other=0)
    follow = tl.maximum(n - 1, 0)  # queries that a draft follows, of a chain
    drawn = asked == _REJECTION
    if has_probs is not None:
        drawn = drawn & tl.load(has_probs + b)
    num_draws = tl.where(drawn, tl.minimum(follow, K), 0)
    num_queries = tl.where(asked == _TYPICAL, n if TREE else follow, num_draws)
    tl.store(selected.rows + b, tl.where(num_queries > 0, s, -1))
    tl.store(selected.q_len + b, num_queries)
    tl.store(selected.draft_rows + b, tl.where(num_draws > 0, s, -1))
    tl.store(selected.draft_len + b, num_draws)
    tl.store(selected.draft_start + b, b * pitch)
    position = tl.load(positions + start + j, j < num_draws, other=0)
    tl.store(selected.positions + b * pitch + j, position, j < K)
    tl.store(selected.input_ids + b * pitch + j, tl.full([WIDTH], -1, tl.int32), j < K)


@triton.jit(do_not_specialize=["max_q_len", "pitch"])
def _decide(
    inputs, p_law, guesses, q_law, targets, parents, rule, q_len, out, max_q_len, pitch,
    WIDTH: tl.constexpr,
):  # fmt: skip
    query = scan.this_query(inputs, max_q_len)
    s, t, i = query[0], query[1], query[3]
    b = tl.program_id(0) // max_q_len
    if i >= tl.load(q_len + b):
        return
    token = tl.load(targets + t)
    if (s >= 0) & (token >= 0):
        if tl.load(rule + s) == _TYPICAL:
            token = _decide_typical(inputs, query, p_law, parents, token, WIDTH)
        elif guesses is not None:
            token = _decide_rejection(inputs, query, p_law, guesses, q_law, b * pitch + i, token)
    tl.store(out + t, token)


@triton.jit
def _decide_rejection(inputs, query, p_law, guesses, q_law, at, token):
    """`token`, the target's own draw, stays only where there is no q and no residual."""
    s, t, _, i, _ = query
    guess = (s, at, at, i * 0, i * 0)  # no drafts before it
    if tl.abs(tl.load(q_law.best + at)) < float("inf"):
        position, seed = tl.load(inputs.positions + t) + 1, tl.load(inputs.params.seed + s)
        draft = tl.load(inputs.input_ids + t + 1)
        log_p = probabilities.log_probs(inputs, query, p_law, draft)
        below = probabilities.log_probs(guesses, guess, q_law, draft) - log_p
        if tl.exp(noise.block(seed ^ ACCEPTANCE, position, draft * 0)) > below:
            token = draft
        else:
            winner = tl.full([], float("-inf"), tl.float32)
            for first in range(0, inputs.vocab, TILE):
                ids = first + tl.arange(0, TILE)
                p = tl.exp(probabilities.log_probs(inputs, query, p_law, ids))
                residual = p - tl.exp(probabilities.log_probs(guesses, guess, q_law, ids))
                value = tl.log(tl.where(residual > 0, residual, 1.0))
                value -= noise.block(seed ^ RESIDUAL, position, ids)
                high, lowest = top_k_top_p.best_of(tl.where(residual > 0, value, float("-inf")), ids)
                token = tl.where(high > winner, lowest, token)
                winner = tl.maximum(high, winner)
    return token


@triton.jit
def _decide_typical(inputs, query, p_law, parents, token, WIDTH: tl.constexpr):
    _, t, start, i, n = query
    place = tl.arange(0, WIDTH)
    if parents is None:
        child = place == i + 1
    else:
        draft = (place > 0) & (place < n)
        child = draft & (tl.load(parents + start + place, draft, other=-1) == i)
    ids = tl.load(inputs.input_ids + start + place, child, other=-1)
    p = tl.where(child, tl.exp(probabilities.log_probs(inputs, query, p_law, ids)), 0.0)
    largest = tl.max(p)
    first = tl.min(tl.where(child & (p == largest), place, WIDTH))
    likeliest = tl.sum(tl.where(place == first, ids, 0))
    drawn = tl.max((ids == token).to(tl.int32)) > 0
    bound = tl.minimum(tl.exp(-tl.load(p_law.entropy + t)) * _DELTA, _EPSILON)
    return tl.where((largest > bound) & (not drawn), likeliest, token)


def launch(
    targets: Tensor, logits: Tensor, input_ids: Tensor, rows: Tensor, params: Params, batch: Batch,
    rule: Tensor, parents: Tensor | None = None, draft_logits: Tensor | None = None,
    has_probs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    B, Q, tree, device = batch.num_rows, batch.max_q_len, parents is not None, logits.device
    if Q > MAX_Q_LEN:
        raise ValueError(f"{Q} tokens per row exceed the limit of {MAX_Q_LEN}.")
    if (tree and has_probs is None) or (draft_logits is not None and draft_logits.shape[1] == 0):
        draft_logits = None  # point guesses
    if B == 0 or Q == 1:
        return targets
    flat, pitch = _flatten(draft_logits, B, logits.shape[1]) if draft_logits is not None else (None, 0)
    num_guesses = 0 if flat is None else len(flat)
    K = 0 if draft_logits is None else min(draft_logits.shape[1], Q - 1)

    def empty(*lengths: int, dtype: torch.dtype = torch.int32) -> list[Tensor]:
        return [torch.empty(n, dtype=dtype, device=device) for n in lengths]

    selected = Selected(*empty(B, B, B, B, B, num_guesses, num_guesses))
    _select[(B,)](
        rows, batch.q_start, batch.q_len, batch.positions, params.temperature, rule, has_probs, selected,
        K, pitch, TREE=tree, WIDTH=next_power_of_2(Q), num_warps=1,
    )  # fmt: skip
    asking = replace(batch, q_len=selected.q_len)
    inputs = scan.make_inputs(logits, input_ids, selected.rows, params, asking)
    p_law = probabilities.measure(inputs, Q if tree else Q - 1)
    guesses = q_law = None
    if flat is not None:
        drafts = replace(
            batch, q_start=selected.draft_start, q_len=selected.draft_len, positions=selected.positions,
            ancestors=None,
        )  # fmt: skip
        guesses = scan.make_inputs(flat, selected.input_ids, selected.draft_rows, params, drafts)
        q_law = probabilities.measure(guesses, K)
    out = torch.empty_like(targets)
    _decide[(B * Q,)](
        inputs, p_law, guesses, q_law, targets, parents, rule, batch.q_len, out, Q, pitch,
        WIDTH=next_power_of_2(Q), num_warps=16,
    )  # fmt: skip
    return out


def _flatten(draft_logits: Tensor, B: int, V: int) -> tuple[Tensor, int]:
    """The rows of draft logits as [N, V], draft j of batch row b at b * pitch + j; and the pitch."""
    num_rows, K, vocab = draft_logits.shape
    if (num_rows, vocab) != (B, V):
        raise ValueError(f"draft_logits must be [{B}, K, {V}], not {list(draft_logits.shape)}.")
    outer, inner, element = draft_logits.stride()
    pitch = K if B == 1 else outer // max(inner, 1)
    if element != 1 or (B > 1 and (outer != pitch * inner or pitch < K)):
        raise ValueError("The rows of draft_logits must be contiguous and evenly spaced.")
    return draft_logits.as_strided(((B - 1) * pitch + K, V), (inner, 1)), pitch
