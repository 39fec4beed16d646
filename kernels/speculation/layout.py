"""From request rows to the batch of a step: with drafts to verify, or for a drafter to write ahead.

`lay_out` gives every row K + 1 tokens, the last committed one and its drafts, in the padded layout of
`batch.py`. Rows that are padding (-1) or whose request has ended get q_len 0, slots of -1 and a request
row of -1, so that nothing after this needs to know why they take no part. Drafts that form trees get the
positions of their depth, and each the mask of its ancestors.

`lay_out_text` is `Batch.of_grid` in one launch: tokens of the rows' own texts, no drafts.

Kernels: one program per row and 1024 pages.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import RUNNING
from ..batch import Batch
from ..launch import next_power_of_2, use_native, use_triton
from ..native.build import call
from ..table import Table
from .proposal import Proposal

_RUNNING = tl.constexpr(RUNNING)
PAGES = tl.constexpr(1024)  # per program


def lay_out(table: Table, rows: Tensor, proposal: Proposal, packed: bool = False) -> Batch:
    """Return the padded batch of `rows` [B] int32, request rows or -1, and their drafts; or the packed one.
    Never waits for the device on a GPU, unless packed."""
    if not use_triton(rows) and use_native(rows, torch.int32):
        return native(table, rows, proposal, packed)
    batch = (launch if use_triton(rows) else naive)(table, rows, proposal)
    return batch.packed() if packed else batch


def lay_out_text(
    table: Table, rows: Tensor, first: Tensor, count: Tensor, width: int, bound: int | None = None
) -> Batch:
    """See `Batch.of_grid`."""
    if not use_triton(rows):
        return Batch.of_grid(table, rows, first, count, width, bound)
    batch = _empty(table, rows, width, bound or table.max_context)
    if len(rows):
        WIDTH = next_power_of_2(width)
        _lay_out_text[_grid(batch)](table, rows, first, count, batch.tensors, width, WIDTH=WIDTH, num_warps=4)
    return batch


def naive(table: Table, rows: Tensor, proposal: Proposal) -> Batch:
    index, k = rows.clamp(min=0), proposal.drafts.shape[1]
    count = torch.where(table.finished[index] == RUNNING, proposal.num_drafts.clamp(0, k) + 1, 0)
    base = (table.num_tokens[index] - 1).clamp(min=0)
    chain = Batch.of_grid(table, rows, base, count, k + 1)
    input_ids = torch.cat((table.tokens[index, base][:, None], proposal.drafts), 1).flatten()
    if proposal.parents is None:
        return replace(chain, input_ids=input_ids)
    depth, ancestors = _depths_and_masks(proposal.parents)
    positions = torch.where(chain.slots >= 0, (base[:, None] + depth).flatten(), 0)
    parents = torch.cat((torch.zeros_like(rows)[:, None], proposal.parents), 1).flatten()
    return replace(chain, input_ids=input_ids, positions=positions, ancestors=ancestors, parents=parents)


def _depths_and_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, K + 1] int32, the depth of each place of trees [B, K], and [B * (K + 1)] int64, the mask of
    its ancestors. Parents come before their children."""
    depths, masks = [], []
    for tree in parents.tolist():
        depth, mask = [0], [1]
        for i, parent in enumerate(tree, 1):
            depth.append(depth[parent] + 1)
            mask.append(mask[parent] | (1 << i if i < 63 else -1 << 63))
        depths.append(depth)
        masks += mask
    return parents.new_tensor(depths), parents.new_tensor(masks, dtype=torch.int64)


def native(table: Table, rows: Tensor, proposal: Proposal, packed: bool = False) -> Batch:
    """By `native/step.cpp`, in one piece of memory."""
    B, k = proposal.drafts.shape
    per_row, per_token = [B, B, B, B, B * table.max_blocks], 3 if proposal.parents is None else 4
    size = sum(per_row) + B * (k + 1) * per_token
    memory = rows.new_empty(size)
    masks = None if proposal.parents is None else rows.new_empty(B * (k + 1), dtype=torch.int64)
    words = *proposal[:6], B, k, rows, packed, memory, masks
    T, longest, kv_len = call("nanospec_lay_out", *table, *words, 0, 0, 0)[-3:]
    parts = torch.split_with_sizes(memory, [*per_row, *[T] * per_token, size - sum(per_row) - T * per_token])
    request, q_start, q_len, base_len, pages, input_ids, positions, slots, *rest = parts
    return Batch(
        request, input_ids, positions, slots, pages.view(B, table.max_blocks), q_start, q_len, base_len,
        longest if packed else k + 1, kv_len if packed else table.max_context,
        None if masks is None else masks[:T], None if masks is None else rest[0],
    )  # fmt: skip


