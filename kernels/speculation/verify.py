"""Compare the drafts with the target's own tokens, append what holds to the history, and report it.

    targets      [T] int32            the target's token after each scored token (`sample`), NAN_TOKEN if none
    report       [B, ...] int32       what the host wants to know of each row, see `report.py`
    num_emitted  [B] int32            tokens the step yields: accepted drafts + 1, 0 for rows of length 0
    path         [B, max_q_len] int32   place in its row of the query that drew each emitted token, so
                                      that the KV of accepted tree nodes can be moved into place; 0 beyond

The rule: the target draws its own token x at each position. A draft is accepted iff it equals x; the
first that does not is replaced by x; if all match, the last x is the bonus. In a tree, go from each
node to the first child that carries x. So the emitted tokens are exactly those of decoding without
drafts.

The run of emitted tokens is cut after the first stop token and where the request holds `max_len` tokens,
whichever comes first. A NaN marker among them ends the row before it. `tokens`, `num_tokens`,
`output_counts` and `finished` of the table are updated in place. A row that has finished is left alone,
so that the device may run ahead of the host that retires it. No two batch rows may be the same request.

Kernel: one program of one warp per row, of at most 64 tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..codes import LENGTH, MAX_STOP_IDS, NAN, NAN_TOKEN, RUNNING, STOPPED
from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..native.call import batch_words, call
from ..table import Table
from . import report
from .proposal import Proposal
from .walk import rows_of

_RUNNING, _STOPPED = tl.constexpr(RUNNING), tl.constexpr(STOPPED)
_LENGTH, _NAN, _NAN_TOKEN = tl.constexpr(LENGTH), tl.constexpr(NAN), tl.constexpr(NAN_TOKEN)
STOPS = tl.constexpr(MAX_STOP_IDS)


class Verdict(NamedTuple):
    """See the module docstring."""

    report: Tensor
    num_emitted: Tensor
    path: Tensor


def commit(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    """Walk each row's drafts along the target's tokens, and append the tokens passed to its history."""
    if use_triton(targets):
        return launch(targets, batch, table, proposal)
    return (native if use_native(targets, torch.int32) else naive)(targets, batch, table, proposal)


def naive(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    """Decided in plain Python and written by few calls."""
    x, Q = targets.tolist(), batch.max_q_len
    lengths, codes = table.num_tokens.tolist(), table.finished.tolist()
    limits, stops = table.max_len.tolist(), table.stop_ids.tolist()
    drafts = (proposal.drafter.tolist(), proposal.match_len.tolist(), proposal.source.tolist())
    lines, num_emitted, paths = [], [], []
    written: list[tuple[int, int, int]] = []  # (request row, index, token)
    for row, drafter, match_len, source in zip(rows_of(batch), *drafts, strict=True):
        path, s, n = list(row.walk(x)), row.request, 0
        run = [x[row.start + place] for place in path]
        if s >= 0 and run and codes[s] == RUNNING:
            n, codes[s] = _kept(run, max(limits[s] - lengths[s], 0), stops[s])
            written += [(s, lengths[s] + i, token) for i, token in enumerate(run[:n])]
            lengths[s] += n
        code, num_drafts = codes[s] if s >= 0 else RUNNING, max(len(row.ids) - 1, 0)
        counts = [n, num_drafts, max(len(run) - 1, 0), drafter, match_len, code]
        lines.append(report.encode(run, path, counts, source, Q))
        num_emitted.append(len(run))
        paths.append(path + [0] * (Q - len(path)))
    if written:
        index, place, token = torch.tensor(written, device=table.device).unbind(1)
        table.tokens[index, place] = token.int()
        one = torch.ones_like(token, dtype=torch.int32)
        table.output_counts.index_put_((index, token), one, accumulate=True)
    table.num_tokens.copy_(torch.tensor(lengths, dtype=torch.int32))
    table.finished.copy_(torch.tensor(codes, dtype=torch.int8))
    columns = (lines, num_emitted, paths)
    return Verdict(*(torch.tensor(c, dtype=torch.int32, device=targets.device) for c in columns))


def _kept(run: list[int], left: int, stops: list[int]) -> tuple[int, int]:
    """Return how many of a run of tokens are kept where `left` more fit, and the row's code afterwards."""
    for n, token in enumerate(run[:left]):
        if token == NAN_TOKEN:
            return n, NAN
        if token in stops:
            return n + 1, STOPPED
    return min(len(run), left), LENGTH if len(run) >= left else RUNNING


