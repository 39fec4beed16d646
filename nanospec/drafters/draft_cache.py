"""The K/V of a draft model, and how it keeps up with texts that others write too.

They lie in a cache of its own, but in the same blocks as the target's: a block has room for the same
tokens in both, so the two are allocated, shared, preempted and freed as one. Nobody else needs to know:
what is missing here is computed from `computed[row]` on, before the model is asked to draft. It is
missing after a prompt, after steps for which others drafted, or nobody, and where cached blocks hold only
the target's half.

Invariants: `computed[row]` tokens of the row's text have their K/V in this cache (a rejected draft leaves
garbage behind it, so going back costs nothing); what the host knows of it, `_Text.computed`, is never
more; `_drafted` are the blocks that hold the draft model's K/V of all their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.batch import Batch, Chunk
from ..kernels.table import Table
from ..kernels.transfer import to_host
from ..models.decoder import Model
from ..models.kv_cache import empty_cache, zero_blocks


@dataclass
class _Text:
    """What the host knows of a row's text, as of the last step whose results it has."""

    num_tokens: int
    computed: int
    blocks: list[int]


class DraftCache:
    """The cache of a draft model; see the module docstring.

    Attributes:
        kv: as `models/decoder.py` describes it.
        computed: [S + 1] int32; the last row, -1, is written for padding.
    """

    def __init__(self, model: Model, table: Table, num_blocks: int, max_tokens: int) -> None:
        self.model, self.table, self.max_tokens = model, table, max_tokens
        self.kv = empty_cache(model, num_blocks, table.block_size)
        self.computed = torch.zeros(table.num_rows + 1, dtype=torch.int32, device=model.device)
        self._texts: dict[int, _Text] = {}
        self._drafted: set[int] = set()

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_cached: int) -> None:
        """A request took the row; its first `num_cached` blocks hold the K/V of the target."""
        drafted = next((i for i in range(num_cached) if blocks[i] not in self._drafted), num_cached)
        computed = drafted * self.table.block_size
        self._texts[row] = _Text(num_tokens, computed, list(blocks[:num_cached]))
        self.grow(row, blocks[num_cached:])
        self.computed[row].fill_(computed)

    def grow(self, row: int, blocks: Sequence[int]) -> None:
        """The row's request got blocks that may have been another's."""
        self._texts[row].blocks += blocks
        self._drafted.difference_update(blocks)
        zero_blocks(self.kv, blocks)

    def release(self, row: int) -> None:
        """The row's request has given its blocks back; what they hold stays until they are another's."""
        self._texts.pop(row, None)

    def missing(self, rows: Tensor) -> Tensor:
        """[B] int32: committed tokens of the request rows [B] that have no K/V here."""
        return self.table.num_tokens[rows.clamp(min=0)] - self.computed[rows]

    def catch_up(self, rows: Sequence[int], first_pass: int, may_wait: bool) -> None:
        """Compute all but the last token of each of these texts, as far as `max_tokens` reach for all, where
        the first pass of a step does not do it anyway. Who `may_wait` asks the device what is there; else the
        host goes by what it knows."""
        index = list(rows)
        if may_wait:
            starts, ends = self.computed[index].tolist(), self.table.num_tokens[index].tolist()
        else:
            starts = [self._texts[row].computed for row in rows]
            ends = [self._texts[row].num_tokens for row in rows]
        chunks, budget = [], self.max_tokens
        for row, start, n in zip(index, starts, ends, strict=True):
            length = min(n - 1 - start, budget)
            if length >= first_pass:
                chunks.append(Chunk(row, start, length))
                budget -= length
        if chunks:
            batch = Batch.of_chunks(self.table, chunks)
            self.prefill(batch)
            end = batch.base_len + batch.q_len
            self.computed[batch.rows] = torch.maximum(self.computed[batch.rows], end)
            for row, start, length in chunks:
                self._note(self._texts[row], start + length)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, H] of the batch."""
        return self.model.forward(self._known(batch), self.kv)

    def prefill(self, batch: Batch) -> None:
        """Keys and values of the batch."""
        self.model.write_kv(self._known(batch), self.kv)

    def _known(self, batch: Batch) -> Batch:
        """The batch in tokens of the draft model. What its vocabulary lacks is padding of the target's and
        stands for no text, so any other token will do."""
        most = self.model.config.vocab_size
        if most >= self.table.vocab_size:
            return batch
        return replace(batch, input_ids=batch.input_ids.clamp(max=most - 1))

    def advance(self, rows: Tensor, computed: Tensor) -> None:
        """So many tokens [B] of the request rows [B], -1 for none, are computed now."""
        self.computed[rows] = computed

    def follow(self, rows: Sequence[int]) -> Callable[[], None]:
        """Start copying what the step queued last did to the rows; the result takes it in."""
        texts = [self._texts[row] for row in rows]
        wait = to_host(torch.stack([self.computed[:-1], self.table.num_tokens]))

        def take_in() -> None:
            computed, num_tokens = wait()
            for row, text in zip(rows, texts, strict=True):
                if self._texts.get(row) is text:  # not released since
                    text.num_tokens = num_tokens[row]
                    self._note(text, computed[row])

        return take_in

    def _note(self, text: _Text, computed: int) -> None:
        size = self.table.block_size
        self._drafted.update(text.blocks[text.computed // size : computed // size])
        text.computed = computed

    def rehearse(self, count: int) -> None:
        self.computed[:count] = self.table.num_tokens[:count] - 1
