"""Typical acceptance (Medusa; Cai et al., 2024): accept drafts that are likely enough, by changing targets.

`commit` accepts a draft iff it equals the target of the previous token. Between `sample` and `commit`, a row
with `typical` in the table gets new targets: if no draft that follows a query equals its sampled target, the
most likely of these drafts becomes the target if p(draft) > min(EPSILON, DELTA * exp(-H(p))). Here p is the
distribution that `sample` draws from, and H its entropy in nats. This accepts every draft that equals the
target, and more, so the distribution of the output changes. Rows with temperature 0 keep their targets.

Kernel: `scan` rereads the logits of these rows. One program per query then computes the entropy and the
probabilities of the drafts that follow it.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import NAN_TOKEN
from ..batch import Batch, draft_trees
from ..launch import next_power_of_2, use_triton
from ..table import Table
from . import sample, top_k_top_p
from .scan import best_score, filters_tokens, scan
from .scores import Inputs, load_scores, scores_of, this_query
from .top_k_top_p import order_key

EPSILON, DELTA = 0.09, 0.3  # the defaults of Medusa's reference implementation
TILE = tl.constexpr(4096)  # tokens of the vocabulary per iteration
_EPSILON, _DELTA = tl.constexpr(EPSILON), tl.constexpr(DELTA)


def accept_typical(targets: Tensor, logits: Tensor, table: Table, batch: Batch) -> Tensor:
    """Return the targets [T] int32 for `commit`, given the sampled ones."""
    if use_triton(logits):
        return launch(targets, logits, table, batch)
    return naive(targets, logits, table, batch, lazy=True)


def naive(targets: Tensor, logits: Tensor, table: Table, batch: Batch, lazy: bool = False) -> Tensor:
    """Apply typical acceptance. With `lazy`, process only the queries that verification reads, and sample
    their targets again, because a lazy `sample` may have skipped them."""
    applies = (table.typical & (table.temperature > 0)).tolist()
    targets = targets.clone()
    for tree in draft_trees(batch):
        s = tree.row
        if s < 0 or not applies[s]:
            continue
        for node in tree.walk(targets) if lazy else range(len(tree.ids)):
            scores, position = scores_of(logits, table, batch, tree, node)
            token = int(sample.draw(scores, s, position, table) if lazy else targets[tree.start + node])
            drafts = [tree.ids[c] for c in tree.children(node)]
            if drafts and token not in (NAN_TOKEN, *drafts):
                token = _likely_draft(scores, drafts, token, s, table)
            targets[tree.start + node] = token
    return targets


def _likely_draft(scores: Tensor, drafts: list[int], token: int, s: int, table: Table) -> int:
    """Return the most likely of `drafts` if it is likely enough, otherwise `token`."""
    p = log_probs(scores, s, table).exp()
    entropy = torch.special.entr(p).sum()
    likeliest = max(drafts, key=lambda d: float(p[d]))
    bound = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    return likeliest if p[likeliest] > bound else token


def log_probs(scores: Tensor, s: int, table: Table) -> Tensor:
    """Return the log-probabilities [V] that request row s samples from; -inf for filtered tokens."""
    kept = scores.masked_fill(scores < top_k_top_p.naive(scores, s, table), float("-inf"))
    return ((kept - kept.amax()) / table.temperature[s]).log_softmax(-1)  # subtract first, for precision


@triton.jit
def _probs_and_entropy(scan, query, ids):
    """Return the probabilities of token ids (-1: none) at a query, 0 for filtered tokens, and the entropy."""
    vocab_size, temperature = scan.inputs.table.vocab_size, tl.load(scan.inputs.table.temperature + query.s)
    best, _invalid = best_score(scan, query)
    min_key = tl.full([], 0, tl.uint32)
    if filters_tokens(scan.inputs.table, query.s):
        _opened, min_key = top_k_top_p.threshold(scan, query, best)
    mass, weighted = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for first in range(0, vocab_size, TILE):
        scores = load_scores(scan.inputs, query, first + tl.arange(0, TILE))
        x = (scores - best) / temperature
        weight = tl.where(order_key(scores) >= min_key, tl.exp(x), 0.0)
        mass += weight
        weighted += tl.where(weight > 0, weight * x, 0.0)
    whole = tl.sum(mass)
    entropy = tl.log(whole) - tl.sum(weighted) / whole
    scores = load_scores(scan.inputs, query, tl.where(ids < 0, vocab_size, ids))
    kept = (ids >= 0) & (order_key(scores) >= min_key)
    return tl.where(kept, tl.exp((scores - best) / temperature - tl.log(whole)), 0.0), entropy


@triton.jit
def _drafts_after(batch, query, WIDTH: tl.constexpr):
    """Return the tokens [WIDTH] of the drafts that follow a query, by node of the row; -1 elsewhere."""
    i = tl.arange(0, WIDTH)
    if batch.TREE:
        is_draft = (i > 0) & (i < query.n)
        follows = is_draft & (tl.load(batch.parents + query.start + i, is_draft, other=-1) == query.node)
    else:
        follows = i == query.node + 1
    return tl.load(batch.input_ids + query.start + i, follows, other=-1)


@triton.jit
def _accept_typical(scan, targets, WIDTH: tl.constexpr):
    query = this_query(scan.inputs)
    if query.s < 0:
        return
    token = tl.load(targets + query.line)
    if token >= 0:
        drafts, i = _drafts_after(scan.inputs.batch, query, WIDTH), tl.arange(0, WIDTH)
        probs, entropy = _probs_and_entropy(scan, query, drafts)
        largest = tl.max(probs)
        first = tl.min(tl.where((drafts >= 0) & (probs == largest), i, WIDTH))
        likeliest = tl.sum(tl.where(i == first, drafts, 0))
        is_draft = tl.max((drafts == token).to(tl.int32)) > 0
        bound = tl.minimum(tl.exp(-entropy) * _DELTA, _EPSILON)
        tl.store(targets + query.line, tl.where((largest > bound) & (not is_draft), likeliest, token))


def launch(targets: Tensor, logits: Tensor, table: Table, batch: Batch) -> Tensor:
    B, Q = batch.num_rows, batch.max_q_len
    if B == 0 or Q == 1:
        return targets
    index = batch.rows.clamp(min=0)
    applies = table.typical[index] & (table.temperature[index] > 0)
    with_drafts = batch.q_len - 1 if batch.parents is None else batch.q_len  # in a chain, all but the last
    queries = torch.where(applies, with_drafts.clamp(min=0), 0).int()
    scanned = scan(Inputs.of(logits, table, replace(batch, q_len=queries)), Q)
    targets = targets.clone()
    _accept_typical[(Q, B)](scanned, targets, WIDTH=next_power_of_2(Q), num_warps=16)
    return targets
