"""The drafts that a drafter proposes for the rows of a step, and the batch that scores them.

Node 0 of a row is its last committed token; nodes 1 .. num_drafts are its drafts. In a chain, each draft
follows the previous one. In a tree, `parents` gives the node that each draft follows. Parents come before
their children, so the first n drafts of a tree form a tree too. Siblings are different tokens.

`lay_out` builds the batch, padded to K + 1 tokens per row or packed (`batch.py`). It validates the drafts:
those beyond the request's `max_len` are dropped, as are all from the first one that is outside the vocabulary
or has no earlier parent. Inactive (-1) and finished rows get q_len 0 and request row -1, so that
later operations skip them. The position of a tree node follows from its depth, and its mask from its
ancestors. Kernel: one program per row and 1024 cache blocks.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import RUNNING
from ..batch import Batch
from ..launch import next_power_of_2, use_native, use_triton
from ..native import call
from ..table import Table

_RUNNING = tl.constexpr(RUNNING)
BLOCKS = tl.constexpr(1024)  # entries of the block table per program


class Proposal(NamedTuple):
    """Up to K drafts for each of B rows. Entries beyond num_drafts are ignored."""

    drafts: Tensor  # [B, K] int32, draft tokens
    num_drafts: Tensor  # [B] int32
    source: Tensor  # [B, K] int32, index in the text that a draft was copied from, or a code of `..`
    match_len: Tensor  # [B] int32, length of the n-gram match, 0 if none
    drafter: Tensor  # [B] int32, index of the drafter in a method ("ngram+draft": 0, 1); unused if no drafts
    parents: Tensor | None = None  # [B, K] int32, trees only: the node 0 .. K that each draft follows


def empty_proposal(rows: Tensor, k: int, tree: bool) -> Proposal:
    """Return an uninitialized proposal for `rows` [B]."""
    B = len(rows)
    return Proposal(*map(rows.new_empty, [(B, k), (B,), (B, k), (B,), (B,), *[(B, k)] * tree]))


def merge(in_first: Tensor, first: Proposal, second: Proposal) -> Proposal:
    """Select rows of `first` where `in_first` [B] is true, and of `second` elsewhere."""

    def choose(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(in_first if one.dim() == 1 else in_first[:, None], one, other)

    is_tree = first.parents is not None or second.parents is not None
    parents = choose(parents_of(first), parents_of(second)) if is_tree else None
    return Proposal(*map(choose, first[:5], second[:5]))._replace(parents=parents)


def parents_of(proposal: Proposal) -> Tensor:
    """Return the parents [B, K] of a proposal, for a chain those of the equivalent tree."""
    if proposal.parents is not None:
        return proposal.parents
    B, k = proposal.drafts.shape
    return torch.arange(k, dtype=torch.int32, device=proposal.drafts.device).expand(B, k)


def draft_limits(table: Table, rows: Tensor, k: int) -> Tensor:
    """Return how many of k drafts each request row can use, [B] int32; 0 for inactive rows. A row that is one
    token short of `max_len` can use none, because the target always emits one token."""
    index = rows.clamp(min=0)
    left = torch.minimum(table.max_k[index], table.max_len[index] - table.num_tokens[index] - 1)
    active = (rows >= 0) & (table.finished[index] == RUNNING)
    return torch.where(active, left.clamp(0, k), 0)


@triton.jit
def draft_limit(table, s, k):
    """Return `draft_limits` of one request row."""
    row = tl.maximum(s, 0)
    left = tl.load(table.max_len + row) - tl.load(table.num_tokens + row) - 1
    left = tl.minimum(left, tl.load(table.max_k + row))
    active = (s >= 0) & (tl.load(table.finished + row) == _RUNNING)
    return tl.where(active, tl.minimum(tl.maximum(left, 0), k), 0)


def lay_out(table: Table, rows: Tensor, proposal: Proposal, packed: bool = False) -> Batch:
    """Return the batch that scores the drafts of request rows `rows` [B] int32 (-1: inactive), in the padded
    or packed layout. On a GPU, synchronizes only if packed."""
    if not use_triton(rows) and use_native(rows, torch.int32):
        return native(table, rows, proposal, packed)
    batch = (launch if use_triton(rows) else naive)(table, rows, proposal)
    return batch.to_packed() if packed else batch


def lay_out_text(
    table: Table, rows: Tensor, first: Tensor, count: Tensor, width: int, bound: int | None = None
) -> Batch:
    """Return `Batch.from_grid` of these arguments, on a GPU in one launch, for drafters that run a model."""
    if not use_triton(rows):
        return Batch.from_grid(table, rows, first, count, width, bound)
    return _fill(_empty(table, rows, width, bound=bound), table, rows, (first, count))


def naive(table: Table, rows: Tensor, proposal: Proposal) -> Batch:
    index, (B, k) = rows.clamp(min=0), proposal.drafts.shape
    base = (table.num_tokens[index] - 1).clamp(min=0)
    n = num_valid(proposal, table.max_len[index] - base - 2, table.vocab_size)
    count = torch.where(table.finished[index] == RUNNING, n + 1, 0)
    chain = Batch.from_grid(table, rows, base, count, k + 1)
    used = torch.arange(k, device=rows.device) < n[:, None]
    input_ids = torch.cat((table.tokens[index, base][:, None], proposal.drafts * used), 1).flatten()
    if proposal.parents is None:
        return replace(chain, input_ids=input_ids)
    parents = proposal.parents * used
    depth, ancestors = depths_and_masks(parents)
    positions = torch.where(chain.slots >= 0, (base[:, None] + depth).flatten(), 0)
    parents = torch.cat((rows.new_zeros(B, 1), parents), 1).flatten()
    return replace(chain, input_ids=input_ids, positions=positions, ancestors=ancestors, parents=parents)


def num_valid(proposal: Proposal, limit: Tensor, vocab_size: int) -> Tensor:
    """Return the number of valid drafts of each row, at most `limit` [B], [B] int32."""
    drafts, parents = proposal.drafts, proposal.parents
    valid = (drafts >= 0) & (drafts < vocab_size)
    if parents is not None:
        valid &= (parents >= 0) & (parents <= torch.arange(parents.shape[1], device=parents.device))
    return proposal.num_drafts.minimum(limit).minimum(valid.int().cumprod(1).sum(1)).clamp(min=0).int()


def depths_and_masks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the depth [B, K + 1] int32 and the ancestor mask [B * (K + 1)] int64 of each node of trees with
    `parents` [B, K]."""
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
    """Run `nanospec_lay_out` of `native/step.cpp`."""
    batch = _empty(table, rows, proposal.drafts.shape[1] + 1, proposal.parents is not None)
    words = *proposal, *proposal.drafts.shape, rows, packed, *batch.native_args
    T, longest, kv_len = call("nanospec_lay_out", *table, *words, 0, 0, 0)[-3:]
    return replace(batch.select_tokens(slice(T)), max_q_len=longest, max_kv_len=kv_len) if packed else batch


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


