"""The tokens of a step: their requests, their positions, and their slots in the KV cache.

A step scores T tokens in one flat array. Batch row b (one request) holds `q_len[b]` tokens, the first at
`q_start[b]`. There are two layouts: *padded*, where `q_start[b] = b * max_q_len` and all rows have the same
length, for captured steps; and *packed*, with rows back to back, for steps that are not captured. A padding
token has slot -1 and does not affect the results of other tokens.

Positions count from 0. Before the step, the cache holds `base_len[b]` entries of row b; query i of the row
is at cache index `base_len[b] + i`. It attends to cache index j if j < base_len[b], or if bit
j - base_len[b] of its ancestor mask is set. Without a mask, queries form a chain: j <= base_len[b] + i.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from . import MAX_DRAFTS
from .table import Table
from .transfer import upload

MAX_QUERIES = MAX_DRAFTS + 1  # per row of a tree batch: one bit each in an int64 ancestor mask


class Chunk(NamedTuple):
    """`num_tokens` consecutive tokens of a request row, starting at index `start`."""

    row: int
    start: int
    num_tokens: int


# The tensors of a batch as a kernel argument. TREE: whether `ancestors` and `parents` are set, because
# kernels cannot test whether a tuple element is None. (Kernels may pass such a tuple to a function but must
# not assign it to a variable, which would turn TREE into a tensor.)
Tensors = namedtuple(
    "Tensors", "rows input_ids positions slots block_table q_start q_len base_len ancestors parents TREE"
)


@dataclass(frozen=True, eq=False)
class Batch:
    """A flat batch of T tokens in B rows. All tensors are on the model's device."""

    rows: Tensor  # [B] int32, the request row of each batch row, -1 if inactive
    input_ids: Tensor  # [T] int32, any valid token ID for padding
    positions: Tensor  # [T] int32, rotary position of each token (0 for padding)
    slots: Tensor  # [T] int32, cache slot `block * block_size + offset`, -1 for padding
    block_table: Tensor  # [B, max_blocks] int32, blocks of each row; unspecified beyond base_len + q_len
    q_start: Tensor  # [B] int32, see the module docstring
    q_len: Tensor  # [B] int32, may be 0
    base_len: Tensor  # [B] int32
    max_q_len: int  # the largest q_len; in the padded layout, the padded length
    max_kv_len: int  # an upper bound of base_len + q_len
    # [T] int64 bit masks; bit i is set if a token attends to query i of its row (or is it). None for chains.
    ancestors: Tensor | None = None
    # [T] int32, set if `ancestors` is: index in its row of the parent of each query, 0 for the first.
    parents: Tensor | None = None
    # Whether these are prompt chunks: chains of any length. Not derived from q_len, so that the result of a
    # row does not depend on the lengths of other rows.
    prefill: bool = False

    @classmethod
    def from_chunks(cls, table: Table, chunks: Sequence[Chunk]) -> Batch:
        """Return a packed batch of prompt chunks for prefill. Does not synchronize with the device."""
        columns = upload([*zip(*chunks, strict=True)], torch.int32, table.device)
        rows, first, count = map(torch.clone, columns)  # aligns each to 16 bytes
        end = count.cumsum(0, dtype=torch.int32)
        start, num_tokens = end - count, sum(chunk.num_tokens for chunk in chunks)
        offset = torch.arange(num_tokens, dtype=torch.int32, device=table.device)
        b = torch.searchsorted(end, offset, right=True)  # [T] batch row of each token
        positions, blocks = offset + (first - start)[b], table.block_table[rows]
        return cls(
            rows=rows,
            input_ids=table.tokens[rows[b], positions],
            positions=positions,
            slots=slots_of(blocks, b, positions, table.block_size),
            block_table=blocks,
            q_start=start,
            q_len=count,
            base_len=first,
            max_q_len=max(1, *(chunk.num_tokens for chunk in chunks)),
            max_kv_len=max(chunk.start + chunk.num_tokens for chunk in chunks),
            prefill=True,
        )

    @classmethod
    def from_grid(
        cls, table: Table, rows: Tensor, first: Tensor, count: Tensor, width: int, bound: int | None = None
    ) -> Batch:
        """Return a batch of `count` [B] tokens of each request row in `rows` [B] int32, starting at index
        `first` [B], padded to `width`. Rows of -1 or with count 0 are inactive. `bound` is an upper bound of
        first + count, if known. Does not synchronize."""
        offset = torch.arange(width, dtype=torch.int32, device=rows.device)
        count = torch.where(rows >= 0, count, 0).int()
        inside = offset < count[:, None]
        positions = torch.where(inside, first[:, None] + offset, 0)  # [B, width]
        index = rows.clamp(min=0)
        blocks = table.block_table[index]
        b = torch.arange(len(rows), device=rows.device)[:, None]
        slots = torch.where(inside, slots_of(blocks, b, positions, table.block_size), -1)
        return cls(
            rows=torch.where(count > 0, rows, -1),
            input_ids=table.tokens[index[:, None], positions].flatten(),
            positions=positions.flatten().int(),
            slots=slots.flatten(),
            block_table=blocks,
            q_start=torch.arange(0, len(rows) * width, width, dtype=torch.int32, device=rows.device),
            q_len=count,
            base_len=first.int().contiguous(),
            max_q_len=width,
            max_kv_len=bound or table.max_context,
        )

    def to_packed(self) -> Batch:
        """Return this batch in the packed layout. Synchronizes with the device."""
        return self.select(self.grid_index, slice(None), self.q_len, self.base_len)

    def select(self, tokens: Tensor | slice, rows: Tensor | slice, q_len: Tensor, base_len: Tensor) -> Batch:
        """Return a packed batch of these flat tokens: `q_len` [B'] in each of these rows, after `base_len`
        [B'] cached ones. Synchronizes with the device."""
        return replace(
            self.select_tokens(tokens),
            rows=self.rows[rows],
            block_table=self.block_table[rows],
            q_start=(q_len.cumsum(0) - q_len).int(),
            q_len=q_len,
            base_len=base_len,
            max_q_len=max(int(q_len.max()), 1),
            max_kv_len=max(int((base_len + q_len).max()), 1),
        )

    def select_tokens(self, tokens: Tensor | slice) -> Batch:
        """Return this batch with these flat tokens only and unchanged rows."""
        names = ("input_ids", "positions", "slots", "ancestors", "parents")
        parts = {n: part[tokens] for n in names if (part := getattr(self, n)) is not None}
        return replace(self, **parts)

    @property
    def tensors(self) -> Tensors:
        """Return the tensors that kernels take."""
        tensors = (getattr(self, name) for name in Tensors._fields[:-1])
        return Tensors._make((*tensors, tl.constexpr(self.ancestors is not None)))

    @property
    def native_args(self) -> tuple[Tensor | int | None, ...]:
        """Return the fields of `Batch` in native/step.h."""
        tensors = (getattr(self, name) for name in Tensors._fields[:-1])
        return *tensors, self.num_rows, self.num_tokens, self.max_q_len, self.block_table.shape[1]

    @property
    def num_rows(self) -> int:
        return self.q_start.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    # The properties below are cached because the `naive` operations of all layers use them.

    @cached_property
    def padded(self) -> bool:
        """Whether the flat tokens form a [B, max_q_len] grid."""
        return self.num_tokens == self.num_rows * self.max_q_len

    @cached_property
    def grid(self) -> Tensor:
        """[B, max_q_len] int64: the flat index of each query; entries beyond q_len repeat a valid index."""
        i = torch.arange(self.max_q_len, device=self.q_start.device)
        last = (self.q_len - 1).clamp(min=0)
        index = self.q_start[:, None] + torch.minimum(i, last[:, None])
        return index.clamp(max=self.num_tokens - 1).long()  # q_start of an empty last row is T

    @cached_property
    def grid_index(self) -> Tensor:
        """Index b * max_q_len + i of each token except padding, [n] int64, in order."""
        i = torch.arange(self.max_q_len, device=self.q_start.device)
        return (i < self.q_len[:, None]).flatten().nonzero().squeeze(1)

    @cached_property
    def with_slot(self) -> Tensor:
        """Flat indices of the tokens that have a slot, [n] int64."""
        return (self.slots >= 0).nonzero().squeeze(1)


