"""Two further rules of acceptance: they change targets between `sample` and `commit`.

`commit` accepts a draft iff it equals the target of the token before it. A row of another rule (`rule` of
the table) gets other targets, and the same walk does the rest; rows that keep to EXACT keep theirs.

REJECTION (Leviathan et al., 2023; Chen et al., 2023) is lossless in distribution, though which tokens a
seed gives depends on the drafts: with p the target's and q the draft model's probabilities, a draft d
becomes the target with probability min(1, p(d) / q(d)), and a draw from max(p - q, 0) does otherwise.
So sum(min(p, q)) of the drafts are accepted, the most that a lossless rule can. p is what `sample` draws
from; q is the same of the draft's logits, but penalties count committed tokens only. The last query keeps
its target, and so do queries that no q is given for (n-gram guesses, trees): with all of q on the draft,
a draw from p that may equal it *is* rejection sampling.

TYPICAL (Medusa; Cai et al., 2024) is lossy. Where no draft equals the target's draw, the likeliest of
the drafts that follow a query becomes the target if p(draft) > min(EPSILON, DELTA * exp(-H(p))), H the
entropy in nats. So whatever EXACT accepts is accepted, and more.

Rows with temperature 0 keep to EXACT, whatever they ask for. The noise here depends only on the
request's seed and the absolute position, as in `sample`. Drafts and targets at a position may share
their noise, so acceptance and residual have streams of their own (`noise.py`, with seeds that differ
in constant bits): u = exp(-E) of token 0 of the one, all tokens of the other.

Kernel: `scan` goes over the logits of the rows that ask again, and over the draft's; `probabilities` reduces
each distribution to four numbers; `_decide` changes targets.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..codes import EXACT, NAN_TOKEN, REJECTION, TYPICAL
from ..dispatch import use_triton
from ..launch import next_power_of_2
from ..speculation.proposal import Proposal
from ..speculation.walk import rows_of
from ..table import Table
from . import noise, probabilities, sample
from .probabilities import Distribution
from .scan import best_of
from .scores import Inputs, Query, penalize, scores_of, this_query

EPSILON, DELTA = 0.09, 0.3  # of TYPICAL: the defaults of Medusa's reference implementation
ACCEPTANCE = tl.constexpr(0x5851F42D4C957F2D)  # arbitrary bits that tell the streams apart
RESIDUAL = tl.constexpr(0x14057B7EF767814F)
TILE = tl.constexpr(2048)  # tokens of the vocabulary per iteration
_TYPICAL, _EPSILON, _DELTA = tl.constexpr(TYPICAL), tl.constexpr(EPSILON), tl.constexpr(DELTA)


def accept(targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal) -> Tensor:
    """Return the targets [T] int32 to verify the drafts of `proposal` against, from those of `sample`."""
    if use_triton(logits):
        return launch(targets, logits, table, batch, proposal)
    return naive(targets, logits, table, batch, proposal, lazy=True)


def naive(
    targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal, lazy: bool = False
) -> Tensor:
    """With `lazy` only the queries that verification will read get their targets, drawn anew: a lazy `sample`
    may not have come to them."""
    rules = table.rule.masked_fill(table.temperature <= 0, EXACT).tolist()
    targets = targets.clone()
    for b, row in enumerate(rows_of(batch)):
        s = row.request
        rule = rules[s] if s >= 0 else EXACT
        guesses = _drawn_from(proposal, batch, b) if rule == REJECTION else ()
        if rule != TYPICAL and not len(guesses):
            continue
        for place in row.walk(targets) if lazy else range(len(row.ids)):
            scores, position = scores_of(logits, table, batch, row, place)
            children, token = row.children(place), None
            if children and place < len(guesses):
                token = _rejection(scores, guesses[place].float(), row.ids[place + 1], s, position, table)
            if token is None:
                token = int(sample.draw(scores, s, position, table) if lazy else targets[row.start + place])
            if rule == TYPICAL and children and token != NAN_TOKEN:
                token = _typical(scores, [row.ids[c] for c in children], token, s, table)
            targets[row.start + place] = token
    return targets


def _drawn_from(proposal: Proposal, batch: Batch, b: int) -> Tensor | tuple[()]:
    """Return the logits [K, V] that the drafts of batch row b were drawn from, if they were drawn at all."""
    sampled = batch.parents is None if proposal.sampled is None else bool(proposal.sampled[b])
    return proposal.logits[b] if sampled and proposal.logits is not None else ()


def _rejection(scores: Tensor, guess: Tensor, draft: int, s: int, position: int, table: Table) -> int | None:
    """Return the target by rejection sampling; None where there is no p or no q."""
    if table.penalized[s]:
        guess = penalize(guess, s, position, (), table)
    if not (torch.isfinite(scores.amax()) and torch.isfinite(guess.amax())):
        return None
    log_p, log_q = probabilities.naive(scores, s, table), probabilities.naive(guess, s, table)
    seed = int(table.seed[s])
    e = noise.naive(seed ^ ACCEPTANCE.value, position, guess.new_zeros(1, dtype=torch.int32)).exp()
    if e > log_q[draft] - log_p[draft]:  # exp(-e) < p / q
        return draft
    residual = log_p.exp() - log_q.exp()
    left = (residual > 0).nonzero().squeeze(1)
    if not len(left):  # rounding has made p equal to q
        return None
    value = residual[left].log() - noise.naive(seed ^ RESIDUAL.value, position, left)
    return int(left[value.argmax()])


def _typical(scores: Tensor, drafts: list[int], x: int, s: int, table: Table) -> int:
    """Return the target by typical acceptance, where `sample` has drawn x."""
    if x in drafts:
        return x
    p = probabilities.naive(scores, s, table).exp()
    entropy = torch.special.entr(p).sum()
    likeliest = max(drafts, key=lambda d: float(p[d]))
    bound = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    return likeliest if p[likeliest] > bound else x


class Side(NamedTuple):
    """What a token is drawn from, at the queries of the target or of the draft model."""

    inputs: Inputs
    distribution: Distribution


@triton.jit(do_not_specialize=["pitch"])
def _decide(target, guess, targets, pitch, DRAWN: tl.constexpr, WIDTH: tl.constexpr):
    query = this_query(target.inputs.batch)
    if query.s < 0:
        return
    token = tl.load(targets + query.t)
    if token >= 0:
        if tl.load(target.inputs.table.rule + query.s) == _TYPICAL:
            token = _decide_typical(target, query, token, WIDTH)
        elif DRAWN:
            token = _decide_rejection(target, guess, query, tl.program_id(1) * pitch + query.place, token)
        tl.store(targets + query.t, token)


@triton.jit
def _decide_rejection(target, guess, query, at, token):
    """Return `token`, the target's own draw, only where there is no q and no residual."""
    guessed = Query(query.s, at, at, at * 0, at * 0)  # no drafts before it
    if tl.abs(tl.load(guess.distribution.best + at)) < float("inf"):
        table, batch = target.inputs.table, target.inputs.batch
        position, seed = tl.load(batch.positions + query.t) + 1, tl.load(table.seed + query.s)
        draft = tl.load(batch.input_ids + query.t + 1)
        log_p = probabilities.log_probs(target.inputs, query, target.distribution, draft)
        below = probabilities.log_probs(guess.inputs, guessed, guess.distribution, draft) - log_p
        if tl.exp(noise.log_e(seed ^ ACCEPTANCE, position, draft * 0)) > below:
            token = draft
        else:
            winner = tl.full([], float("-inf"), tl.float32)
            for first in range(0, table.vocab_size, TILE):
                ids = first + tl.arange(0, TILE)
                p = tl.exp(probabilities.log_probs(target.inputs, query, target.distribution, ids))
                q = tl.exp(probabilities.log_probs(guess.inputs, guessed, guess.distribution, ids))
                value = tl.log(tl.where(p - q > 0, p - q, 1.0))
                value -= noise.log_e(seed ^ RESIDUAL, position, ids)
                high, lowest = best_of(tl.where(p - q > 0, value, float("-inf")), ids)
                token = tl.where(high > winner, lowest, token)
                winner = tl.maximum(high, winner)
    return token