@triton.jit(do_not_specialize=["width"])
def _lay_out(table, rows, inputs, batch, width, TEXT: tl.constexpr, WIDTH: tl.constexpr):
    """`inputs`: a proposal; with TEXT, the first index and the number of tokens of each row."""
    b, i, block_size = tl.program_id(0), tl.arange(0, WIDTH), table.block_size
    s = tl.load(rows + b)
    row = tl.maximum(s, 0).to(tl.int64)
    text, blocks = table.tokens + row * table.max_context, table.block_table + row * table.max_blocks
    if TEXT:
        base, n = tl.load(inputs[0] + b), tl.where(s >= 0, tl.load(inputs[1] + b), 0)
    else:
        base = tl.maximum(tl.load(table.num_tokens + row) - 1, 0)
        drafted, is_draft = b * (width - 1) + i - 1, (i > 0) & (i < width)
        draft = tl.load(inputs.drafts + drafted, is_draft, other=0)
        valid = (draft >= 0) & (draft < table.vocab_size)
        if batch.TREE:
            parent = tl.load(inputs.parents + drafted, is_draft, other=0)
            valid &= (parent >= 0) & (parent < tl.maximum(i, 1))
        limit = tl.load(table.max_len + row) - base - 2
        limit = tl.minimum(tl.minimum(tl.load(inputs.num_drafts + b), limit), width - 1)
        drafts = tl.minimum(tl.maximum(limit, 0), tl.min(tl.where(valid, WIDTH, i - 1)))
        n = tl.where((s >= 0) & (tl.load(table.finished + row) == _RUNNING), drafts + 1, 0)
    # Copy the part of the row's block table that the step reads.
    j = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    used = (j < table.max_blocks) & (j * block_size < base + n)
    out = batch.block_table + b.to(tl.int64) * table.max_blocks
    tl.store(out + j, tl.load(blocks + j, used, other=0), used)
    if tl.program_id(1) == 0:
        tl.store(batch.rows + b, tl.where(n > 0, s, -1))
        tl.store(batch.q_start + b, b * width)
        tl.store(batch.q_len + b, n)
        tl.store(batch.base_len + b, base)
        at, depth, index = b * width + i, i, tl.where(i < n, base + i, 0)
        slot = tl.load(blocks + index // block_size, i < n, other=0) * block_size + index % block_size
        tl.store(batch.slots + at, tl.where(i < n, slot, -1), i < width)
        if TEXT:
            token = tl.load(text + index, i < width)
        else:
            token = tl.where(i > 0, tl.where(i <= drafts, draft, 0), tl.load(text + base))
            if batch.TREE:
                depth, mask = _depths_and_masks_of(inputs.parents + b * (width - 1), drafts, width - 1, WIDTH)
                tl.store(batch.ancestors + at, mask, i < width)
                tl.store(batch.parents + at, tl.where(i <= drafts, parent, 0), i < width)
        tl.store(batch.input_ids + at, token, i < width)
        tl.store(batch.positions + at, tl.where(i < n, base + depth, 0), i < width)


def launch(table: Table, rows: Tensor, proposal: Proposal) -> Batch:
    batch = _empty(table, rows, proposal.drafts.shape[1] + 1, proposal.parents is not None)
    return _fill(batch, table, rows, proposal)


def _empty(table: Table, rows: Tensor, width: int, tree: bool = False, bound: int | None = None) -> Batch:
    """Return an uninitialized batch of `width` tokens per row."""
    B, T, new = len(rows), len(rows) * width, rows.new_empty
    tensors = new(B), new(T), new(T), new(T), new(B, table.max_blocks), new(B), new(B), new(B)
    trees = (new(T, dtype=torch.int64), new(T)) if tree else ()
    return Batch(*tensors, width, bound or table.max_context, *trees)


def _fill(batch: Batch, table: Table, rows: Tensor, inputs: Proposal | tuple[Tensor, Tensor]) -> Batch:
    """Launch the kernel to fill `batch`."""
    if len(rows):
        grid, width = (len(rows), triton.cdiv(table.max_blocks, BLOCKS.value)), batch.max_q_len
        constants = {"TEXT": not isinstance(inputs, Proposal), "WIDTH": next_power_of_2(width)}
        _lay_out[grid](table, rows, inputs, batch.tensors, width, **constants, num_warps=4)
    return batch
