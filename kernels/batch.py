"""Which tokens of a step belong to which request, and where each lies in the KV cache.

A step scores T tokens laid out flat. Batch row b (one request) owns tokens `q_start[b] .. q_start[b] +
q_len[b]`. Two layouts occur: *padded*, `q_start[b] = b * max_q_len`, with rows of the same length (what a
captured step needs), and *packed*, rows back to back (what a CPU prefers). A padding token has slot -1,
and nothing it computes reaches another token.

Positions count from 0. Before the step the cache holds `base_len[b]` entries of row b; its query i is
at cache index `base_len[b] + i`. It sees cache index j iff j < base_len[b], or j - base_len[b] is set
in its ancestor mask. Without a mask the queries form a chain: query i sees j <= base_len[b] + i.

Batches are made here and in `speculation/proposal.py`, and are not changed once they are made.
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

MAX_QUERIES = MAX_DRAFTS + 1  # of a tree row: one bit each in an int64 ancestor mask


class Chunk(NamedTuple):
    """A chunk of the text of a request row: `num_tokens` tokens from index `start` on."""

    row: int
    start: int
    num_tokens: int


# The tensors of a batch, which kernels take whole. TREE says whether ancestors and parents are there: kernels
# cannot ask whether an element of a tuple is None. (Nor must they assign such a tuple to a name, which makes
# a tensor of TREE; passing it on is fine.)
Tensors = namedtuple(
    "Tensors", "rows input_ids positions slots block_table q_start q_len base_len ancestors parents TREE"
)


@dataclass(frozen=True, eq=False)
class Batch:
    """A flat batch of T tokens over B rows. All tensors are on the model's device."""

    rows: Tensor  # [B] int32, the request row of each batch row, -1 where it takes no part
    input_ids: Tensor  # [T] int32, any valid token for padding
    positions: Tensor  # [T] int32, rotary position of each token (0 for padding)
    slots: Tensor  # [T] int32, `block * block_size + offset` in the cache, -1 for padding
    block_table: Tensor  # [B, max_blocks] int32, the pages of each row
    q_start: Tensor  # [B] int32, see the module docstring
    q_len: Tensor  # [B] int32, may be 0
    base_len: Tensor  # [B] int32
    max_q_len: int  # the largest q_len (padded layout: the padded length)
    max_kv_len: int  # an upper bound of base_len + q_len
    # [T] int64 bit masks, bit i = "sees query i of its own row" (itself included); None for chains.
    ancestors: Tensor | None = None
    # [T] int32, with `ancestors`: the place in its row of the query that each query follows, 0 for the first.
    parents: Tensor | None = None
    # Whether these are chunks of prompts, chains of any length. Not derived from the lengths, so that a row's
    # bits do not depend on how long the rows beside it are.
    prefill: bool = False

    @classmethod
    def of_chunks(cls, table: Table, chunks: Sequence[Chunk]) -> Batch:
        """Chunks of the texts of request rows, packed, for prefill. Never waits for the device: all sizes
        are known to the host."""
        columns = upload([*zip(*chunks, strict=True)], torch.int32, table.device)
        rows, first, count = map(torch.clone, columns)  # each begins at a multiple of 16 bytes
        end = count.cumsum(0, dtype=torch.int32)
        start, num_tokens = end - count, sum(chunk.num_tokens for chunk in chunks)
        place = torch.arange(num_tokens, dtype=torch.int32, device=table.device)
        b = torch.searchsorted(end, place, right=True)  # [T] whose token it is
        positions, pages = place + (first - start)[b], table.block_table[rows]
        return cls(
            rows=rows,
            input_ids=table.tokens[rows[b], positions],
            positions=positions,
            slots=slots_of(pages, b, positions, table.block_size),
            block_table=pages,
            q_start=start,
            q_len=count,
            base_len=first,
            max_q_len=max(1, *(chunk.num_tokens for chunk in chunks)),
            max_kv_len=max(chunk.start + chunk.num_tokens for chunk in chunks),
            prefill=True,
        )

    @classmethod
    def of_grid(
        cls, table: Table, rows: Tensor, first: Tensor, count: Tensor, width: int, bound: int | None = None
    ) -> Batch:
        """`count` [B] <= `width` tokens of the texts of request `rows` [B] int32 from index `first` [B] on,
        padded to `width`; rows of -1 or without a token take no part. Never waits for the device.

        `bound`: at least first + count, where that is known.
        """
        place = torch.arange(width, dtype=torch.int32, device=rows.device)
        count = torch.where(rows >= 0, count, 0).int()
        inside = place < count[:, None]
        positions = torch.where(inside, first[:, None] + place, 0)  # [B, width]
        index = rows.clamp(min=0)
        pages = table.block_table[index]
        b = torch.arange(len(rows), device=rows.device)[:, None]
        slots = torch.where(inside, slots_of(pages, b, positions, table.block_size), -1)
        return cls(
            rows=torch.where(count > 0, rows, -1),
            input_ids=table.tokens[index[:, None], positions].flatten(),
            positions=positions.flatten().int(),
            slots=slots.flatten(),
            block_table=pages,
            q_start=torch.arange(0, len(rows) * width, width, dtype=torch.int32, device=rows.device),
            q_len=count,
            base_len=first.int().contiguous(),
            max_q_len=width,
            max_kv_len=bound or table.max_context,
        )

    def packed(self) -> Batch:
        """Without padding tokens, rows back to back. Waits for the device."""
        return self.part(self.in_row, slice(None), self.q_len, self.base_len)

    def part(self, tokens: Tensor | slice, rows: Tensor | slice, q_len: Tensor, base_len: Tensor) -> Batch:
        """These flat tokens alone, packed: `q_len` [B'] of each of these rows, after `base_len` [B'] cached
        ones. Waits for the device."""
        return replace(
            self.of_tokens(tokens),
            rows=self.rows[rows],
            block_table=self.block_table[rows],
            q_start=(q_len.cumsum(0) - q_len).int(),
            q_len=q_len,
            base_len=base_len,
            max_q_len=max(int(q_len.max()), 1),
            max_kv_len=max(int((base_len + q_len).max()), 1),
        )

    def of_tokens(self, tokens: Tensor | slice) -> Batch:
        """These flat tokens, with the rows as they are."""
        names = ("input_ids", "positions", "slots", "ancestors", "parents")
        parts = {n: part[tokens] for n in names if (part := getattr(self, n)) is not None}
        return replace(self, **parts)

    @property
    def tensors(self) -> Tensors:
        """What kernels take."""
        tensors = (getattr(self, name) for name in Tensors._fields[:-1])
        return Tensors._make((*tensors, tl.constexpr(self.ancestors is not None)))

    @property
    def words(self) -> tuple[Tensor | int | None, ...]:
        """Return `Batch` of native/step.h."""
        tensors = (getattr(self, name) for name in Tensors._fields[:-1])
        return *tensors, self.num_rows, self.num_tokens, self.max_q_len, self.block_table.shape[1]

    @property
    def num_rows(self) -> int:
        return self.q_start.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    # What follows is derived once per step for the `naive` operations of all layers.

    @cached_property
    def padded(self) -> bool:
        """Whether the flat tokens are a plain [B, max_q_len] grid."""
        return self.num_tokens == self.num_rows * self.max_q_len

    @cached_property
    def grid(self) -> Tensor:
        """[B, max_q_len] int64: flat index of each query; entries beyond q_len repeat a valid one."""
        i = torch.arange(self.max_q_len, device=self.q_start.device)
        last = (self.q_len - 1).clamp(min=0)
        index = self.q_start[:, None] + torch.minimum(i, last[:, None])
        return index.clamp(max=self.num_tokens - 1).long()  # an empty last row starts at T

    @cached_property
    def in_row(self) -> Tensor:
        """[T] int64: b * max_q_len + i of each token but padding, in order."""
        i = torch.arange(self.max_q_len, device=self.q_start.device)
        return (i < self.q_len[:, None]).flatten().nonzero().squeeze(1)

    @cached_property
    def written(self) -> Tensor:
        """[n] int64: the tokens that have a slot."""
        return (self.slots >= 0).nonzero().squeeze(1)


