"""The ends of a padded step: from request rows and drafts to a flat batch, and from results to a table.

`lay_out` gives every row K+1 tokens, the last committed one and its drafts, in the uniform layout of
`rows.py`. Rows that are padding (-1) or whose request has ended get q_len 0, slots of -1 and a running
row of -1, so that nothing after this needs to know why they take no part.

    rows         [B] int32, request rows              running    [B] int32, -1 where not taking part
    finished     [S] int8                             input_ids  [B * (K+1)] int32
    tokens       [S, max_len] int32, num_tokens [S]   batch      `Rows`
    block_table  [S, max_blocks] int32
    drafts       [B, K] int32, num_drafts [B]

`report` puts what the host wants to know into one table, so that it takes one copy:

    [B, 6 + Q] int32: tokens kept; drafts; accepted drafts; source and length of the match; finished
                      code; the tokens drawn, of which the kept ones count
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .commit import RUNNING
from .dispatch import use_triton
from .launch import next_power_of_2
from .ngram import Proposal
from .rows import Rows
from .verify import Verdict

NUM_COLUMNS = 6  # of the table, before the tokens


def lay_out(
    rows: Tensor,
    proposal: Proposal,
    tokens: Tensor,
    num_tokens: Tensor,
    finished: Tensor,
    block_table: Tensor,
    block_size: int,
    k: int,
) -> tuple[Tensor, Tensor, Rows]:
    """(running, input_ids, batch); see the module docstring."""
    implementation = launch if use_triton(tokens) else naive
    return implementation(rows, proposal, tokens, num_tokens, finished, block_table, block_size, k)


def naive(
    rows: Tensor,
    proposal: Proposal,
    tokens: Tensor,
    num_tokens: Tensor,
    finished: Tensor,
    block_table: Tensor,
    block_size: int,
    k: int,
) -> tuple[Tensor, Tensor, Rows]:
    index = rows.clamp(min=0).long()
    running = rows.masked_fill(finished[index] != RUNNING, -1)
    q_len = torch.where(running >= 0, proposal.num_drafts + 1, 0).int()
    base = (num_tokens[index] - 1).clamp(min=0)
    input_ids = torch.cat((tokens[index, base.long()][:, None], proposal.drafts), 1)
    place = torch.arange(k + 1, dtype=torch.int32, device=rows.device)
    inside = place < q_len[:, None]
    positions = torch.where(inside, base[:, None] + place, 0)
    table = block_table[index]
    block = table.gather(1, (positions // block_size).long())
    slots = torch.where(inside, block * block_size + positions % block_size, -1)
    q_start = torch.arange(0, positions.numel(), k + 1, dtype=torch.int32, device=rows.device)
    batch = Rows(
        positions.flatten(), slots.flatten(), table, q_start, q_len, base, k + 1, tokens.shape[1]
    )
    return running, input_ids.flatten(), batch


@triton.jit(do_not_specialize=["k"])
def _lay_out(
    rows, finished, tokens, tokens_stride, num_tokens, block_table, num_blocks, drafts, num_drafts,
    running, input_ids, positions, slots, table, q_start, q_len, base_len, k,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    given = tl.load(rows + b)
    row = tl.maximum(given, 0).to(tl.int64)
    s = tl.where(tl.load(finished + row) == 0, given, -1)  # RUNNING
    n = tl.where(s >= 0, tl.load(num_drafts + b) + 1, 0)
    base = tl.maximum(tl.load(num_tokens + row) - 1, 0)
    if tl.program_id(1) == 0:
        tl.store(running + b, s)
        tl.store(q_start + b, b * (k + 1))
        tl.store(q_len + b, n)
        tl.store(base_len + b, base)
        i = tl.arange(0, WIDTH)
        last = tl.load(tokens + row * tokens_stride + base)
        draft = tl.load(drafts + b * k + i - 1, (i > 0) & (i <= k), other=0)
        position = tl.where(i < n, base + i, 0)
        block = tl.load(block_table + row * num_blocks + position // BLOCK_SIZE, i < n, other=0)
        slot = tl.where(i < n, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        at = b * (k + 1) + i
        tl.store(input_ids + at, tl.where(i == 0, last, draft), i <= k)
        tl.store(positions + at, position, i <= k)
        tl.store(slots + at, slot, i <= k)
    # The row's pages, as far as the step reads them.
    j = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    used = (j < num_blocks) & (j * BLOCK_SIZE < base + n)
    pages = tl.load(block_table + row * num_blocks + j, used, other=0)
    tl.store(table + b.to(tl.int64) * num_blocks + j, pages, used)


def launch(
    rows: Tensor,
    proposal: Proposal,
    tokens: Tensor,
    num_tokens: Tensor,
    finished: Tensor,
    block_table: Tensor,
    block_size: int,
    k: int,
) -> tuple[Tensor, Tensor, Rows]:
    if tokens.stride(1) != 1 or not block_table.is_contiguous():
        raise ValueError("Each request's tokens must be contiguous, and so must the block table.")
    B, num_blocks = len(rows), block_table.shape[1]
    input_ids, positions, slots = rows.new_empty(3, B * (k + 1))
    running, q_start, q_len, base_len = rows.new_empty(4, B)
    table = rows.new_empty(B, num_blocks)
    blocks = min(1024, next_power_of_2(num_blocks))
    if B:
        _lay_out[(B, triton.cdiv(num_blocks, blocks))](
            rows, finished, tokens, tokens.stride(0), num_tokens, block_table, num_blocks,
            proposal.drafts, proposal.num_drafts, running, input_ids, positions, slots, table,
            q_start, q_len, base_len, k,
            BLOCK_SIZE=block_size, WIDTH=next_power_of_2(k + 1), BLOCKS=blocks, num_warps=4,
        )  # fmt: skip
    batch = Rows(positions, slots, table, q_start, q_len, base_len, k + 1, tokens.shape[1])
    return running, input_ids, batch


def report(
    rows: Tensor, q_len: Tensor, proposal: Proposal, verdict: Verdict, kept: Tensor, finished: Tensor
) -> Tensor:
    """The table of the module docstring, [B, 6 + Q] int32; `rows` as `lay_out` gave them."""
    implementation = report_launch if use_triton(rows) else report_naive
    return implementation(rows, q_len, proposal, verdict, kept, finished)


def report_naive(
    rows: Tensor, q_len: Tensor, proposal: Proposal, verdict: Verdict, kept: Tensor, finished: Tensor
) -> Tensor:
    columns = (
        kept,
        (q_len - 1).clamp(min=0),
        (verdict.num_emitted - 1).clamp(min=0),
        proposal.source,
        proposal.match_len,
        finished[rows.clamp(min=0).long()].int(),
    )
    return torch.cat((torch.stack(columns, 1), verdict.emitted), 1)


@triton.jit(do_not_specialize=["Q"])
def _report(
    rows, q_len, source, match_len, emitted, num_emitted, kept, finished, table, Q, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    out = table + b * (COLUMNS + Q)
    tl.store(out, tl.load(kept + b))
    tl.store(out + 1, tl.maximum(tl.load(q_len + b) - 1, 0))
    tl.store(out + 2, tl.maximum(tl.load(num_emitted + b) - 1, 0))
    tl.store(out + 3, tl.load(source + b))
    tl.store(out + 4, tl.load(match_len + b))
    tl.store(out + 5, tl.load(finished + tl.maximum(tl.load(rows + b), 0)).to(tl.int32))
    i = tl.arange(0, WIDTH)
    tl.store(out + COLUMNS + i, tl.load(emitted + b * Q + i, i < Q, other=0), i < Q)


def report_launch(
    rows: Tensor, q_len: Tensor, proposal: Proposal, verdict: Verdict, kept: Tensor, finished: Tensor
) -> Tensor:
    B, Q = verdict.emitted.shape
    table = rows.new_empty(B, NUM_COLUMNS + Q)
    if B:
        _report[(B,)](
            rows, q_len, proposal.source, proposal.match_len, verdict.emitted, verdict.num_emitted, kept,
            finished, table, Q, WIDTH=next_power_of_2(Q), COLUMNS=NUM_COLUMNS, num_warps=1,
        )  # fmt: skip
    return table
