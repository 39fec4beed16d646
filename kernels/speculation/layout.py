"""The ends of a step: from request rows and drafts to a flat batch, and from results to a table.

`lay_out` gives every row K+1 tokens, the last committed one and its drafts, in the uniform layout of
`rows.py`. Rows that are padding (-1) or whose request has ended get q_len 0, slots of -1 and a running
row of -1, so that nothing after this needs to know why they take no part. Drafts that form trees get the
positions of their depth, and each the mask of its ancestors. `pack` drops the padding tokens.

    rows         [B] int32, request rows              running    [B] int32, -1 where not taking part
    finished     [S] int8                             input_ids  [B * (K+1)] int32
    tokens       [S, max_len] int32, num_tokens [S]   batch      `Batch`
    block_table  [S, max_blocks] int32
    proposal     `Proposal` of B rows, K drafts

`report` puts what the host wants to know into one table, so that it takes one copy:

    [B, 6 + 2 Q] int32: tokens kept; drafts; accepted drafts; who drafted; length of the match; finished
                        code; the tokens drawn, of which the kept ones count; the source of each (see
                        `Proposal.source`), OWN for those that were not drafted

Kernels: one program per row and 1024 pages, and one per row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..dispatch import use_triton
from ..launch import next_power_of_2
from .commit import RUNNING
from .proposal import OWN, Proposal
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
) -> tuple[Tensor, Tensor, Batch]:
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
) -> tuple[Tensor, Tensor, Batch]:
    index = rows.clamp(min=0).long()
    running = rows.masked_fill(finished[index] != RUNNING, -1)
    q_len = torch.where(running >= 0, proposal.num_drafts + 1, 0).int()
    base = (num_tokens[index] - 1).clamp(min=0)
    input_ids = torch.cat((tokens[index, base.long()][:, None], proposal.drafts), 1)
    place = torch.arange(k + 1, dtype=torch.int32, device=rows.device)
    inside = place < q_len[:, None]
    at = torch.where(inside, base[:, None] + place, 0)
    table = block_table[index]
    block = table.gather(1, (at // block_size).long())
    slots = torch.where(inside, block * block_size + at % block_size, -1)
    q_start = torch.arange(0, at.numel(), k + 1, dtype=torch.int32, device=rows.device)
    batch = Batch(at.flatten(), slots.flatten(), table, q_start, q_len, base, k + 1, tokens.shape[1])
    if proposal.parents is not None:
        depth, batch.ancestors, batch.parents = _shape_tree(proposal.parents)
        batch.positions = torch.where(inside, base[:, None] + depth, 0).flatten()
    return running, input_ids.flatten(), batch


def _shape_tree(parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Depth [B, K + 1] of the places of trees [B, K], and flat their masks and parents."""
    depths, masks, above = [], [], []
    for tree in parents.tolist():
        depth, mask = [0], [1]
        for i, parent in enumerate(tree, 1):
            depth.append(depth[parent] + 1)
            mask.append(mask[parent] | 1 << i)
        depths.append(depth)
        masks += [m - (1 << 64) if m >> 63 else m for m in mask]
        above += [0, *tree]
    device = parents.device
    return (
        torch.tensor(depths, dtype=torch.int32, device=device),
        torch.tensor(masks, dtype=torch.int64, device=device),
        torch.tensor(above, dtype=torch.int32, device=device),
    )


def pack(input_ids: Tensor, batch: Batch, max_kv_len: int) -> tuple[Tensor, Batch]:
    """The batch without its padding tokens, rows back to back. Waits for the device."""
    width = batch.max_q_len
    places = torch.arange(width, device=input_ids.device)
    keep = (places < batch.q_len[:, None]).flatten()
    packed = replace(
        batch,
        positions=batch.positions[keep],
        slots=batch.slots[keep],
        q_start=(batch.q_len.cumsum(0) - batch.q_len).int(),
        max_q_len=max(int(batch.q_len.max()), 1),
        max_kv_len=max_kv_len,
        ancestors=None if batch.ancestors is None else batch.ancestors[keep],
        parents=None if batch.parents is None else batch.parents[keep],
    )
    return input_ids[keep], packed


