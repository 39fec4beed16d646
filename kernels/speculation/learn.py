"""Remember what the target said in a step (`recycled.py`), and how good the guesses of `grow.py` were.

    logits   [T, V]    of all tokens of the step, rejected drafts among them; their rows contiguous
    marks    what `grow` gave beside the proposal; None in steps without its drafts
    verdict  of `verify.commit`; needed with `marks` alone

Entries: each scored token gets what the target said behind it, and so does the pair that it makes with the
token before it in its path. If two tokens of a step have the same entry, the later one's stays, by the order
of the batch. Logits that are no numbers are left out.

Record of a request row: of each kind, the drafts of `grow` whose parent was right are counted: whether they
were right, and what was expected. All counts lose 1 - DECAY in each step with such drafts.

Kernel: `logprobs` finds the 8 likeliest; `_row`, a program per row, counts and says where its tokens' entries
are; `_store`, a program per token, writes what no later token writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..codes import NOBODY as NO_DRAFTER
from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..native.call import batch_words, call, proposal_words
from ..sampling import logprobs
from ..table import Table
from .grow import Marks
from .proposal import Proposal
from .recycled import ANY, CODES, ID_BITS, KINDS, MOST_CODE, NO_TOKEN, WIDTH, Recycled, place, place_of
from .verify import Verdict
from .walk import Row, rows_of

DECAY = 0.95

_DECAY, _KINDS, _WIDTH = tl.constexpr(DECAY), tl.constexpr(KINDS), tl.constexpr(WIDTH)
_NO_TOKEN, _NO_DRAFTER, _ANY = tl.constexpr(NO_TOKEN), tl.constexpr(NO_DRAFTER), tl.constexpr(ANY)
_CODES, _MOST_CODE, _ID_BITS = tl.constexpr(CODES), tl.constexpr(MOST_CODE), tl.constexpr(ID_BITS)
BLOCK = tl.constexpr(256)  # tokens that a program of `_store` compares its own with at once


def learn(
    state: Recycled, logits: Tensor, table: Table, batch: Batch, proposal: Proposal, marks: Marks | None,
    verdict: Verdict | None,
) -> None:  # fmt: skip
    """Write to `state`. Of `proposal`, drafters other than NOBODY are `grow`'s."""
    given = state, logits, table, batch, proposal, marks, verdict
    if use_triton(logits):
        launch(*given)
    else:
        (native if use_native(logits, torch.bfloat16, torch.float32) else naive)(*given)


def naive(
    state: Recycled, logits: Tensor, table: Table, batch: Batch, proposal: Proposal, marks: Marks | None,
    verdict: Verdict | None,
) -> None:  # fmt: skip
    entries = entries_of(logits)
    for b, row in enumerate(rows_of(batch)):
        if row.request < 0:
            continue
        if marks and verdict and len(row.ids) > 1 and int(proposal.drafter[b]) != NO_DRAFTER:
            path = set(verdict.path[b, : int(verdict.num_emitted[b])].tolist())
            count(state.record[row.request], row, path, marks.kind[b].tolist(), marks.expected[b].tolist())
        base, salt = int(batch.base_len[b]), int(state.salts[row.request])
        for i, token in enumerate(row.ids):
            before = row.ids[row.parents[i]] if i else NO_TOKEN
            if i == 0 and base:
                before = int(table.tokens[row.request, base - 1])
            for context in (ANY, before) if entries[row.start + i, 0] >= 0 else ():
                at = place(context, token, salt)
                state.entries[at.row], state.tags[at.row] = entries[row.start + i], at.tag


def entries_of(logits: Tensor) -> Tensor:
    """What `recycled.py` keeps of logits [T, V]: [T, WIDTH] int32."""
    T, V = logits.shape
    index = torch.arange(T, device=logits.device)
    found = logprobs.naive(logits, index, torch.zeros_like(index), min(WIDTH, V))
    code = (found.top * -CODES + 0.5).floor().clamp(max=MOST_CODE)
    entries = torch.full((T, WIDTH), -1, dtype=torch.int32, device=logits.device)
    said = (found.top > float("-inf")) & found.top[:, :1].isfinite()
    entries[:, : min(WIDTH, V)] = torch.where(said, found.top_ids | code.nan_to_num().int() << ID_BITS, -1)
    return entries


def count(record: Tensor, row: Row, path: set[int], kinds: list[int], expected: list[float]) -> None:
    """How many drafts of a row were right, and were expected to be, by kind [KINDS, 2]."""
    record *= DECAY
    for i in range(1, len(row.ids)):
        if row.parents[i] in path:
            record[kinds[i - 1]] += torch.tensor([float(i in path), expected[i - 1]])


def native(
    state: Recycled, logits: Tensor, table: Table, batch: Batch, proposal: Proposal, marks: Marks | None,
    verdict: Verdict | None,
) -> None:  # fmt: skip
    """By `native/recycle.cpp`."""
    if logits.stride(1) != 1 or logits.shape[1] != table.vocab_size:
        raise ValueError(f"Logits {list(logits.shape)} do not fit a table for {table.vocab_size} tokens.")
    call(
        "nanospec_learn", *table, *batch_words(batch), *proposal_words(proposal), *state,
        *(marks or (None, None)), *(verdict[1:] if verdict else (None, None)), logits, logits.stride(0),
        logits.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["k", "Q", "T"])
