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

Kernel: `scan` goes over the logits of the rows that ask again, and over the draft's. One program per query
then reduces each distribution to four numbers, from which the probability of any token follows from its
score, and changes the target.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import EXACT, NAN_TOKEN, REJECTION, TYPICAL
from ..batch import Batch, rows_of
from ..launch import next_power_of_2, use_triton
from ..speculation.proposal import Proposal
from ..table import Table
from . import noise, sample, top_k_top_p
from .scan import best_score, leaves_out, scan
from .scores import NO_TOKEN, Inputs, better_of, load_scores, penalize, scores_of, this_query
from .top_k_top_p import order_key

EPSILON, DELTA = 0.09, 0.3  # of TYPICAL: the defaults of Medusa's reference implementation
ACCEPTANCE = tl.constexpr(0x5851F42D4C957F2D)  # arbitrary bits that tell the streams apart
RESIDUAL = tl.constexpr(0x14057B7EF767814F)
TILE, SUM_TILE = tl.constexpr(2048), tl.constexpr(4096)  # tokens of the vocabulary per iteration
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


def log_probs(scores: Tensor, s: int, table: Table) -> Tensor:
    """Return the logarithm [V] of what request row s draws from, temperature > 0; -inf for what is left
    out."""
    kept = scores.masked_fill(scores < top_k_top_p.naive(scores, s, table), float("-inf"))
    return ((kept - kept.amax()) / table.temperature[s]).log_softmax(-1)  # the difference is exact, or tiny


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
    log_p, log_q = log_probs(scores, s, table), log_probs(guess, s, table)
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
    p = log_probs(scores, s, table).exp()
    entropy = torch.special.entr(p).sum()
    likeliest = max(drafts, key=lambda d: float(p[d]))
    bound = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    return likeliest if p[likeliest] > bound else x


class Distribution(NamedTuple):
    """What tells a token's probability at a query from its score: the largest score; the logarithm of the
    mass sum(exp((score - best) / T)) of the kept; their entropy; the least key (`order_key`) kept."""

    best: Any
    log_mass: Any
    entropy: Any
    least: Any


@triton.jit
def measure(scan, query):
    """Return the distribution at a query, whose `best_score` is not invalid."""
    best, _invalid = best_score(scan, query)
    least, temperature = tl.full([], 0, tl.uint32), tl.load(scan.inputs.table.temperature + query.s)
    if leaves_out(scan.inputs.table, query.s):
        _opened, least = top_k_top_p.threshold(scan, query, best)
    mass, weighted = tl.zeros([SUM_TILE], tl.float32), tl.zeros([SUM_TILE], tl.float32)
    for first in range(0, scan.inputs.table.vocab_size, SUM_TILE):
        scores = load_scores(scan.inputs, query, first + tl.arange(0, SUM_TILE))
        x = (scores - best) / temperature
        weight = tl.where(order_key(scores) >= least, tl.exp(x), 0.0)
        mass += weight
        weighted += tl.where(weight > 0, weight * x, 0.0)
    whole = tl.sum(mass)
    return Distribution(best, tl.log(whole), tl.log(whole) - tl.sum(weighted) / whole, least)


@triton.jit
def log_prob(scan, query, of, ids):
    """Return log p of token ids at a query with the distribution `of`, -inf for what is left out and for ids
    beyond the vocabulary."""
    scores = load_scores(scan.inputs, query, tl.where(ids < 0, scan.inputs.table.vocab_size, ids))
    x = (scores - of.best) / tl.load(scan.inputs.table.temperature + query.s)
    return tl.where(order_key(scores) >= of.least, x - of.log_mass, float("-inf"))


@triton.jit
def _decide(target, guess, targets, DRAWN: tl.constexpr, WIDTH: tl.constexpr):
    query = this_query(target.inputs)
    if query.s < 0:
        return
    token = tl.load(targets + query.line)
    if token >= 0:
        p = measure(target, query)
        if tl.load(target.inputs.table.rule + query.s) == _TYPICAL:
            token = _decide_typical(target, query, p, token, WIDTH)
        elif DRAWN:
            token = _decide_rejection(target, query, p, guess, token)
        tl.store(targets + query.line, token)