@triton.jit
def _decide_typical(target, query, token, WIDTH: tl.constexpr):
    start, place = query.start, tl.arange(0, WIDTH)
    if target.inputs.batch.TREE:
        draft = (place > 0) & (place < query.n)
        parent = tl.load(target.inputs.batch.parents + start + place, draft, other=-1)
        child = draft & (parent == query.place)
    else:
        child = place == query.place + 1
    ids = tl.load(target.inputs.batch.input_ids + start + place, child, other=-1)
    log_p = probabilities.log_probs(target.inputs, query, target.distribution, ids)
    probs = tl.where(child, tl.exp(log_p), 0.0)
    largest = tl.max(probs)
    first = tl.min(tl.where(child & (probs == largest), place, WIDTH))
    likeliest = tl.sum(tl.where(place == first, ids, 0))
    drawn = tl.max((ids == token).to(tl.int32)) > 0
    bound = tl.minimum(tl.exp(-tl.load(target.distribution.entropy + query.t)) * _DELTA, _EPSILON)
    return tl.where((largest > bound) & (not drawn), likeliest, token)


def launch(targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal) -> Tensor:
    B, Q = batch.num_rows, batch.max_q_len
    if B == 0 or Q == 1:
        return targets
    flat, K, pitch = _flatten(proposal, batch)
    queries, draws = _asked(table, batch, proposal.sampled, K)
    inputs = Inputs.of(logits, table, replace(batch, q_len=queries))
    target = Side(inputs, probabilities.measure(inputs, Q - 1 if batch.parents is None else Q))
    guess = None
    if flat is not None:
        inputs = Inputs.of(flat, table, _of_drafts(batch, draws, K, pitch))
        guess = Side(inputs, probabilities.measure(inputs, K))
    targets = targets.clone()
    _decide[(Q, B)](
        target, guess, targets, pitch, DRAWN=guess is not None, WIDTH=next_power_of_2(Q), num_warps=16
    )
    return targets


