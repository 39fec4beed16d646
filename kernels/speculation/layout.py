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

from ..batch import Batch
from ..codes import RUNNING
from ..dispatch import use_native, use_triton
from ..launch import next_power_of_2
from ..native.call import call, proposal_words
from ..table import Table
from .proposal import Proposal

_RUNNING = tl.constexpr(RUNNING)
PAGES = 1024  # at most, per program


def lay_out(table: Table, rows: Tensor, proposal: Proposal, packed: bool = False) -> Batch:
    """The padded batch of `rows` [B] int32, request rows or -1, and their drafts; or the packed one. Never
    waits for the device on a GPU, unless packed."""
    if not use_triton(rows) and use_native(rows, torch.int32):
        return native(table, rows, proposal, packed)
    batch = (launch if use_triton(rows) else naive)(table, rows, proposal)
    return batch.packed() if packed else batch


def lay_out_text(
    table: Table, rows: Tensor, first: Tensor, count: Tensor, width: int, bound: int | None = None
) -> Batch:
    """See `Batch.of_grid`."""
    make = launch_text if use_triton(rows) else Batch.of_grid
    return make(table, rows, first, count, width, bound)


def naive(table: Table, rows: Tensor, proposal: Proposal) -> Batch:
    index = rows.clamp(min=0)
    count = torch.where(table.finished[index] == RUNNING, proposal.num_drafts + 1, 0)
    base = (table.num_tokens[index] - 1).clamp(min=0)
    chain = Batch.of_grid(table, rows, base, count, proposal.drafts.shape[1] + 1)
    input_ids = torch.cat((table.tokens[index, base][:, None], proposal.drafts), 1).flatten()
    if proposal.parents is None:
        return replace(chain, input_ids=input_ids)
    depth, ancestors = _depths_and_masks(proposal.parents)
    positions = torch.where(chain.slots >= 0, (base[:, None] + depth).flatten(), 0)
    parents = torch.cat((torch.zeros_like(rows)[:, None], proposal.parents), 1).flatten()
    return replace(chain, input_ids=input_ids, positions=positions, ancestors=ancestors, parents=parents)


def native(table: Table, rows: Tensor, proposal: Proposal, packed: bool = False) -> Batch:
    """By `native/speculation.cpp`, in one piece of memory."""
    B, k = proposal.drafts.shape
    per_row, per_token = [B, B, B, B, B * table.max_blocks], 3 if proposal.parents is None else 4
    size = sum(per_row) + B * (k + 1) * per_token
    memory = rows.new_empty(size)
    masks = None if proposal.parents is None else rows.new_empty(B * (k + 1), dtype=torch.int64)
    words = *proposal_words(proposal), rows, packed, memory, masks
    T, longest, kv_len = call("nanospec_lay_out", *table, *words, 0, 0, 0)[-3:]
    parts = torch.split_with_sizes(memory, [*per_row, *[T] * per_token, size - sum(per_row) - T * per_token])
    request, q_start, q_len, base_len, pages, input_ids, positions, slots, *rest = parts
    return Batch(
        request, input_ids, positions, slots, pages.view(B, table.max_blocks), q_start, q_len, base_len,
        longest if packed else k + 1, kv_len if packed else table.max_context,
        None if masks is None else masks[:T], None if masks is None else rest[0],
    )  # fmt: skip


def _depths_and_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """[B, K + 1] the depth of each place of trees [B, K], and [B * (K + 1)] the mask of its ancestors."""
    depths, masks = [], []
    for tree in parents.tolist():
        depth, mask = [0], [1]
        for i, parent in enumerate(tree, 1):
            depth.append(depth[parent] + 1)
            mask.append(mask[parent] | 1 << i)
        depths.append(depth)
        masks += [m - (1 << 64) if m >> 63 else m for m in mask]
    return (
        torch.tensor(depths, dtype=torch.int32, device=parents.device),
        torch.tensor(masks, dtype=torch.int64, device=parents.device),
    )