@triton.jit
def _store_span(table, batch, span, width, WIDTH: tl.constexpr):
    """Store a batch row but for its tokens and their positions: n <= `width` tokens from index `base` on of
    the text of request row s, which is at `row`; or s is -1 and n is 0."""
    s, row, base, n = span
    b, block_size = tl.program_id(0), table.block_size
    pages = table.block_table + row * table.max_blocks
    if tl.program_id(1) == 0:
        tl.store(batch.rows + b, s)
        tl.store(batch.q_start + b, b * width)
        tl.store(batch.q_len + b, n)
        tl.store(batch.base_len + b, base)
        i = tl.arange(0, WIDTH)
        index = tl.where(i < n, base + i, 0)
        block = tl.load(pages + index // block_size, i < n, other=0)
        slot = tl.where(i < n, block * block_size + index % block_size, -1)
        tl.store(batch.slots + b * width + i, slot, i < width)
    # The row's pages, as far as the step reads them.
    j = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    used = (j < table.max_blocks) & (j * block_size < base + n)
    out = batch.block_table + b.to(tl.int64) * table.max_blocks
    tl.store(out + j, tl.load(pages + j, used, other=0), used)


@triton.jit
def _depths_and_masks_of(parents, k, WIDTH: tl.constexpr):
    """`_depths_and_masks` of one tree, [WIDTH] each; `parents` points to those of its k drafts."""
    i, depth = tl.arange(0, WIDTH), tl.zeros([WIDTH], tl.int32)
    mask = tl.full([WIDTH], 1, tl.int64)
    for node in range(1, k + 1):
        parent = tl.load(parents + node - 1)
        depth = tl.where(i == node, tl.sum(tl.where(i == parent, depth, 0)) + 1, depth)
        above = tl.sum(tl.where(i == parent, mask, 0))
        mask = tl.where(i == node, above | (tl.full([], 1, tl.int64) << node), mask)
    return depth, mask


@triton.jit(do_not_specialize=["k"])
def _lay_out(table, rows, proposal, batch, k, WIDTH: tl.constexpr):
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    given = tl.load(rows + b)
    row = tl.maximum(given, 0).to(tl.int64)
    s = tl.where(tl.load(table.finished + row) == _RUNNING, given, -1)
    drafts = tl.minimum(tl.maximum(tl.load(proposal.num_drafts + b), 0), k)
    n = tl.where(s >= 0, drafts + 1, 0)
    base = tl.maximum(tl.load(table.num_tokens + row) - 1, 0)
    _store_span(table, batch, (s, row, base, n), k + 1, WIDTH)
    if tl.program_id(1) == 0:
        last = tl.load(table.tokens + row * table.max_context + base)
        at, is_draft = b * (k + 1) + i, (i > 0) & (i <= k)
        draft = tl.load(proposal.drafts + b * k + i - 1, is_draft, other=0)
        tl.store(batch.input_ids + at, tl.where(i == 0, last, draft), i <= k)
        depth = i
        if batch.TREE:
            depth, mask = _depths_and_masks_of(proposal.parents + b * k, k, WIDTH)
            parents = tl.load(proposal.parents + b * k + i - 1, is_draft, other=0)
            tl.store(batch.ancestors + at, mask, i <= k)
            tl.store(batch.parents + at, parents, i <= k)
        tl.store(batch.positions + at, tl.where(i < n, base + depth, 0), i <= k)


@triton.jit(do_not_specialize=["width"])
def _lay_out_text(table, rows, first, count, batch, width, WIDTH: tl.constexpr):
    b, i = tl.program_id(0), tl.arange(0, WIDTH)
    given = tl.load(rows + b)
    row = tl.maximum(given, 0).to(tl.int64)
    n = tl.where(given >= 0, tl.load(count + b), 0)
    base = tl.load(first + b)
    _store_span(table, batch, (tl.where(n > 0, given, -1), row, base, n), width, WIDTH)
    if tl.program_id(1) == 0:
        index, at = tl.where(i < n, base + i, 0), b * width + i
        token = tl.load(table.tokens + row * table.max_context + index, i < width)
        tl.store(batch.input_ids + at, token, i < width)
        tl.store(batch.positions + at, index, i < width)


def launch(table: Table, rows: Tensor, proposal: Proposal) -> Batch:
    B, k = proposal.drafts.shape
    batch = _empty(table, rows, k + 1, table.max_context)
    if proposal.parents is not None:
        ancestors = rows.new_empty(batch.num_tokens, dtype=torch.int64)
        batch = replace(batch, ancestors=ancestors, parents=rows.new_empty(batch.num_tokens))
    if B:
        WIDTH = next_power_of_2(k + 1)
        _lay_out[_grid(batch)](table, rows, proposal, batch.tensors, k, WIDTH=WIDTH, num_warps=4)
    return batch


def _empty(table: Table, rows: Tensor, width: int, bound: int) -> Batch:
    """Return memory for a chain of `width` tokens per row."""
    B, T, new = len(rows), len(rows) * width, rows.new_empty
    # In the order of its fields.
    return Batch(
        new(B), new(T), new(T), new(T), new(B, table.max_blocks), new(B), new(B), new(B), width, bound
    )


def _grid(batch: Batch) -> tuple[int, int]:
    return batch.num_rows, triton.cdiv(batch.block_table.shape[1], PAGES.value)