def _asked(table: Table, batch: Batch, sampled: Tensor | None, K: int) -> tuple[Tensor, Tensor]:
    """Return [B] int32 each: how many of a row's first queries a further rule decides on, and how many of its
    first drafts, K at most, were drawn from logits that it needs."""
    index = batch.rows.clamp(min=0)
    follow = (batch.q_len - 1).clamp(min=0)  # queries that a draft follows, of a chain
    rule = torch.where((batch.rows >= 0) & (table.temperature[index] > 0), table.rule[index], EXACT)
    drawn = rule == REJECTION if sampled is None else (rule == REJECTION) & sampled
    draws = torch.where(drawn, follow.clamp(max=K), 0)
    typical = follow if batch.parents is None else batch.q_len
    return torch.where(rule == TYPICAL, typical, draws).int(), draws.int()


def _of_drafts(batch: Batch, draws: Tensor, K: int, pitch: int) -> Batch:
    """Return the batch of the logits of drafts, as `_flatten` gives them: `draws` of each row."""
    B, place = batch.num_rows, torch.arange(pitch, device=draws.device)
    t = (batch.q_start[:, None] + place).clamp(max=batch.num_tokens - 1)
    num_logits = (B - 1) * pitch + K
    positions = batch.positions[t].flatten()[:num_logits]
    start = torch.arange(0, B * pitch, pitch, dtype=torch.int32, device=draws.device)
    none = torch.full_like(positions, -1)
    return replace(
        batch, input_ids=none, positions=positions, q_start=start, q_len=draws, ancestors=None, parents=None
    )


def _flatten(proposal: Proposal, batch: Batch) -> tuple[Tensor | None, int, int]:
    """Return the drafts' logits as [N, V], None if they were not drawn; how many drafts per row have some;
    the pitch: those of draft j of batch row b lie at b * pitch + j."""
    logits, B = proposal.logits, batch.num_rows
    if logits is None or logits.shape[1] == 0 or (batch.parents is not None and proposal.sampled is None):
        return None, 0, 0
    K, (outer, inner, _) = logits.shape[1], logits.stride()
    pitch = K if B == 1 else outer // inner
    flat = logits.as_strided(((B - 1) * pitch + K, logits.shape[2]), (inner, 1))
    return flat, min(K, batch.max_q_len - 1), pitch