def slots_of(block_table: Tensor, b: Tensor, index: Tensor, block_size: int) -> Tensor:
    """Return the slots [...] int32 of cache indices [...] in rows b [...] of a table [B, max_blocks]."""
    return (block_table[b, index // block_size] * block_size + index % block_size).int()


class Row(NamedTuple):
    """A row of a batch in plain Python, for the `naive` operations that sample, accept and verify. Node 0
    is the last committed token; the other nodes are the drafts, which form a chain or a tree."""

    request: int  # the request row, -1 if inactive
    start: int  # flat index of the first token
    ids: list[int]  # token ID of each node
    parents: list[int]  # parent of each node

    def children(self, node: int) -> list[int]:
        """Return the children of `node` in ascending order."""
        return [c for c in range(1, len(self.ids)) if self.parents[c] == node]

    def drafts_to(self, node: int) -> list[int]:
        """Return the draft tokens on the path from the root to a node, including its own."""
        ids = []
        while node:
            ids.append(self.ids[node])
            node = self.parents[node]
        return ids

    def walk(self, targets: Tensor | Sequence[int]) -> Iterator[int]:
        """Yield the path of verification: from each node, the first child whose token is its target.

        The target of a node (`targets` [T], by flat index) is read after the node is yielded, so the caller
        may draw it at that point.
        """
        node = 0
        for _ in self.ids:  # bounded, so that it ends even if parents form a cycle
            yield node
            target = int(targets[self.start + node])
            accepted = [c for c in self.children(node) if self.ids[c] == target]
            if not accepted:
                break
            node = accepted[0]


def iter_rows(batch: Batch) -> Iterator[Row]:
    ids = batch.input_ids.tolist()
    parents = None if batch.parents is None else batch.parents.tolist()
    columns = (batch.rows.tolist(), batch.q_start.tolist(), batch.q_len.tolist())
    for s, start, n in zip(*columns, strict=True):
        tokens = slice(start, start + n)
        yield Row(s, start, ids[tokens], [0, *range(n - 1)] if parents is None else parents[tokens])
