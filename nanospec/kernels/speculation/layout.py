"""Lay out the batch that scores the drafts of a step, or that a draft model computes.

The tokens of a row are those of its text from index `first` on, followed by `drafts`. In a step, `first` is
the last committed token (node 0), and `q_len` comes from `trim.py`. In a tree, the position of a node follows
from its depth, and its mask from its ancestors. Rows with `q_len` 0 get request row -1, so that later
operations skip them.

The kernel has one program per row and 1024 cache blocks. Its batch has room for `width` tokens per row. On a
CPU, the batch has the size of its tokens.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import Batch
from ..launch import next_power_of_2, use_native, use_triton
from ..native import call
from ..table import Table

BLOCKS = tl.constexpr(1024)  # entries of the block table per program


def lay_out(
    table: Table, rows: Tensor, first: Tensor, q_len: Tensor, width: int,
    drafts: Tensor | None = None, parents: Tensor | None = None,
) -> Batch:  # fmt: skip
    """Return a batch of `q_len` [B] tokens of each request row in `rows` [B], from index `first` [B] on; see
    the module docstring. All tensors are int32.

    `width`: an upper bound of `q_len`, which is 0 for inactive rows (-1). `drafts` [B, K]: the tokens after
    the text. `parents` [B, K]: for trees, the node that each draft follows.
    """
    if use_triton(rows):
        return launch(table, rows, first, q_len, width, drafts, parents)
    return (native if use_native(rows, torch.int32) else naive)(table, rows, first, q_len, drafts, parents)


def naive(
    table: Table, rows: Tensor, first: Tensor, q_len: Tensor, drafts: Tensor | None, parents: Tensor | None
) -> Batch:
    longest, kv_len = max(int(q_len.max()), 1), max(int((first + q_len).max()), 1)
    batch = Batch.from_text(table, rows, first, q_len, int(q_len.sum()), max_q_len=longest, max_kv_len=kv_len)
    if drafts is None or not drafts.shape[1]:
        return batch
    b = batch.row_of_token
    node = torch.arange(batch.num_tokens, device=rows.device) - batch.q_start[b]
    draft = first[b] + node - table.num_tokens[rows[b]]  # index among the drafts, < 0: in the text
    ids = torch.where(draft < 0, batch.input_ids, drafts[b, draft.clamp(min=0)])
    batch = replace(batch, input_ids=ids)
    if parents is None:
        return batch
    used = torch.arange(parents.shape[1], device=rows.device) < (q_len - 1)[:, None]
    depths, masks = depths_and_masks(torch.where(used, parents, 0))
    above = torch.where(node > 0, parents[b, (node - 1).clamp(min=0)], 0)
    return replace(batch, positions=first[b] + depths[b, node], ancestors=masks[b, node], parents=above)


def depths_and_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the depth [B, K + 1] int32 and the ancestor mask [B, K + 1] int64 of each node of trees with
    `parents` [B, K]."""
    depths, masks = [], []
    for tree in parents.tolist():
        depth, mask = [0], [1]
        for i, parent in enumerate(tree, 1):
            depth.append(depth[parent] + 1)
            mask.append(mask[parent] | (1 << i if i < 63 else -1 << 63))
        depths.append(depth)
        masks.append(mask)
    return parents.new_tensor(depths), parents.new_tensor(masks, dtype=torch.int64)


def native(
    table: Table, rows: Tensor, first: Tensor, q_len: Tensor, drafts: Tensor | None, parents: Tensor | None
) -> Batch:
    """Run `nanospec_lay_out` of `native/step.cpp`."""
    batch = _empty(table, rows, int(q_len.sum()), parents is not None)
    k = 0 if drafts is None else drafts.shape[1]
    results = call(
        "nanospec_lay_out", *table, rows, first, q_len, drafts, parents, k, *batch.native_args, 0, 0
    )
    return replace(batch, max_q_len=results[-2], max_kv_len=results[-1])


def _empty(table: Table, rows: Tensor, num_tokens: int, tree: bool, width: int = 1) -> Batch:
    """Return an uninitialized batch."""
    B, T, new = len(rows), num_tokens, rows.new_empty
    tensors = new(B), new(T), new(T), new(T), new(B, table.max_blocks), new(B), new(B), new(B)
    trees = (new(T, dtype=torch.int64), new(T)) if tree else ()
    return Batch(*tensors, width, table.max_context, *trees)


