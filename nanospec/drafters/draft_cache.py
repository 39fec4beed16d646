"""The K/V of a draft model, and how it keeps up with texts that others write too.

They lie in a cache of its own, but in the same blocks as the target's: a block has room for the same tokens
in both, so the two are allocated, shared, preempted and freed as one. What is missing here is computed from
`computed[row]` on, before the model drafts. It is missing after a prompt, after steps for which another
drafter or none drafted, and where cached blocks hold only the target's half.

Invariants: `computed[row]` tokens of the row's text have their K/V in this cache (a rejected draft leaves
garbage behind it, so going back costs nothing); what the host knows of it, `_Text.computed`, is never more;
`_drafted` are the blocks that hold the draft model's K/V of all their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from ..kernels.batch import Batch, Chunk
from ..kernels.table import Table
from ..kernels.transfer import to_host
from ..models.cpu import empty_cache, zero_blocks
from ..models.decoder import Model

ALL = torch.iinfo(torch.int32).max  # computed of a row without a request: rows that time a step draft


@dataclass(eq=False)
class _Text:
    """What the host knows of a row's text; in captured steps as of the step before the latest."""

    num_tokens: int
    computed: int
    blocks: list[int]


class DraftCache:
    """The cache of a draft model; see the module docstring.

    Attributes:
        kv: as `models/decoder.py` describes it.
        computed: [S + 1] int32; the last row, -1, is written for padding.
    """

    def __init__(self, model: Model, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        self.model, self.table, self.max_tokens, self.may_wait = model, table, max_tokens, may_wait
        self.kv = empty_cache(model, num_blocks, table.block_size)
        self.computed = torch.full((table.num_rows + 1,), ALL, dtype=torch.int32, device=model.device)
        self._texts: dict[int, _Text] = {}
        self._drafted: set[int] = set()
        self._news = self._copied()

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        """The row has these pages; those behind the first `num_kept` may have been another's."""
        new = blocks[num_kept:]
        self._drafted.difference_update(new)
        zero_blocks(self.kv, new)
        if row in self._texts:
            self._texts[row].blocks = list(blocks)
            return
        drafted = sum(1 for _ in takewhile(self._drafted.__contains__, blocks[:num_kept]))
        computed = drafted * self.table.block_size
        self._texts[row] = _Text(num_tokens, computed, list(blocks))
        self.computed[row].fill_(computed)

    def release(self, row: int) -> None:
        """The row's request has given its blocks back; what they hold stays until they are another's."""
        if self._texts.pop(row, None) is not None:
            self.computed[row].fill_(ALL)

    def missing(self, rows: Tensor) -> Tensor:
        """Return how many committed tokens of the request rows [B] have no K/V here, [B] int32."""
        return self.table.num_tokens[rows.clamp(min=0)] - self.computed[rows]

    def catch_up(self, rows: Sequence[int], first_pass: int) -> None:
        """Compute all but the last token of each of these texts, as far as `max_tokens` reach for all, where
        the first pass of a step does not do it anyway. Where steps are captured the host does not ask the
        device what is there, but takes in a copy that was started at the call before."""
        if self.may_wait:
            self._news = self._copied()
        self._take_in()
        chunks, budget = [], self.max_tokens
        for row in rows:
            text = self._texts[row]
            length = min(text.num_tokens - 1 - text.computed, budget)
            if length >= first_pass:
                chunks.append(Chunk(row, text.computed, length))
                budget -= length
        if chunks:
            batch = Batch.of_chunks(self.table, chunks)
            self.prefill(batch)
            end = batch.base_len + batch.q_len
            self.computed[batch.rows] = torch.maximum(self.computed[batch.rows], end)
            for row, start, length in chunks:
                self._note(self._texts[row], start + length)
        if not self.may_wait:
            self._news = self._copied()

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, H] of the batch."""
        return self.model.forward(self._known(batch), self.kv)

    def prefill(self, batch: Batch) -> None:
        """Write the keys and values of the batch."""
        self.model.write_kv(self._known(batch), self.kv)

    def _known(self, batch: Batch) -> Batch:
        """Return the batch in tokens of the draft model. What its vocabulary lacks is padding of the target's
        and stands for no text, so any other token will do."""
        most = self.model.config.vocab_size
        if most >= self.table.vocab_size:
            return batch
        return replace(batch, input_ids=batch.input_ids.clamp(max=most - 1))

    def _copied(self) -> tuple[dict[int, _Text], Callable[[], list[list[int]]]]:
        """Start copying `computed` and the lengths of all texts to the host."""
        return dict(self._texts), to_host(torch.stack([self.computed[:-1], self.table.num_tokens]))

    def _take_in(self) -> None:
        """Learn what the device has computed."""
        texts, wait = self._news
        computed, num_tokens = wait()
        for row, text in texts.items():
            if self._texts.get(row) is text:  # not released since
                text.num_tokens = num_tokens[row]
                self._note(text, computed[row])

    def _note(self, text: _Text, computed: int) -> None:
        size = self.table.block_size
        self._drafted.update(text.blocks[text.computed // size : computed // size])
        text.computed = computed
