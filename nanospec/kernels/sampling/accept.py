"""Apply the acceptance rules other than equality, by changing targets between `sample` and `commit`.

`commit` accepts a draft iff it equals the target of the previous token. Rows with another rule (`rule` of
the table) get new targets here, and `commit` then works as for EXACT, whose targets do not change.

REJECTION (Leviathan et al., 2023; Chen et al., 2023) preserves the distribution, though the tokens of a
given seed depend on the drafts. With p the probabilities of the target and q those of the draft model, the
target becomes the draft d with probability min(1, p(d) / q(d)), and otherwise a sample of max(p - q, 0).
The acceptance rate is sum(min(p, q)), the maximum of any lossless rule. p is the distribution that `sample`
uses; q is that of the draft's logits, except that penalties count committed tokens only. The last query of a
row keeps its target, as do queries without q (n-gram drafts, trees): for a deterministic drafter, a sample
of p that happens to equal the draft *is* rejection sampling.

TYPICAL (Medusa; Cai et al., 2024) is lossy. If no draft equals the sampled target, the most likely of the
drafts that follow a query becomes the target if p(draft) > min(EPSILON, DELTA * exp(-H(p))), where H is the
entropy in nats. This accepts everything that EXACT accepts, and more.

Rows with temperature 0 always use EXACT. As in `sample`, the noise depends only on the request's seed and
the absolute position. Drafts and targets of a position may share their noise, so acceptance and residual
use separate streams: the noise of `seed ^ ACCEPTANCE`, where u = exp(-E) of token 0 is uniform, and that of
`seed ^ RESIDUAL` for all tokens.

Kernel: `scan` rereads the target logits of these rows, and the draft model's. One program per query then
reduces each distribution to four numbers, which turn the score of any token into its probability, and
updates the target.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import EXACT, NAN_TOKEN, REJECTION, TYPICAL
from ..batch import Batch, iter_rows
from ..launch import next_power_of_2, use_triton
from ..speculation.proposal import Proposal
from ..table import Table
from . import noise, sample, top_k_top_p
from .scan import best_score, filters_tokens, scan
from .scores import NO_TOKEN, Inputs, load_scores, penalize, scores_of, this_query, update_max
from .top_k_top_p import order_key

EPSILON, DELTA = 0.09, 0.3  # for TYPICAL, the defaults of Medusa's reference implementation
ACCEPTANCE = tl.constexpr(0x5851F42D4C957F2D)  # arbitrary bits that separate the streams
RESIDUAL = tl.constexpr(0x14057B7EF767814F)
TILE, SUM_TILE = tl.constexpr(2048), tl.constexpr(4096)  # tokens of the vocabulary per iteration
_TYPICAL, _EPSILON, _DELTA = tl.constexpr(TYPICAL), tl.constexpr(EPSILON), tl.constexpr(DELTA)


def accept(targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal) -> Tensor:
    """Apply the acceptance rule to sampled targets [T] int32. Return the targets [T] int32 for `commit`."""
    if use_triton(logits):
        return launch(targets, logits, table, batch, proposal)
    return naive(targets, logits, table, batch, proposal, lazy=True)


def naive(
    targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal, lazy: bool = False
) -> Tensor:
    """Apply the rules. With `lazy`, process only the queries that verification reads, and sample their
    targets again, because a lazy `sample` may have skipped them."""
    rules = table.rule.masked_fill(table.temperature <= 0, EXACT).tolist()
    targets = targets.clone()
    for b, row in enumerate(iter_rows(batch)):
        s = row.request
        rule = rules[s] if s >= 0 else EXACT
        draft_logits = _drawn_from(proposal, batch, b) if rule == REJECTION else ()
        if rule != TYPICAL and not len(draft_logits):
            continue
        for node in row.walk(targets) if lazy else range(len(row.ids)):
            scores, position = scores_of(logits, table, batch, row, node)
            children, token = row.children(node), None
            if children and node < len(draft_logits):
                draft_scores, draft = draft_logits[node].float(), row.ids[node + 1]
                token = _rejection(scores, draft_scores, draft, s, position, table)
            if token is None:
                token = int(sample.draw(scores, s, position, table) if lazy else targets[row.start + node])
            if rule == TYPICAL and children and token != NAN_TOKEN:
                token = _typical(scores, [row.ids[c] for c in children], token, s, table)
            targets[row.start + node] = token
    return targets


def log_probs(scores: Tensor, s: int, table: Table) -> Tensor:
    """Return the log-probabilities [V] that request row s samples from; -inf for filtered tokens."""
    kept = scores.masked_fill(scores < top_k_top_p.naive(scores, s, table), float("-inf"))
    return ((kept - kept.amax()) / table.temperature[s]).log_softmax(-1)  # subtract first, for precision


def _drawn_from(proposal: Proposal, batch: Batch, b: int) -> Tensor | tuple[()]:
    """Return the logits [K, V] that the drafts of batch row b were drawn from, or () if they were not."""
    sampled = batch.parents is None if proposal.sampled is None else bool(proposal.sampled[b])
    return proposal.logits[b] if sampled and proposal.logits is not None else ()


def _rejection(scores: Tensor, logits: Tensor, draft: int, s: int, position: int, table: Table) -> int | None:
    """Return the target of a draft drawn from `logits`; None if p or q is undefined or the residual empty."""
    if table.penalized[s]:
        logits = penalize(logits, s, position, (), table)
    if not (torch.isfinite(scores.amax()) and torch.isfinite(logits.amax())):
        return None
    log_p, log_q = log_probs(scores, s, table), log_probs(logits, s, table)
    seed = int(table.seed[s])
    e = noise.naive(seed ^ ACCEPTANCE.value, position, scores.new_zeros(1, dtype=torch.int32)).exp()
    if e > log_q[draft] - log_p[draft]:  # exp(-e) < p / q
        return draft
    residual = log_p.exp() - log_q.exp()
    ids = (residual > 0).nonzero().squeeze(1)
    if not len(ids):  # p equals q after rounding
        return None
    value = residual[ids].log() - noise.naive(seed ^ RESIDUAL.value, position, ids)
    return int(ids[value.argmax()])


def _typical(scores: Tensor, drafts: list[int], x: int, s: int, table: Table) -> int:
    """Return the target by typical acceptance, given the target x of `sample`."""
    if x in drafts:
        return x
    p = log_probs(scores, s, table).exp()
    entropy = torch.special.entr(p).sum()
    likeliest = max(drafts, key=lambda d: float(p[d]))
    bound = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    return likeliest if p[likeliest] > bound else x


class Distribution(NamedTuple):
    """A query's distribution after top-k, top-p and min-p: the largest score; log sum exp((score - best) / T)
    over the kept tokens; their entropy in nats; the threshold as an `order_key`. See `log_prob`."""

    best: Any
    log_mass: Any
    entropy: Any
    min_key: Any


@triton.jit
def measure(scan, query):
    """Return the distribution of a query whose `best_score` is valid."""
    best, _invalid = best_score(scan, query)
    min_key, temperature = tl.full([], 0, tl.uint32), tl.load(scan.inputs.table.temperature + query.s)
    if filters_tokens(scan.inputs.table, query.s):
        _opened, min_key = top_k_top_p.threshold(scan, query, best)
    mass, weighted = tl.zeros([SUM_TILE], tl.float32), tl.zeros([SUM_TILE], tl.float32)
    for first in range(0, scan.inputs.table.vocab_size, SUM_TILE):
        scores = load_scores(scan.inputs, query, first + tl.arange(0, SUM_TILE))
        x = (scores - best) / temperature
        weight = tl.where(order_key(scores) >= min_key, tl.exp(x), 0.0)
        mass += weight
        weighted += tl.where(weight > 0, weight * x, 0.0)
    whole = tl.sum(mass)
    return Distribution(best, tl.log(whole), tl.log(whole) - tl.sum(weighted) / whole, min_key)


@triton.jit
def log_prob(scan, query, dist, ids):
    """Return the log-probabilities of token ids under `dist`, the distribution of a query; -inf for filtered
    tokens and for ids outside the vocabulary."""
    scores = load_scores(scan.inputs, query, tl.where(ids < 0, scan.inputs.table.vocab_size, ids))
    x = (scores - dist.best) / tl.load(scan.inputs.table.temperature + query.s)
    return tl.where(order_key(scores) >= dist.min_key, x - dist.log_mass, float("-inf"))


@triton.jit
def _decide(target_scan, draft_scan, targets, DRAWN: tl.constexpr, WIDTH: tl.constexpr):
    query = this_query(target_scan.inputs)
    if query.s < 0:
        return
    token = tl.load(targets + query.line)
    if token >= 0:
        p = measure(target_scan, query)
        if tl.load(target_scan.inputs.table.rule + query.s) == _TYPICAL:
            token = _decide_typical(target_scan, query, p, token, WIDTH)
        elif DRAWN:
            token = _decide_rejection(target_scan, query, p, draft_scan, token)
        tl.store(targets + query.line, token)


@triton.jit
def _decide_rejection(target_scan, query, p_dist, draft_scan, token):
    """Return the target by rejection sampling, or `token` if q is undefined or the residual is empty."""
    draft_query = this_query(draft_scan.inputs)
    _best, invalid = best_score(draft_scan, draft_query)
    if not invalid:
        q_dist, seed = measure(draft_scan, draft_query), tl.load(target_scan.inputs.table.seed + query.s)
        proposed = tl.load(target_scan.inputs.batch.input_ids + query.line + 1)
        log_p = log_prob(target_scan, query, p_dist, proposed)
        log_ratio = log_prob(draft_scan, draft_query, q_dist, proposed) - log_p
        if tl.exp(noise.log_e(seed ^ ACCEPTANCE, query.position, proposed * 0)) > log_ratio:
            token = proposed
        else:
            winner, drawn = tl.full([], float("-inf"), tl.float32), tl.full([], NO_TOKEN, tl.int32)
            for first in range(0, target_scan.inputs.table.vocab_size, TILE):
                ids = first + tl.arange(0, TILE)
                p = tl.exp(log_prob(target_scan, query, p_dist, ids))
                q = tl.exp(log_prob(draft_scan, draft_query, q_dist, ids))
                value = tl.log(tl.where(p - q > 0, p - q, 1.0))
                value -= noise.log_e(seed ^ RESIDUAL, query.position, ids)
                winner, drawn = update_max(winner, drawn, tl.where(p - q > 0, value, float("-inf")), ids)
            token = tl.where(winner > float("-inf"), drawn, token)
    return token


@triton.jit
def _decide_typical(target_scan, query, dist, token, WIDTH: tl.constexpr):
    start, i = query.start, tl.arange(0, WIDTH)
    if target_scan.inputs.batch.TREE:
        draft = (i > 0) & (i < query.n)
        parent = tl.load(target_scan.inputs.batch.parents + start + i, draft, other=-1)
        child = draft & (parent == query.node)
    else:
        child = i == query.node + 1
    ids = tl.load(target_scan.inputs.batch.input_ids + start + i, child, other=-1)
    probs = tl.where(child, tl.exp(log_prob(target_scan, query, dist, ids)), 0.0)
    largest = tl.max(probs)
    first = tl.min(tl.where(child & (probs == largest), i, WIDTH))
    likeliest = tl.sum(tl.where(i == first, ids, 0))
    is_draft = tl.max((ids == token).to(tl.int32)) > 0
    bound = tl.minimum(tl.exp(-dist.entropy) * _DELTA, _EPSILON)
    return tl.where((largest > bound) & (not is_draft), likeliest, token)


def launch(targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal) -> Tensor:
    B, Q, q, sampled = batch.num_rows, batch.max_q_len, proposal.logits, proposal.sampled
    if B == 0 or Q == 1:
        return targets
    if sampled is None and batch.parents is not None:
        q = None
    K, draft = 0 if q is None else q.shape[1], None
    # The number of queries of each row that a rule applies to, and of those that need q.
    index, follow = batch.rows.clamp(min=0), (batch.q_len - 1).clamp(min=0)
    rule = torch.where(table.temperature[index] > 0, table.rule[index], EXACT)
    drawn = rule == REJECTION if sampled is None else (rule == REJECTION) & sampled
    draws = torch.where(drawn, follow.clamp(max=K), 0).int()
    queries = torch.where(rule == TYPICAL, follow if batch.parents is None else batch.q_len, draws).int()
    target = scan(Inputs.of(logits, table, replace(batch, q_len=queries)), Q)
    if q is not None:
        inputs = Inputs.of(q.flatten(0, 1), table, replace(batch, q_len=draws), pitch=K)
        draft = scan(inputs, min(K, Q - 1))
    targets = targets.clone()
    _decide[(Q, B)](target, draft, targets, DRAWN=q is not None, WIDTH=next_power_of_2(Q), num_warps=16)
    return targets