@triton.jit
def _store_row(
    table, batch, b, s, row, base, n, width,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Batch row b with n of `width` tokens from index `base` of request row `row` on, but for the tokens."""
    pages = table.block_table + row * table.max_blocks
    if tl.program_id(1) == 0:
        tl.store(batch.rows + b, s)
        tl.store(batch.q_start + b, b * width)
        tl.store(batch.q_len + b, n)
        tl.store(batch.base_len + b, base)
        i = tl.arange(0, WIDTH)
        index = tl.where(i < n, base + i, 0)
        block = tl.load(pages + index // BLOCK_SIZE, i < n, other=0)
        slot = tl.where(i < n, block * BLOCK_SIZE + index % BLOCK_SIZE, -1)
        tl.store(batch.slots + b * width + i, slot, i < width)
    # The row's pages, as far as the step reads them.
    j = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    used = (j < table.max_blocks) & (j * BLOCK_SIZE < base + n)
    out = batch.block_table + b.to(tl.int64) * table.max_blocks
    tl.store(out + j, tl.load(pages + j, used, other=0), used)


@triton.jit(do_not_specialize=["k"])
def _lay_out(
    table, rows, proposal, batch, k, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr
):
    b = tl.program_id(0)
    given = tl.load(rows + b)
    row = tl.maximum(given, 0).to(tl.int64)
    s = tl.where(tl.load(table.finished + row) == _RUNNING, given, -1)
    n = tl.where(s >= 0, tl.load(proposal.num_drafts + b) + 1, 0)
    base = tl.maximum(tl.load(table.num_tokens + row) - 1, 0)
    _store_row(table, batch, b, s, row, base, n, k + 1, BLOCK_SIZE, WIDTH, PAGES)
    if tl.program_id(1) == 0:
        i = tl.arange(0, WIDTH)
        last = tl.load(table.tokens + row * table.max_context + base)
        draft = tl.load(proposal.drafts + b * k + i - 1, (i > 0) & (i <= k), other=0)
        index, at = tl.where(i < n, base + i, 0), b * (k + 1) + i
        tl.store(batch.input_ids + at, tl.where(i == 0, last, draft), i <= k)
        if batch.TREE:
            depth = tl.zeros([WIDTH], tl.int32)
            mask = tl.full([WIDTH], 1, tl.int64)
            for node in range(1, k + 1):  # parents come first
                parent = tl.load(proposal.parents + b * k + node - 1)
                depth = tl.where(i == node, tl.sum(tl.where(i == parent, depth, 0)) + 1, depth)
                above = tl.sum(tl.where(i == parent, mask, 0))
                mask = tl.where(i == node, above | (tl.full([], 1, tl.int64) << node), mask)
            index = tl.where(i < n, base + depth, 0)
            parents = tl.load(proposal.parents + b * k + i - 1, (i > 0) & (i <= k), other=0)
            tl.store(batch.ancestors + at, mask, i <= k)
            tl.store(batch.parents + at, parents, i <= k)
        tl.store(batch.positions + at, index, i <= k)


@triton.jit(do_not_specialize=["width"])
def _lay_out_text(
    table, rows, first, count, batch, width,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    given = tl.load(rows + b)
    row = tl.maximum(given, 0).to(tl.int64)
    n = tl.where(given >= 0, tl.load(count + b), 0)
    base = tl.load(first + b)
    s = tl.where(n > 0, given, -1)
    _store_row(table, batch, b, s, row, base, n, width, BLOCK_SIZE, WIDTH, PAGES)
    if tl.program_id(1) == 0:
        i = tl.arange(0, WIDTH)
        index, at = tl.where(i < n, base + i, 0), b * width + i
        token = tl.load(table.tokens + row * table.max_context + index, i < width)
        tl.store(batch.input_ids + at, token, i < width)
        tl.store(batch.positions + at, index, i < width)


def launch(table: Table, rows: Tensor, proposal: Proposal) -> Batch:
    B, k = proposal.drafts.shape
    batch = _empty(table, rows, proposal)
    if B:
        grid, sizes = _grid(table, B, k + 1)
        _lay_out[grid](table, rows, proposal, batch.tensors, k, **sizes)
    return batch


def launch_text(
    table: Table, rows: Tensor, first: Tensor, count: Tensor, width: int, bound: int | None = None
) -> Batch:
    batch = _empty_chains(table, rows, width, bound or table.max_context)
    if len(rows):
        grid, sizes = _grid(table, len(rows), width)
        _lay_out_text[grid](table, rows, first, count, batch.tensors, width, **sizes)
    return batch


def _empty(table: Table, rows: Tensor, proposal: Proposal) -> Batch:
    """Memory for the padded batch of rows and their drafts."""
    batch = _empty_chains(table, rows, proposal.drafts.shape[1] + 1, table.max_context)
    if proposal.parents is None:
        return batch
    ancestors = rows.new_empty(batch.num_tokens, dtype=torch.int64)
    return replace(batch, ancestors=ancestors, parents=rows.new_empty(batch.num_tokens))


def _empty_chains(table: Table, rows: Tensor, width: int, bound: int) -> Batch:
    """Memory for a chain of `width` tokens per row."""
    B, new = len(rows), rows.new_empty
    T = B * width
    # In the order of its fields.
    return Batch(
        new(B), new(T), new(T), new(T), new(B, table.max_blocks), new(B), new(B), new(B), width, bound
    )


def _grid(table: Table, B: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    pages = min(PAGES, next_power_of_2(table.max_blocks))
    sizes = {"BLOCK_SIZE": table.block_size, "WIDTH": next_power_of_2(width), "PAGES": pages, "num_warps": 4}
    return (B, triton.cdiv(table.max_blocks, pages)), sizes