@triton.jit
def _depths_and_masks_of(parents, n, k, WIDTH: tl.constexpr):
    """Return `depths_and_masks` of one tree, [WIDTH] each. `parents` points to those of its k drafts, of
    which the first n are used."""
    i, depth = tl.arange(0, WIDTH), tl.zeros([WIDTH], tl.int32)
    mask = tl.full([WIDTH], 1, tl.int64)
    for node in range(1, k + 1):
        parent = tl.load(parents + node - 1, node <= n, other=0)
        depth = tl.where(i == node, tl.sum(tl.where(i == parent, depth, 0)) + 1, depth)
        above = tl.sum(tl.where(i == parent, mask, 0))
        mask = tl.where(i == node, above | (tl.full([], 1, tl.int64) << node), mask)
    return depth, mask


@triton.jit(do_not_specialize=["width", "k", "B"])
def _lay_out(
    table, rows, inputs, batch, num_used, width, k, B, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    DRAFTS: tl.constexpr,
):  # fmt: skip
    """`inputs`: `first`, `q_len`, `drafts` and `parents` of `lay_out`."""
    first, q_len, drafts, parents = inputs
    b, i, block_size = tl.program_id(0), tl.arange(0, WIDTH), table.block_size
    s = tl.load(rows + b)
    row = tl.maximum(s, 0).to(tl.int64)
    text, blocks = table.tokens + row * table.max_context, table.block_table + row * table.max_blocks
    base, n = tl.load(first + b), tl.load(q_len + b)
    # Copy the part of the row's block table that the step reads.
    j = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    used = (j < table.max_blocks) & (j * block_size < base + n)
    out = batch.block_table + b.to(tl.int64) * table.max_blocks
    tl.store(out + j, tl.load(blocks + j, used, other=0), used)
    if tl.program_id(1) == 0:
        other = tl.arange(0, ROWS)
        counts = tl.load(q_len + other, other < B, other=0)
        start, total = tl.sum(tl.where(other < b, counts, 0)), tl.sum(counts)
        tl.store(num_used, total, b == 0)
        tl.store(batch.rows + b, tl.where(n > 0, s, -1))
        tl.store(batch.q_start + b, start)
        tl.store(batch.q_len + b, n)
        tl.store(batch.base_len + b, base)
        inside, index, depth = i < n, base + i, i
        token = tl.load(text + index, inside & (index < table.max_context), other=0)
        if DRAFTS:
            at = index - tl.load(table.num_tokens + row)  # index among the drafts, < 0: in the text
            drafted = inside & (at >= 0)
            token = tl.where(drafted, tl.load(drafts + b * k + at, drafted, other=0), token)
        if batch.TREE:
            parent = tl.load(parents + b * k + i - 1, inside & (i > 0), other=0)
            depth, mask = _depths_and_masks_of(parents + b * k, n - 1, k, WIDTH)
            tl.store(batch.ancestors + start + i, mask, inside)
            tl.store(batch.parents + start + i, parent, inside)
        slot = tl.load(blocks + index // block_size, inside, other=0) * block_size + index % block_size
        tl.store(batch.input_ids + start + i, token, inside)
        tl.store(batch.positions + start + i, base + depth, inside)
        tl.store(batch.slots + start + i, slot, inside)
        # The unused tokens are at the end; each program fills those of an equal share.
        t = b * width + i
        unused = (i < width) & (t >= total)
        tl.store(batch.input_ids + t, 0, unused)
        tl.store(batch.positions + t, 0, unused)
        tl.store(batch.slots + t, -1, unused)


def launch(
    table: Table, rows: Tensor, first: Tensor, q_len: Tensor, width: int,
    drafts: Tensor | None = None, parents: Tensor | None = None,
) -> Batch:  # fmt: skip
    B = len(rows)
    batch = replace(_empty(table, rows, B * width, parents is not None, width), num_used=rows.new_empty(1))
    if B:
        grid, k = (B, triton.cdiv(table.max_blocks, BLOCKS.value)), 0 if drafts is None else drafts.shape[1]
        constants = {"WIDTH": next_power_of_2(width), "ROWS": next_power_of_2(B), "DRAFTS": k > 0}
        inputs = first, q_len, drafts, parents
        _lay_out[grid](
            table, rows, inputs, batch.tensors, batch.num_used, width, k, B, **constants, num_warps=4
        )
    return batch