def _row(
    state, table, batch, proposal, marks, verdict, where, T, k, Q,
    MARKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    s, start, n = tl.load(batch.rows + b), tl.load(batch.q_start + b), tl.load(batch.q_len + b)
    inside = (i < n) & (s >= 0)
    row, base = tl.maximum(s, 0), tl.load(batch.base_len + b)
    parent = tl.maximum(i - 1, 0)
    if batch.TREE:
        parent = tl.load(batch.parents + start + i, inside, other=0)
    token = tl.load(batch.input_ids + start + i, inside, other=0)
    before = tl.load(batch.input_ids + start + parent, inside & (i > 0), other=0)
    text = table.tokens + row.to(tl.int64) * table.max_context
    first = tl.load(text + tl.maximum(base - 1, 0), base > 0, other=_NO_TOKEN)
    at, salt = where + start + i, tl.load(state.salts + row)
    own, own_tag = place_of(tl.full([], _ANY, tl.int32), token, salt)
    pair, pair_tag = place_of(tl.where(i > 0, before, first), token, salt)
    tl.store(at, own, inside)
    tl.store(at + T, own_tag, inside)
    tl.store(at + 2 * T, pair, inside)
    tl.store(at + 3 * T, pair_tag, inside)
    if MARKED:  # noqa: SIM102 (the compiler knows it)
        if (s >= 0) & (n > 1) & (tl.load(proposal.drafter + b) != _NO_DRAFTER):
            path = tl.load(verdict.path + b * Q + i, i < tl.load(verdict.num_emitted + b), other=-1)
            right = tl.max((path[None, :] == i[:, None]).to(tl.int32), 1)
            tried = tl.max((path[None, :] == parent[:, None]).to(tl.int32), 1) > 0
            counted = inside & (i > 0) & tried
            kind = tl.load(marks.kind + b * k + i - 1, counted, other=-1)
            each = tl.load(marks.expected + b * k + i - 1, counted, other=0.0)
            record = state.record + row * (2 * _KINDS)
            for one in tl.static_range(_KINDS):
                of_kind = kind == one
                hits = tl.sum(tl.where(of_kind, right, 0)).to(tl.float32)
                expected = tl.sum(tl.where(of_kind, each, 0.0))
                tl.store(record + 2 * one, tl.load(record + 2 * one) * _DECAY + hits)
                tl.store(record + 2 * one + 1, tl.load(record + 2 * one + 1) * _DECAY + expected)


@triton.jit(do_not_specialize=["T", "num_top"])
def _store(state, where, top, top_ids, T, num_top):
    t = tl.program_id(0)
    own, pair = tl.load(where + t), tl.load(where + 2 * T + t)
    j = tl.arange(0, _WIDTH)
    said = tl.load(top + t * num_top + j, j < num_top, other=float("-inf"))
    if (own >= 0) & (tl.abs(tl.max(said)) < float("inf")):
        later_own, later_pair = tl.zeros([BLOCK], tl.int32) + (own == pair), tl.zeros([BLOCK], tl.int32)
        for first in range(t + 1, T, BLOCK):
            other = first + tl.arange(0, BLOCK)
            better = tl.load(top + other * num_top, other < T, other=float("nan"))
            valid = (other < T) & (tl.abs(better) < float("inf"))
            a = tl.load(where + other, other < T, other=-1)
            b = tl.load(where + 2 * T + other, other < T, other=-1)
            later_own |= (valid & ((a == own) | (b == own))).to(tl.int32)
            later_pair |= (valid & ((a == pair) | (b == pair))).to(tl.int32)
        code = tl.minimum(tl.floor(said * -_CODES + 0.5), _MOST_CODE).to(tl.int32)
        ids = tl.load(top_ids + t * num_top + j, j < num_top, other=0)
        entry = tl.where(said > float("-inf"), ids | (code << _ID_BITS), -1)
        if tl.max(later_own) == 0:
            tl.store(state.entries + own.to(tl.int64) * _WIDTH + j, entry)
            tl.store(state.tags + own, tl.load(where + T + t))
        if tl.max(later_pair) == 0:
            tl.store(state.entries + pair.to(tl.int64) * _WIDTH + j, entry)
            tl.store(state.tags + pair, tl.load(where + 3 * T + t))


def launch(
    state: Recycled, logits: Tensor, table: Table, batch: Batch, proposal: Proposal, marks: Marks | None,
    verdict: Verdict | None,
) -> None:  # fmt: skip
    (T, V), B, Q = logits.shape, batch.num_rows, batch.max_q_len
    if not (T and B):
        return
    index = torch.arange(T, dtype=torch.int32, device=logits.device)
    found = logprobs.launch(logits, index, batch.input_ids, min(WIDTH, V))
    where = torch.full((4, T), -1, dtype=torch.int32, device=logits.device)  # padding is nobody's
    _row[(B,)](
        state, table, batch.tensors, proposal, marks, verdict, where, T, proposal.drafts.shape[1], Q,
        MARKED=marks is not None, WIDTH=next_power_of_2(Q), num_warps=1,
    )  # fmt: skip
    _store[(T,)](state, where, found.top, found.top_ids, T, min(WIDTH, V), num_warps=4)