def slots_of(pages: Tensor, b: Tensor, index: Tensor, block_size: int) -> Tensor:
    """Cache slots [...] int32 of cache indices `index` [...] of batch rows `b` [...] with `pages`
    [B, max_blocks]."""
    return (pages[b, index // block_size] * block_size + index % block_size).int()


class Row(NamedTuple):
    """A row of a batch in plain Python, for the `naive` operations that draw, accept and verify. Place 0 is
    its last committed token, the others are its drafts, a chain or a tree."""

    request: int  # its request row, -1 where it takes no part
    start: int  # flat index of its first token
    ids: list[int]  # its tokens, by place
    parents: list[int]  # the place that each place follows

    def children(self, place: int) -> list[int]:
        """The drafts that follow a place, in order."""
        return [c for c in range(1, len(self.ids)) if self.parents[c] == place]

    def drafts_to(self, place: int) -> list[int]:
        """The tokens drafted on the way to a place, its own included."""
        ids = []
        while place:
            ids.append(self.ids[place])
            place = self.parents[place]
        return ids

    def walk(self, targets: Tensor | Sequence[int]) -> Iterator[int]:
        """The places whose targets verification reads: from each to the first child that carries its target.

        The target ([T], by flat index) of a place is read after the place is given, so it may be drawn then.
        """
        place = 0
        for _ in self.ids:  # ends a walk through parents in a circle too
            yield place
            target = int(targets[self.start + place])
            accepted = [c for c in self.children(place) if self.ids[c] == target]
            if not accepted:
                break
            place = accepted[0]


def rows_of(batch: Batch) -> Iterator[Row]:
    """Yield the rows of a batch in order."""
    ids = batch.input_ids.tolist()
    parents = None if batch.parents is None else batch.parents.tolist()
    columns = (batch.rows.tolist(), batch.q_start.tolist(), batch.q_len.tolist())
    for s, start, n in zip(*columns, strict=True):
        own = slice(start, start + n)
        yield Row(s, start, ids[own], [0, *range(n - 1)] if parents is None else parents[own])