@triton.jit
def _decide_rejection(target, query, of_p, guess, token):
    """Return `token`, the target's own draw, only where there is no q and no residual."""
    guessed = this_query(guess.inputs)
    _best, invalid = best_score(guess, guessed)
    if not invalid:
        of_q, seed = measure(guess, guessed), tl.load(target.inputs.table.seed + query.s)
        draft = tl.load(target.inputs.batch.input_ids + query.line + 1)
        log_p = log_prob(target, query, of_p, draft)
        below = log_prob(guess, guessed, of_q, draft) - log_p
        if tl.exp(noise.log_e(seed ^ ACCEPTANCE, query.position, draft * 0)) > below:
            token = draft
        else:
            winner, drawn = tl.full([], float("-inf"), tl.float32), tl.full([], NO_TOKEN, tl.int32)
            for first in range(0, target.inputs.table.vocab_size, TILE):
                ids = first + tl.arange(0, TILE)
                p = tl.exp(log_prob(target, query, of_p, ids))
                q = tl.exp(log_prob(guess, guessed, of_q, ids))
                value = tl.log(tl.where(p - q > 0, p - q, 1.0))
                value -= noise.log_e(seed ^ RESIDUAL, query.position, ids)
                winner, drawn = better_of(winner, drawn, tl.where(p - q > 0, value, float("-inf")), ids)
            token = tl.where(winner > float("-inf"), drawn, token)
    return token


@triton.jit
def _decide_typical(target, query, of, token, WIDTH: tl.constexpr):
    start, place = query.start, tl.arange(0, WIDTH)
    if target.inputs.batch.TREE:
        draft = (place > 0) & (place < query.n)
        parent = tl.load(target.inputs.batch.parents + start + place, draft, other=-1)
        child = draft & (parent == query.place)
    else:
        child = place == query.place + 1
    ids = tl.load(target.inputs.batch.input_ids + start + place, child, other=-1)
    probs = tl.where(child, tl.exp(log_prob(target, query, of, ids)), 0.0)
    largest = tl.max(probs)
    first = tl.min(tl.where(child & (probs == largest), place, WIDTH))
    likeliest = tl.sum(tl.where(place == first, ids, 0))
    drawn = tl.max((ids == token).to(tl.int32)) > 0
    bound = tl.minimum(tl.exp(-of.entropy) * _DELTA, _EPSILON)
    return tl.where((largest > bound) & (not drawn), likeliest, token)


def launch(targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal) -> Tensor:
    B, Q, q, sampled = batch.num_rows, batch.max_q_len, proposal.logits, proposal.sampled
    if B == 0 or Q == 1:
        return targets
    if sampled is None and batch.parents is not None:
        q = None
    K, guess = 0 if q is None else q.shape[1], None
    # The first queries of a row that a further rule decides on, and of these, those that need q.
    index, follow = batch.rows.clamp(min=0), (batch.q_len - 1).clamp(min=0)
    rule = torch.where(table.temperature[index] > 0, table.rule[index], EXACT)
    drawn = rule == REJECTION if sampled is None else (rule == REJECTION) & sampled
    draws = torch.where(drawn, follow.clamp(max=K), 0).int()
    queries = torch.where(rule == TYPICAL, follow if batch.parents is None else batch.q_len, draws).int()
    target = scan(Inputs.of(logits, table, replace(batch, q_len=queries)), Q)
    if q is not None:
        inputs = Inputs.of(q.flatten(0, 1), table, replace(batch, q_len=draws), pitch=K)
        guess = scan(inputs, min(K, Q - 1))
    targets = targets.clone()
    _decide[(Q, B)](target, guess, targets, DRAWN=q is not None, WIDTH=next_power_of_2(Q), num_warps=16)
    return targets
