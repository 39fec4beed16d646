"""Choose how many drafts of each row to verify.

    q_len  [B] int32    tokens of each row in the step: the last committed one and the drafts to verify;
                        0 for inactive (-1) and finished rows

A draft can be verified if it is valid (a token of the vocabulary that follows an earlier node, as all drafts
before it) and leaves room for the target's token within the request's `max_len`. Which of these drafts are
verified depends on `Estimates`, which the host computes from the results of earlier steps. With chance(i),
the probability that draft i is accepted, and n the number of drafts with chance(i) >= threshold, the expected
speed of a step is

    (rows + sum of these chances) / ms(rows + n)    tokens per ms,

and the step verifies the drafts of the threshold, one of NUM_THRESHOLDS, with the highest speed. (As chances
fall along a row, this selects a prefix of each row.) If no requests wait for a row, the drafts of one row
should not slow down the others: see `Estimates.own`.

Kernel: one program for all rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import RUNNING
from ..launch import next_power_of_2, use_native, use_triton
from ..native import call
from ..table import Table
from .proposal import Proposal

_RUNNING = tl.constexpr(RUNNING)
NUM_THRESHOLDS = tl.constexpr(32)  # thresholds i / 31 for i = 31 .. 1, after one that no chance reaches
LONGEST = tl.constexpr(8)  # longer matches count as this long
NUM_COSTS = tl.constexpr(16)  # entries of `cost_at` and `cost_slope`


class Estimates(NamedTuple):
    """What the host knows about drafts and the time of steps. All tensors are views of one float32 buffer, so
    that a single copy updates them (`of`)."""

    keep_unmatched: Tensor  # [] drafts up to this number are always verified in rows without a match
    keep_matched: Tensor  # [] the same for rows with a match
    # [] the first batch row from this one on that has more drafts verifies one more; -1: none does.
    probe: Tensor
    # A step may be longer than one without drafts by at most `shared` * (its expected accepted drafts)
    # + `own` * (the least of any row: expected in this step, or `accepted`) + `margin`, all in ms.
    shared: Tensor  # [] ms that an accepted draft saves every row
    own: Tensor  # [] ms that it saves its own row
    margin: Tensor  # []
    min_match: Tensor  # [] the drafts of a model replace those of shorter matches
    # ms(n) = base_ms + sum of cost_slope * max(n - cost_at, 0), for a step of n tokens.
    base_ms: Tensor  # []
    cost_at: Tensor  # [NUM_COSTS]
    cost_slope: Tensor  # [NUM_COSTS]
    first: Tensor  # [D, LONGEST + 1] chance of a row's first draft, by drafter and match length (0: no match)
    further: Tensor  # [D, LONGEST + 1] chance of a draft after an accepted one
    factor: Tensor  # [S, 2] of `first` for each batch row: without and with a match
    accepted: Tensor  # [S] drafts accepted per step, for each batch row

    @classmethod
    def of(cls, buffer: Tensor, num_drafters: int) -> "Estimates":
        """Return the views of a buffer; the values of rows are last and may be any number."""
        n, costs, chances = len(NUMBERS), NUM_COSTS.value, num_drafters * (LONGEST.value + 1)
        sizes = [*[1] * n, costs, costs, chances, chances]
        *parts, rows = buffer.split([*sizes, len(buffer) - sum(sizes)])
        numbers, tables = [part.view([]) for part in parts[:n]], parts[n:]
        by_length = [part.view(num_drafters, -1) for part in tables[2:]]
        by_row = rows.view(-1, 3)
        return cls._make((*numbers, *tables[:2], *by_length, by_row[:, :2], by_row[:, 2]))

    @classmethod
    def empty(
        cls, num_drafters: int, num_rows: int, device: torch.device | str
    ) -> "tuple[Tensor, Estimates]":
        """Return a buffer and its views, for which a model drafts for all rows and all are verified."""
        size = len(NUMBERS) + 2 * NUM_COSTS.value + 2 * num_drafters * (LONGEST.value + 1) + 3 * num_rows
        buffer = torch.ones(size, dtype=torch.float32, device=device)
        estimates = cls.of(buffer, num_drafters)
        estimates.cost_slope.zero_()
        estimates.probe.fill_(-1)
        estimates.min_match.fill_(LONGEST.value + 1)
        return buffer, estimates


NUMBERS = Estimates._fields[: Estimates._fields.index("cost_at")]  # the fields that are single numbers


def trim(table: Table, rows: Tensor, proposal: Proposal, estimates: Estimates | None) -> Tensor:
    """Return `q_len` for request rows `rows` [B] int32. Without `estimates`, all valid drafts are kept."""
    if use_triton(rows):
        return launch(table, rows, proposal, estimates)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, proposal, estimates)


def naive(table: Table, rows: Tensor, proposal: Proposal, estimates: Estimates | None) -> Tensor:
    index = rows.clamp(min=0)
    active = (rows >= 0) & (table.finished[index] == RUNNING)
    if not proposal.drafts.shape[1]:
        return active.int()
    room = table.max_len[index] - table.num_tokens[index] - 1
    count = torch.where(active, num_valid(proposal, room, table.vocab_size), 0)
    if estimates is not None and count.any():
        count = _most_profitable(count, active, proposal, estimates)
    return torch.where(active, count + 1, 0).int()


def num_valid(proposal: Proposal, limit: Tensor, vocab_size: int) -> Tensor:
    """Return the number of valid drafts of each row, at most `limit` [B], [B] int32."""
    drafts, parents = proposal.drafts, proposal.parents
    valid = (drafts >= 0) & (drafts < vocab_size)
    if parents is not None:
        valid &= (parents >= 0) & (parents <= torch.arange(parents.shape[1], device=parents.device))
    return proposal.num_drafts.minimum(limit).minimum(valid.int().cumprod(1).sum(1)).clamp(min=0).int()


def _most_profitable(count: Tensor, active: Tensor, proposal: Proposal, e: Estimates) -> Tensor:
    """Return how many of the first `count` [B] drafts of each row to verify."""
    (B, k), device = proposal.drafts.shape, count.device
    length = proposal.match_len.clamp(0, LONGEST.value)
    drafter = proposal.drafter.clamp(0, len(e.first) - 1)
    matched = length > 0
    first = (e.first[drafter, length] * torch.where(matched, e.factor[:B, 1], e.factor[:B, 0])).clamp(max=1)
    i = torch.arange(k, device=device)
    proposed = i < count[:, None]
    chance = first[:, None] * e.further[drafter, length][:, None] ** i * proposed  # [B, k]
    forced = proposed & (i < torch.where(matched, e.keep_matched, e.keep_unmatched)[:, None])
    rank = torch.where(forced, 2.0, torch.where(proposed, chance, -1.0))  # first, by chance, never
    thresholds = torch.arange(NUM_THRESHOLDS.value, 0, -1, device=device) / (NUM_THRESHOLDS.value - 1)  # [N]
    kept = rank >= thresholds[:, None, None]  # [N, B, k]
    num_kept, gain = kept.sum((1, 2)), (kept * chance).sum((1, 2))
    num_rows = active.sum()
    ms, plain = _ms(num_rows + num_kept, e), _ms(num_rows[None], e)
    least = torch.where(active, chance.sum(1).maximum(e.accepted[:B]), torch.inf).min()
    fits = ms - plain <= e.shared * gain + e.own * least + e.margin
    fits[0] = True
    best = torch.where(fits, (num_rows + gain) / ms, -1.0).argmax()
    number = kept[best].sum(1).int()
    more = (number < count).nonzero().flatten()
    if e.probe >= 0 and len(more):
        number[more[(more < e.probe).sum() % len(more)]] += 1
    return number


def _ms(num_tokens: Tensor, e: Estimates) -> Tensor:
    """Return the ms of steps of `num_tokens` [N] tokens."""
    return e.base_ms + ((num_tokens[:, None] - e.cost_at).clamp(min=0) * e.cost_slope).sum(1)


def native(table: Table, rows: Tensor, proposal: Proposal, estimates: Estimates | None) -> Tensor:
    """Run `nanospec_trim` of `native/step.cpp`, which takes 10 us instead of 300."""
    q_len = torch.empty_like(rows)
    known = [0] * (len(Estimates._fields) + 1) if estimates is None else [*estimates, len(estimates.first)]
    call("nanospec_trim", *table, *proposal, *proposal.drafts.shape, rows, *known, q_len)
    return q_len


@triton.jit
def _cost(n, e):
    """Return the ms [N] of steps of n [N] tokens."""
    ms = tl.load(e.base_ms) + n * 0.0
    for i in tl.static_range(NUM_COSTS):
        ms += tl.load(e.cost_slope + i) * tl.maximum(n - tl.load(e.cost_at + i), 0.0)
    return ms


@triton.jit
def _count_valid(table, rows, proposal, k, B, ROWS: tl.constexpr, TREE: tl.constexpr):
    """Return whether rows [ROWS] are active, and the number of valid drafts of each."""
    b = tl.arange(0, ROWS)
    s = tl.load(rows + b, b < B, other=-1)
    row = tl.maximum(s, 0)
    active = (s >= 0) & (tl.load(table.finished + row) == _RUNNING)
    room = tl.load(table.max_len + row) - tl.load(table.num_tokens + row) - 1
    limit = tl.minimum(tl.load(proposal.num_drafts + b, active, other=0), room)
    limit = tl.where(active, tl.minimum(tl.maximum(limit, 0), k), 0)
    count = tl.zeros([ROWS], tl.int32)
    for i in range(k):
        inside = i < limit
        draft = tl.load(proposal.drafts + b * k + i, inside, other=-1)
        valid = inside & (draft >= 0) & (draft < table.vocab_size) & (count == i)
        if TREE:
            parent = tl.load(proposal.parents + b * k + i, inside, other=-1)
            valid = valid & (parent >= 0) & (parent <= i)
        count += valid.to(tl.int32)
    return active, count


@triton.jit(do_not_specialize=["sizes"])
def _trim(
    table, rows, proposal, e, q_len, sizes, ROWS: tl.constexpr, TREE: tl.constexpr, CHOOSE: tl.constexpr
):
    """CHOOSE: whether there are estimates `e`."""
    B, k, num_drafters = sizes
    b = tl.arange(0, ROWS)
    active, number = _count_valid(table, rows, proposal, k, B, ROWS, TREE)
    if CHOOSE:
        number = _most_profitable_of(active, number, proposal, e, k, B, num_drafters, ROWS)
    tl.store(q_len + b, tl.where(active, number + 1, 0), b < B)


@triton.jit
def _most_profitable_of(active, count, proposal, e, k, B, num_drafters, ROWS: tl.constexpr):
    """Return `_most_profitable`, [ROWS]."""
    b, t = tl.arange(0, ROWS), tl.arange(0, NUM_THRESHOLDS)
    length = tl.minimum(tl.maximum(tl.load(proposal.match_len + b, b < B, other=0), 0), LONGEST)
    drafter = tl.minimum(tl.maximum(tl.load(proposal.drafter + b, b < B, other=0), 0), num_drafters - 1)
    place = drafter * (LONGEST + 1) + length
    matched = (length > 0).to(tl.int32)
    first = tl.load(e.first + place) * tl.load(e.factor + b * 3 + matched, b < B, other=0.0)
    further = tl.load(e.further + place)
    forced = tl.where(matched > 0, tl.load(e.keep_matched), tl.load(e.keep_unmatched))
    threshold = (t - NUM_THRESHOLDS).to(tl.float32) / (1 - NUM_THRESHOLDS)
    num_kept = tl.zeros([NUM_THRESHOLDS, ROWS], tl.float32)
    gain = tl.zeros([NUM_THRESHOLDS, ROWS], tl.float32)
    chance, total = tl.minimum(first, 1.0), tl.zeros([ROWS], tl.float32)
    for i in range(k):
        own = tl.where(i < count, chance, 0.0)
        rank = tl.where(i < count, tl.where(i < forced, 2.0, chance), -1.0)
        kept = rank[None, :] >= threshold[:, None]
        num_kept += tl.where(kept, 1.0, 0.0)
        gain += tl.where(kept, own[None, :], 0.0)
        total += own
        chance *= further
    num_rows = tl.sum(active.to(tl.float32))
    gains = tl.sum(gain, 1)
    ms = _cost(num_rows + tl.sum(num_kept, 1), e)
    expected = tl.maximum(total, tl.load(e.accepted + b * 3, b < B, other=0.0))
    least = tl.min(tl.where(active, expected, float("inf")))
    allowed = tl.load(e.shared) * gains + tl.load(e.own) * least + tl.load(e.margin)
    rate = (num_rows + gains) / ms
    rate = tl.where((ms - _cost(num_rows + t * 0.0, e) <= allowed) | (t == 0), rate, -1.0)
    best = tl.min(tl.where(rate == tl.max(rate), t, NUM_THRESHOLDS))
    number = tl.sum(tl.where(t[:, None] == best, num_kept, 0.0), 0).to(tl.int32)
    probe, more = tl.load(e.probe).to(tl.int32), number < count
    turn = tl.where(b >= probe, b, b + ROWS)  # rows in the order of probing
    chosen = tl.min(tl.where(more, turn, 2 * ROWS))
    return number + ((probe >= 0) & more & (turn == chosen)).to(tl.int32)


def launch(table: Table, rows: Tensor, proposal: Proposal, estimates: Estimates | None) -> Tensor:
    (B, k), q_len = proposal.drafts.shape, rows.new_empty(len(rows))
    if B:
        sizes = B, k, 0 if estimates is None else len(estimates.first)
        constants = {"ROWS": next_power_of_2(B), "TREE": proposal.parents is not None}
        constants["CHOOSE"] = estimates is not None and k > 0
        warps = min(max(constants["ROWS"] // 16, 4), 16)  # up to 128 numbers per thread for 512 rows
        _trim[(1,)](table, rows, proposal, estimates, q_len, sizes, **constants, num_warps=warps)
    return q_len