def native(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    """By `native/step.cpp`."""
    B, Q = batch.num_rows, batch.max_q_len
    width = report.num_columns(Q)
    memory = targets.new_empty(B * (width + 1 + Q))
    words = *batch_words(batch), *proposal[:6], *proposal.drafts.shape
    call("nanospec_commit", *table, *words, targets, memory)
    lines, num_emitted, path = torch.split_with_sizes(memory, [B * width, B, B * Q])
    return Verdict(lines.view(B, width), num_emitted, path.view(B, Q))


class Walked(NamedTuple):
    """The walk through a row of n tokens: the tokens emitted [WIDTH] and their number, their path [WIDTH]."""

    n: Any
    emitted: Any
    count: Any
    path: Any


@triton.jit
def _walk(targets, batch, WIDTH: tl.constexpr):
    b, place = tl.program_id(0), tl.arange(0, WIDTH)
    start, n = tl.load(batch.q_start + b), tl.load(batch.q_len + b)
    inside = place < n
    draft = inside & (place > 0)
    x = tl.load(targets + start + place, inside, other=-1)
    ids = tl.load(batch.input_ids + start + place, inside, other=-1)
    if batch.TREE:
        parent = tl.load(batch.parents + start + place, draft, other=-1)
        path = tl.zeros([WIDTH], tl.int32)
        emitted = tl.full([WIDTH], -1, tl.int32)
        count, node = n * 0, tl.where(n > 0, 0, WIDTH)
        while (node < WIDTH) & (count < n):  # ends a walk in a circle too
            drawn = tl.sum(tl.where(place == node, x, 0))
            path = tl.where(place == count, node, path)
            emitted = tl.where(place == count, drawn, emitted)
            count += 1
            node = tl.min(tl.where(draft & (parent == node) & (ids == drawn), place, WIDTH))
    else:
        # The accepted run ends at the first draft that is not the target of the token before it.
        before = tl.load(targets + start + place - 1, draft, other=-1)
        count = tl.min(tl.where(draft & (ids != before), place, n))
        path = tl.where(place < count, place, 0)
        emitted = tl.where(place < count, x, -1)
    return Walked(n, emitted, count, path)


@triton.jit
def _append(table, s, emitted, count, WIDTH: tl.constexpr):
    """Append the first `count` of the `emitted` [WIDTH] tokens to request row s; return how many were kept,
    and the row's code afterwards."""
    never = 2 * WIDTH
    place, m = tl.arange(0, WIDTH), tl.arange(0, STOPS)
    stops = tl.load(table.stop_ids + s * table.num_stops + m, m < table.num_stops, other=-1)
    is_stop = tl.max((emitted[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    inside = place < count
    nan = tl.min(tl.where(inside & (emitted == _NAN_TOKEN), place, never))
    stop = tl.min(tl.where(inside & is_stop & (emitted != _NAN_TOKEN), place, never))
    start, limit = tl.load(table.num_tokens + s), tl.load(table.max_len + s)
    left = tl.maximum(limit - start, 0)
    kept = tl.minimum(tl.minimum(count, left), tl.minimum(nan, stop + 1))
    code = tl.where(nan == kept, _NAN, _RUNNING)
    code = tl.where(kept == left, _LENGTH, code)
    code = tl.where(kept == stop + 1, _STOPPED, code)

    keep = place < kept
    row = s.to(tl.int64)
    tl.store(table.tokens + row * table.max_context + start + place, emitted, keep)
    # Atomic, since a token may occur twice in the run.
    tl.atomic_add(table.output_counts + row * table.vocab_size + emitted, 1, keep, sem="relaxed")
    tl.store(table.num_tokens + s, start + kept)
    tl.store(table.finished + s, code.to(tl.int8))
    return kept, code


@triton.jit
def _commit(targets, batch, table, proposal, verdict, widths, WIDTH: tl.constexpr):
    b, place = tl.program_id(0), tl.arange(0, WIDTH)
    walked = _walk(targets, batch, WIDTH)
    tl.store(verdict.path + b * widths[0] + place, walked.path, place < widths[0])
    tl.store(verdict.num_emitted + b, walked.count)
    s, kept = tl.load(batch.rows + b), 0
    code = tl.load(table.finished + s, s >= 0, other=_RUNNING).to(tl.int32)
    if (s >= 0) & (code == _RUNNING) & (walked.count > 0):
        kept, code = _append(table, s, walked.emitted, walked.count, WIDTH)
    report.store(verdict.report, proposal, walked, kept, code, widths, WIDTH)


def launch(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    B, Q = batch.num_rows, batch.max_q_len
    shapes = (B, report.num_columns(Q)), (B,), (B, Q)
    verdict = Verdict(*map(batch.q_len.new_empty, shapes))
    widths, width = (Q, proposal.source.shape[1]), next_power_of_2(Q)
    if B:
        _commit[(B,)](targets, batch.tensors, table, proposal, verdict, widths, WIDTH=width, num_warps=1)
    return verdict
