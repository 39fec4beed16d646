"""Verify the drafts against the target's own tokens, and append the emitted tokens to the history.

    targets      [T] int32            the target's token after each scored token (`sample`), or NAN_TOKEN
    report       [B, 6 + 2 Q] int32   one line per row for the host, see `report.py`
    num_emitted  [B] int32            accepted drafts + 1, before truncation; 0 for rows of length 0
    path         [B, Q] int32         index in the row of the query that each emitted token was sampled from,
                                      padded with zeros; `kv_move` moves the K/V of accepted tree nodes

The rule: the target draws its own token x at each position. A draft is accepted iff it equals x. The first
draft that differs is replaced by x; if all match, the last x is the bonus token. In a tree, verification
goes from each node to the first child that is x (`DraftTree.walk`). The emitted tokens are
therefore exactly those of decoding without speculation.

The emitted tokens are truncated after the first stop token, or where the request reaches `max_len` tokens,
whichever comes first. At NAN_TOKEN the request ends; this and later tokens are dropped. `tokens`,
`num_tokens`, `output_counts` and `finished` of the table are updated in place. Finished rows are not
changed, so the device may run ahead of the host. A request must not occur in two batch rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import FROM_TARGET, LENGTH, MAX_STOP_IDS, NAN, NAN_TOKEN, RUNNING, STOPPED
from ..batch import Batch, draft_trees
from ..launch import next_power_of_2, use_native, use_triton
from ..native import call
from ..table import Table
from .proposal import Proposal

_RUNNING, _STOPPED, _LENGTH, _NAN = map(tl.constexpr, (RUNNING, STOPPED, LENGTH, NAN))
_NAN_TOKEN, _FROM_TARGET, STOPS = map(tl.constexpr, (NAN_TOKEN, FROM_TARGET, MAX_STOP_IDS))
COUNTS = tl.constexpr(6)  # columns of a report that precede the tokens


class Verdict(NamedTuple):
    """The result of verification; see the module docstring."""

    report: Tensor  # [B, 6 + 2 Q] int32
    num_emitted: Tensor  # [B] int32
    path: Tensor  # [B, Q] int32


def commit(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    """Verify the drafts of each row and append the emitted tokens to its history."""
    if use_triton(targets):
        return launch(targets, batch, table, proposal)
    return (native if use_native(targets, torch.int32) else naive)(targets, batch, table, proposal)


def naive(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    tokens, Q = targets.tolist(), batch.max_q_len
    proposed = (proposal.drafter.tolist(), proposal.match_len.tolist(), proposal.source.tolist())
    lines, num_emitted, paths = [], [], []
    for tree, drafter, match_len, source in zip(draft_trees(batch), *proposed, strict=True):
        path = list(tree.walk(tokens))
        emitted = [tokens[tree.start + node] for node in path]
        kept, code = _append(table, tree.row, emitted)
        counts = [kept, max(len(tree.ids) - 1, 0), max(len(emitted) - 1, 0), drafter, match_len, code]
        # Emitted token i was the draft at node path[i + 1]; the last one was not a draft.
        drafted = [source[node - 1] for node in path[1:]]
        lines.append(counts + emitted + [-1] * (Q - len(path)) + drafted + [FROM_TARGET] * (Q - len(drafted)))
        num_emitted.append(len(emitted))
        paths.append(path + [0] * (Q - len(path)))
    columns = (lines, num_emitted, paths)
    return Verdict(*(torch.tensor(c, dtype=torch.int32, device=targets.device) for c in columns))


def _append(table: Table, s: int, emitted: list[int]) -> tuple[int, int]:
    """Append emitted tokens to request row s. Return the number kept, and the new value of `finished`."""
    kept, code = 0, int(table.finished[s]) if s >= 0 else RUNNING
    if s < 0 or not emitted or code != RUNNING:
        return 0, code
    length, stops = int(table.num_tokens[s]), table.stop_ids[s].tolist()
    left = max(int(table.max_len[s]) - length, 0)
    for token in emitted[:left]:
        if token == NAN_TOKEN:
            code = NAN
            break
        table.tokens[s, length + kept] = token
        table.output_counts[s, token] += 1
        kept += 1
        if token in stops:
            code = STOPPED
            break
    if code == RUNNING and kept == left:
        code = LENGTH
    table.num_tokens[s], table.finished[s] = length + kept, code
    return kept, code


def native(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    """Run `nanospec_commit` of `native/step.cpp`."""
    verdict = _empty(batch)
    words = *batch.native_args, *proposal, *proposal.drafts.shape
    call("nanospec_commit", *table, *words, targets, *verdict)
    return verdict


def _empty(batch: Batch) -> Verdict:
    B, Q = batch.num_rows, batch.max_q_len
    return Verdict(*map(batch.q_len.new_empty, ((B, COUNTS.value + 2 * Q), (B,), (B, Q))))


@triton.jit
def _walk(targets, batch, WIDTH: tl.constexpr):
    """Return the length of this program's row, its emitted tokens [WIDTH], their number, and their nodes
    [WIDTH]."""
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    start, n = tl.load(batch.q_start + b), tl.load(batch.q_len + b)
    inside = i < n
    draft, parent = inside & (i > 0), i - 1
    x = tl.load(targets + start + i, inside, other=-1)
    ids = tl.load(batch.input_ids + start + i, inside, other=-1)
    if batch.TREE:
        parent = tl.load(batch.parents + start + i, draft, other=-1)
    path, emitted = tl.zeros([WIDTH], tl.int32), tl.full([WIDTH], -1, tl.int32)
    count, node = n * 0, tl.where(n > 0, 0, WIDTH)
    while (node < WIDTH) & (count < n):  # ends even if parents form a cycle
        drawn = tl.sum(tl.where(i == node, x, 0))
        path = tl.where(i == count, node, path)
        emitted = tl.where(i == count, drawn, emitted)
        count += 1
        node = tl.min(tl.where(draft & (parent == node) & (ids == drawn), i, WIDTH))
    return n, emitted, count, path


@triton.jit
def _append_run(table, s, emitted, count, WIDTH: tl.constexpr):
    """Run `_append` on the first `count` of the `emitted` tokens [WIDTH]."""
    never = 2 * WIDTH
    i, m = tl.arange(0, WIDTH), tl.arange(0, STOPS)
    stops = tl.load(table.stop_ids + s * table.num_stops + m, m < table.num_stops, other=-1)
    is_stop = tl.max((emitted[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    inside = i < count
    nan = tl.min(tl.where(inside & (emitted == _NAN_TOKEN), i, never))
    stop = tl.min(tl.where(inside & is_stop & (emitted != _NAN_TOKEN), i, never))
    start, limit = tl.load(table.num_tokens + s), tl.load(table.max_len + s)
    left = tl.maximum(limit - start, 0)
    kept = tl.minimum(tl.minimum(count, left), tl.minimum(nan, stop + 1))
    code = tl.where(nan == kept, _NAN, _RUNNING)
    code = tl.where(kept == left, _LENGTH, code)
    code = tl.where(kept == stop + 1, _STOPPED, code)

    keep = i < kept
    row = s.to(tl.int64)
    tl.store(table.tokens + row * table.max_context + start + i, emitted, keep)
    # Atomic, because a token may be emitted twice.
    tl.atomic_add(table.output_counts + row * table.vocab_size + emitted, 1, keep, sem="relaxed")
    tl.store(table.num_tokens + s, start + kept)
    tl.store(table.finished + s, code.to(tl.int8))
    return kept, code


@triton.jit
def _commit(targets, batch, table, proposal, verdict, sizes, WIDTH: tl.constexpr):
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    Q, K = sizes
    n, emitted, count, path = _walk(targets, batch, WIDTH)
    tl.store(verdict.path + b * Q + i, path, i < Q)
    tl.store(verdict.num_emitted + b, count)
    s, kept = tl.load(batch.rows + b), 0
    code = tl.load(table.finished + s, s >= 0, other=_RUNNING).to(tl.int32)
    if (s >= 0) & (code == _RUNNING) & (count > 0):
        kept, code = _append_run(table, s, emitted, count, WIDTH)
    line = verdict.report + b * (COUNTS + 2 * Q)
    tl.store(line, kept)
    tl.store(line + 1, tl.maximum(n - 1, 0))
    tl.store(line + 2, tl.maximum(count - 1, 0))
    tl.store(line + 3, tl.load(proposal.drafter + b))
    tl.store(line + 4, tl.load(proposal.match_len + b))
    tl.store(line + 5, code)
    tl.store(line + COUNTS + i, emitted, i < Q)
    source = tl.load(proposal.source + b * K + path - 1, (i > 0) & (i < count), other=_FROM_TARGET)
    before = tl.where(i > 0, i - 1, Q - 1)  # column of this draft; the last column gets FROM_TARGET
    tl.store(line + COUNTS + Q + before, source, i < Q)


def launch(targets: Tensor, batch: Batch, table: Table, proposal: Proposal) -> Verdict:
    verdict, Q, K = _empty(batch), batch.max_q_len, proposal.source.shape[1]
    if batch.num_rows:
        _commit[(batch.num_rows,)](
            targets, batch.tensors, table, proposal, verdict, (Q, K), WIDTH=next_power_of_2(Q), num_warps=1
        )
    return verdict