@triton.jit(do_not_specialize=["k"])
def _lay_out(
    rows, finished, tokens, tokens_stride, num_tokens, block_table, num_blocks, drafts, num_drafts, tree,
    running, input_ids, positions, slots, table, q_start, q_len, base_len, ancestors, parents, k,
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
        index = tl.where(i < n, base + i, 0)
        block = tl.load(block_table + row * num_blocks + index // BLOCK_SIZE, i < n, other=0)
        slot = tl.where(i < n, block * BLOCK_SIZE + index % BLOCK_SIZE, -1)
        at = b * (k + 1) + i
        tl.store(input_ids + at, tl.where(i == 0, last, draft), i <= k)
        tl.store(slots + at, slot, i <= k)
        if tree is not None:
            depth = tl.zeros([WIDTH], tl.int32)
            mask = tl.full([WIDTH], 1, tl.int64)
            for node in range(1, k + 1):  # parents come first
                parent = tl.load(tree + b * k + node - 1)
                depth = tl.where(i == node, tl.sum(tl.where(i == parent, depth, 0)) + 1, depth)
                above = tl.sum(tl.where(i == parent, mask, 0))
                mask = tl.where(i == node, above | (tl.full([], 1, tl.int64) << node), mask)
            index = tl.where(i < n, base + depth, 0)
            tl.store(ancestors + at, mask, i <= k)
            tl.store(parents + at, tl.load(tree + b * k + i - 1, (i > 0) & (i <= k), other=0), i <= k)
        tl.store(positions + at, index, i <= k)
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
) -> tuple[Tensor, Tensor, Batch]:
    if tokens.stride(1) != 1 or not block_table.is_contiguous():
        raise ValueError("Each request's tokens must be contiguous, and so must the block table.")
    B, num_blocks = len(rows), block_table.shape[1]
    input_ids, positions, slots = rows.new_empty(3, B * (k + 1))
    running, q_start, q_len, base_len = rows.new_empty(4, B)
    table = rows.new_empty(B, num_blocks)
    ancestors = parents = None
    if proposal.parents is not None:
        ancestors = torch.empty(B * (k + 1), dtype=torch.int64, device=rows.device)
        parents = rows.new_empty(B * (k + 1))
    blocks = min(1024, next_power_of_2(num_blocks))
    if B:
        _lay_out[(B, triton.cdiv(num_blocks, blocks))](
            rows, finished, tokens, tokens.stride(0), num_tokens, block_table, num_blocks,
            proposal.drafts, proposal.num_drafts, proposal.parents, running, input_ids, positions, slots,
            table, q_start, q_len, base_len, ancestors, parents, k,
            BLOCK_SIZE=block_size, WIDTH=next_power_of_2(k + 1), BLOCKS=blocks, num_warps=4,
        )  # fmt: skip
    batch = Batch(
        positions, slots, table, q_start, q_len, base_len, k + 1, tokens.shape[1], ancestors, parents
    )
    return running, input_ids, batch


def report(
    rows: Tensor, q_len: Tensor, proposal: Proposal, verdict: Verdict, kept: Tensor, finished: Tensor
) -> Tensor:
    """The table of the module docstring, [B, 6 + 2 Q] int32; `rows` as `lay_out` gave them."""
    implementation = report_launch if use_triton(rows) else report_naive
    return implementation(rows, q_len, proposal, verdict, kept, finished)


def report_naive(
    rows: Tensor, q_len: Tensor, proposal: Proposal, verdict: Verdict, kept: Tensor, finished: Tensor
) -> Tensor:
    codes, sources = finished.tolist(), proposal.source.tolist()
    columns = (kept, q_len, verdict.num_emitted, proposal.drafter, proposal.match_len, rows)
    lines = []
    for b, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        keep, n, emitted, drafter, match, s = row
        accepted = max(emitted - 1, 0)
        # The token drawn at one place of the path was drafted as the next.
        places = verdict.path[b, 1 : accepted + 1].tolist()
        source = [sources[b][place - 1] for place in places]
        lines.append(
            [keep, max(n - 1, 0), accepted, drafter, match, codes[max(s, 0)], *verdict.emitted[b].tolist()]
            + source
            + [OWN] * (verdict.emitted.shape[1] - len(source))
        )
    return torch.tensor(lines, dtype=torch.int32, device=rows.device)


@triton.jit(do_not_specialize=["Q", "k"])
def _report(
    rows, q_len, drafter, match_len, source, emitted, path, num_emitted, kept, finished, table, Q, k,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    out = table + b * (COLUMNS + 2 * Q)
    number = tl.load(num_emitted + b)
    tl.store(out, tl.load(kept + b))
    tl.store(out + 1, tl.maximum(tl.load(q_len + b) - 1, 0))
    tl.store(out + 2, tl.maximum(number - 1, 0))
    tl.store(out + 3, tl.load(drafter + b))
    tl.store(out + 4, tl.load(match_len + b))
    tl.store(out + 5, tl.load(finished + tl.maximum(tl.load(rows + b), 0)).to(tl.int32))
    i = tl.arange(0, WIDTH)
    tl.store(out + COLUMNS + i, tl.load(emitted + b * Q + i, i < Q, other=0), i < Q)
    # The token drawn at one place of the path was drafted as the next.
    accepted = (i + 1 < Q) & (i + 1 < number)
    draft = tl.load(path + b * Q + i + 1, accepted, other=1) - 1
    copied = tl.load(source + b * k + draft, accepted, other=-1)  # OWN
    tl.store(out + COLUMNS + Q + i, copied, i < Q)


def report_launch(
    rows: Tensor, q_len: Tensor, proposal: Proposal, verdict: Verdict, kept: Tensor, finished: Tensor
) -> Tensor:
    B, Q = verdict.emitted.shape
    table = rows.new_empty(B, NUM_COLUMNS + 2 * Q)
    if B:
        _report[(B,)](
            rows, q_len, proposal.drafter, proposal.match_len, proposal.source, verdict.emitted,
            verdict.path, verdict.num_emitted, kept, finished, table, Q, proposal.source.shape[1],
            WIDTH=next_power_of_2(Q), COLUMNS=NUM_COLUMNS, num_warps=1,
        )  # fmt: skip
    return table
