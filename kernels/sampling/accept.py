"""Two further rules of acceptance: they change targets between `sample` and `commit`.

`commit` accepts a draft iff it equals the target of the token before it. A row of another rule (`rule` of
the table) gets other targets, and the same walk does the rest; rows that keep to EXACT keep theirs.

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

Kernel: `_select` lists the rows that ask, and programs of others end at once. `scan` goes over the logits
again, and over the draft's; `probabilities` reduces each distribution to four numbers; `_decide` changes
targets, at most one pass over the vocabulary for a residual draw. Limits: those of `sample` and `commit`.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import MAX_QUERIES, Batch
from ..codes import EXACT, NAN_TOKEN, REJECTION, TYPICAL
from ..dispatch import use_triton
from ..launch import next_power_of_2
from ..speculation.proposal import Proposal
from ..speculation.walk import rows_of
from ..table import Table
from . import noise, penalties, probabilities, sample, scan, top_k_top_p

EPSILON, DELTA = 0.09, 0.3  # of TYPICAL: the defaults of Medusa's reference implementation
ACCEPTANCE = tl.constexpr(0x5851F42D4C957F2D)  # arbitrary bits that tell the streams apart
RESIDUAL = tl.constexpr(0x14057B7EF767814F)
TILE = tl.constexpr(2048)  # tokens of the vocabulary per iteration
_EXACT, _REJECTION, _TYPICAL = tl.constexpr(EXACT), tl.constexpr(REJECTION), tl.constexpr(TYPICAL)
_EPSILON, _DELTA = tl.constexpr(EPSILON), tl.constexpr(DELTA)


def accept(targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal) -> Tensor:
    """The targets [T] int32 to verify the drafts of `proposal` against, from those of `sample`."""
    if use_triton(logits):
        return launch(targets, logits, table, batch, proposal)
    return naive(targets, logits, table, batch, proposal, lazy=True)


def naive(
    targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal, lazy: bool = False
) -> Tensor:
    """With `lazy` only the queries that verification will read get their targets, and `targets` may come
    from a lazy `sample`.
    """
    rules = table.rule.masked_fill(table.temperature <= 0, EXACT).tolist()
    targets = targets.clone()
    for b, row in enumerate(rows_of(batch)):
        s = row.request
        rule = rules[s] if s >= 0 else EXACT
        guesses = _drawn_from(proposal, batch, b) if rule == REJECTION else ()
        if rule != TYPICAL and not len(guesses):
            continue
        as_drawn = True  # whether `sample` has drawn the target here
        for place in row.walk(targets) if lazy else range(len(row.ids)):
            t, children = row.start + place, row.children(place)
            before = int(targets[t])
            if before == NAN_TOKEN:
                continue
            scores, position = sample.scores_of(logits, table, batch, row, place)
            token = None
            if children and place < len(guesses):
                token = _rejection(scores, guesses[place].float(), row.ids[place + 1], s, position, table)
            if token is None:
                token = before if as_drawn else int(sample.draw(scores, s, position, table))
            if rule == TYPICAL and children and token != NAN_TOKEN:
                token = _typical(scores, [row.ids[c] for c in children], token, s, table)
            as_drawn = as_drawn and (not lazy or token == before)
            targets[t] = token
    return targets


def _drawn_from(proposal: Proposal, batch: Batch, b: int) -> Tensor | tuple[()]:
    """[K, V]: the logits that the drafts of batch row b were drawn from, if they were drawn at all."""
    sampled = batch.parents is None if proposal.sampled is None else bool(proposal.sampled[b])
    return proposal.logits[b] if sampled and proposal.logits is not None else ()


def _rejection(scores: Tensor, guess: Tensor, draft: int, s: int, position: int, table: Table) -> int | None:
    """The target by rejection sampling; None where there is no p or no q."""
    if table.penalized[s]:
        guess = penalties.naive(guess, s, position, (), table)
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
    """The target by typical acceptance, where `sample` has drawn x."""
    if x in drafts:
        return x
    p = probabilities.naive(scores, s, table).exp()
    entropy = torch.special.entr(p).sum()
    likeliest = max(drafts, key=lambda d: float(p[d]))
    bound = (DELTA * (-entropy).exp()).clamp(max=EPSILON)
    return likeliest if p[likeliest] > bound else x


@triton.jit(do_not_specialize=["K", "pitch"])
def _select(batch, table, sampled, asking, drafts, K, pitch, WIDTH: tl.constexpr):
    """`asking`: the rows and queries of the batch that ask. `drafts`: a batch of the rows of draft logits
    that they need, each without a token before it."""
    b, j = tl.program_id(0), tl.arange(0, WIDTH)
    s, start, n = tl.load(batch.rows + b), tl.load(batch.q_start + b), tl.load(batch.q_len + b)
    asks = (s >= 0) & (tl.load(table.temperature + s, s >= 0, other=0.0) > 0)
    rule = tl.load(table.rule + s, asks, other=_EXACT)
    follow = tl.maximum(n - 1, 0)  # queries that a draft follows, of a chain
    drawn = rule == _REJECTION
    if sampled is not None:
        drawn = drawn & tl.load(sampled + b)
    num_draws = tl.where(drawn, tl.minimum(follow, K), 0)
    num_queries = tl.where(rule == _TYPICAL, n if batch.TREE else follow, num_draws)
    tl.store(asking.rows + b, tl.where(num_queries > 0, s, -1))
    tl.store(asking.q_len + b, num_queries)
    tl.store(drafts.rows + b, tl.where(num_draws > 0, s, -1))
    tl.store(drafts.q_len + b, num_draws)
    tl.store(drafts.q_start + b, b * pitch)
    position = tl.load(batch.positions + start + j, j < num_draws, other=0)
    tl.store(drafts.positions + b * pitch + j, position, j < K)
    tl.store(drafts.input_ids + b * pitch + j, tl.full([WIDTH], -1, tl.int32), j < K)


@triton.jit(do_not_specialize=["pitch"])
def _decide(inputs, p, guesses, q, targets, q_len, out, pitch, DRAWN: tl.constexpr, WIDTH: tl.constexpr):
    query = scan.this_query(inputs.batch)
    s, t, i = query[0], query[1], query[3]
    b = tl.program_id(1)
    if i >= tl.load(q_len + b):
        return
    token = tl.load(targets + t)
    if (s >= 0) & (token >= 0):
        if tl.load(inputs.table.rule + s) == _TYPICAL:
            token = _decide_typical(inputs, query, p, token, WIDTH)
        elif DRAWN:
            token = _decide_rejection(inputs, query, p, guesses, q, b * pitch + i, token)
    tl.store(out + t, token)


@triton.jit
def _decide_rejection(inputs, query, p, guesses, q, at, token):
    """`token`, the target's own draw, stays only where there is no q and no residual."""
    s, t, _, i, _ = query
    guess = (s, at, at, i * 0, i * 0)  # no drafts before it
    if tl.abs(tl.load(q.best + at)) < float("inf"):
        position, seed = tl.load(inputs.batch.positions + t) + 1, tl.load(inputs.table.seed + s)
        draft = tl.load(inputs.batch.input_ids + t + 1)
        log_p = probabilities.log_probs(inputs, query, p, draft)
        below = probabilities.log_probs(guesses, guess, q, draft) - log_p
        if tl.exp(noise.block(seed ^ ACCEPTANCE, position, draft * 0)) > below:
            token = draft
        else:
            winner = tl.full([], float("-inf"), tl.float32)
            for first in range(0, inputs.table.vocab_size, TILE):
                ids = first + tl.arange(0, TILE)
                residual = tl.exp(probabilities.log_probs(inputs, query, p, ids))
                residual -= tl.exp(probabilities.log_probs(guesses, guess, q, ids))
                value = tl.log(tl.where(residual > 0, residual, 1.0))
                value -= noise.block(seed ^ RESIDUAL, position, ids)
                high, lowest = top_k_top_p.best_of(tl.where(residual > 0, value, float("-inf")), ids)
                token = tl.where(high > winner, lowest, token)
                winner = tl.maximum(high, winner)
    return token


