"""The tokens of a forward pass: their requests, their positions, and their slots in the KV cache.

A batch has room for T tokens in one flat array. Batch row b (one request) holds `q_len[b]` tokens, the first
at `q_start[b]`; rows follow each other without gaps. Where the host does not know the number of tokens
without waiting for the device, T is a capacity: `num_used` tokens are in use, and kernels skip the rest,
which have slot -1. Results of tokens that are in no row are undefined.

Positions count from 0. Before the pass, the cache holds `base_len[b]` entries of row b; query i of the row
is at cache index `base_len[b] + i`. It attends to cache index j if j < base_len[b], or if bit
j - base_len[b] of its ancestor mask is set. Without a mask, queries form a chain: j <= base_len[b] + i.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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
    input_ids: Tensor  # [T] int32, any valid token ID for unused tokens
    positions: Tensor  # [T] int32, rotary position of each token, 0 for unused ones
    slots: Tensor  # [T] int32, cache slot `block * block_size + offset`, -1 for unused tokens
    block_table: Tensor  # [B, max_blocks] int32, blocks of each row; unspecified beyond base_len + q_len
    q_start: Tensor  # [B] int32, the flat index of the first token of each row
    q_len: Tensor  # [B] int32, may be 0
    base_len: Tensor  # [B] int32
    max_q_len: int  # an upper bound of q_len
    max_kv_len: int  # an upper bound of base_len + q_len
    # [T] int64 bit masks; bit i is set if a token attends to query i of its row (or is it). None for chains.
    ancestors: Tensor | None = None
    # [T] int32, set if `ancestors` is: index in its row of the parent of each query, 0 for the first.
    parents: Tensor | None = None
    num_used: Tensor | None = None  # [1] int32, the number of tokens in use; None: all
    # Whether these are prompt chunks: chains of any length. Not derived from q_len, so that the result of a
    # row does not depend on the lengths of other rows.
    prefill: bool = False

    @classmethod
    def from_text(
        cls, table: Table, rows: Tensor, first: Tensor, q_len: Tensor, num_tokens: int, **fields: Any
    ) -> Batch:
        """Return a batch of `q_len` [B] tokens of the text of each request row in `rows` [B], from index
        `first` [B] on (all int32), `num_tokens` in total. Does not synchronize with the device."""
        end = q_len.cumsum(0, dtype=torch.int32)
        start = end - q_len
        t = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
        b = torch.searchsorted(end, t, right=True)  # [T] batch row of each token
        positions, index = t + (first - start)[b], rows.clamp(min=0)
        blocks = table.block_table[index]
        return cls(
            rows=torch.where(q_len > 0, rows, -1),
            input_ids=table.tokens[index[b], positions],
            positions=positions,
            slots=slots_of(blocks, b, positions, table.block_size),
            block_table=blocks,
            q_start=start,
            q_len=q_len,
            base_len=first,
            **fields,
        )

    @classmethod
    def from_chunks(cls, table: Table, chunks: Sequence[Chunk], prefill: bool = True) -> Batch:
        """Return a batch of chunks of prompts. Does not synchronize with the device."""
        columns = upload([*zip(*chunks, strict=True)], torch.int32, table.device)
        rows, first, count = map(torch.clone, columns)  # aligns each to 16 bytes
        longest = max(1, *(chunk.num_tokens for chunk in chunks))
        bounds = {"max_q_len": longest, "max_kv_len": max(chunk.start + chunk.num_tokens for chunk in chunks)}
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return cls.from_text(table, rows, first, count, num_tokens, prefill=prefill, **bounds)

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

    @cached_property
    def row_of_token(self) -> Tensor:
        """[T] int64, the batch row of each token in use."""
        t = torch.arange(self.num_tokens, dtype=torch.int32, device=self.q_start.device)
        return torch.searchsorted(self.q_start, t, right=True) - 1

    def last_tokens(self) -> Tensor:
        """Return the flat index [B] of the last token of each row, any valid index for empty rows."""
        return (self.q_start + self.q_len - 1).clamp(0, self.num_tokens - 1)


def slots_of(block_table: Tensor, b: Tensor, index: Tensor, block_size: int) -> Tensor:
    """Return the slots [...] int32 of cache indices [...] in rows b [...] of a table [B, max_blocks]."""
    return (block_table[b, index // block_size] * block_size + index % block_size).int()


class DraftTree(NamedTuple):
    """The tokens of a row in plain Python, for the `naive` operations that sample, accept and verify. Node 0
    is the last committed token; the other nodes are the drafts. A chain is a tree without branches."""

    row: int  # the request row, -1 if inactive
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
        """Yield the path of verification: from each node, the first child that is its target.

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


def draft_trees(batch: Batch) -> Iterator[DraftTree]:
    """Yield the tree of each row."""
    ids = batch.input_ids.tolist()
    parents = None if batch.parents is None else batch.parents.tolist()
    columns = (batch.rows.tolist(), batch.q_start.tolist(), batch.q_len.tolist())
    for s, start, n in zip(*columns, strict=True):
        tokens = slice(start, start + n)
        yield DraftTree(s, start, ids[tokens], [0, *range(n - 1)] if parents is None else parents[tokens])