@triton.jit
def _decide_typical(inputs, query, p, token, WIDTH: tl.constexpr):
    _, t, start, i, n = query
    place = tl.arange(0, WIDTH)
    if inputs.batch.TREE:
        draft = (place > 0) & (place < n)
        child = draft & (tl.load(inputs.batch.parents + start + place, draft, other=-1) == i)
    else:
        child = place == i + 1
    ids = tl.load(inputs.batch.input_ids + start + place, child, other=-1)
    probs = tl.where(child, tl.exp(probabilities.log_probs(inputs, query, p, ids)), 0.0)
    largest = tl.max(probs)
    first = tl.min(tl.where(child & (probs == largest), place, WIDTH))
    likeliest = tl.sum(tl.where(place == first, ids, 0))
    drawn = tl.max((ids == token).to(tl.int32)) > 0
    bound = tl.minimum(tl.exp(-tl.load(p.entropy + t)) * _DELTA, _EPSILON)
    return tl.where((largest > bound) & (not drawn), likeliest, token)


def launch(targets: Tensor, logits: Tensor, table: Table, batch: Batch, proposal: Proposal) -> Tensor:
    B, Q = batch.num_rows, batch.max_q_len
    if Q > MAX_QUERIES:
        raise ValueError(f"{Q} tokens per row exceed the limit of {MAX_QUERIES}.")
    if B == 0 or Q == 1:
        return targets
    flat, K, pitch = _flatten(proposal, batch, logits.shape[1])
    N, width, new = 0 if flat is None else len(flat), next_power_of_2(Q), batch.rows.new_empty
    asking = replace(batch, rows=new(B), q_len=new(B))
    drafts = replace(
        batch, rows=new(B), input_ids=new(N), positions=new(N), q_start=new(B), q_len=new(B),
        ancestors=None, parents=None,
    )  # fmt: skip
    _select[(B,)](
        batch.tensors, table, proposal.sampled, asking.tensors, drafts.tensors, K, pitch,
        WIDTH=width, num_warps=1,
    )  # fmt: skip
    inputs = scan.Inputs.of(logits, table, asking)
    p = probabilities.measure(inputs, Q - 1 if batch.parents is None else Q)
    guesses = q = None
    if flat is not None:
        guesses = scan.Inputs.of(flat, table, drafts)
        q = probabilities.measure(guesses, K)
    out = torch.empty_like(targets)
    _decide[(Q, B)](
        inputs, p, guesses, q, targets, batch.q_len, out, pitch,
        DRAWN=flat is not None, WIDTH=width, num_warps=16,
    )  # fmt: skip
    return out


def _flatten(proposal: Proposal, batch: Batch, V: int) -> tuple[Tensor | None, int, int]:
    """The drafts' logits as [N, V], None if they were not drawn; how many drafts per row have some; the
    pitch: those of draft j of batch row b lie at b * pitch + j."""
    logits, B = proposal.logits, batch.num_rows
    if logits is None or logits.shape[1] == 0 or (batch.parents is not None and proposal.sampled is None):
        return None, 0, 0
    num_rows, K, vocab = logits.shape
    if (num_rows, vocab) != (B, V):
        raise ValueError(f"The drafts' logits must be [{B}, K, {V}], not {list(logits.shape)}.")
    outer, inner, element = logits.stride()
    pitch = K if B == 1 else outer // max(inner, 1)
    if element != 1 or (B > 1 and (outer != pitch * inner or pitch < K)):
        raise ValueError("The rows of the drafts' logits must be contiguous and evenly spaced.")
    flat = logits.as_strided(((B - 1) * pitch + K, V), (inner, 1))
    return flat, min(K, batch.max_q_len - 1), pitch
