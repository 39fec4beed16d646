"""A mock model with known distributions that verifies the contents of the KV cache.

A cache entry encodes its token and position. A query decodes all entries that it attends to and checks that
they form one text in which each position up to its own occurs once. Its logits are the sum of a row for the
last token, which makes texts repetitive, and a row for a checksum of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanospec.drafters import Drafter, Memory, draft_limits, make_proposal
from nanospec.kernels.batch import Batch
from nanospec.kernels.layer.linear import Linear
from nanospec.kernels.speculation.proposal import Proposal
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model, States
from tests.tiny import tiny_config

BASE, SUMS, WIDTH = 64, 61, 16  # base of encoded digits, number of checksums, size of a cache entry


class Mock(Model):
    """See the module docstring. `surprise` is the weight of the checksum relative to the last token.
    `nan_after` is a set of texts after which all logits are NaN."""

    def __init__(
        self, vocab_size: int, window: int, seed: int, surprise: float, dtype: torch.dtype = torch.float32
    ) -> None:
        rng = np.random.default_rng(seed)
        self.config = tiny_config(
            vocab_size=vocab_size, hidden_size=WIDTH, num_layers=1, num_heads=1, num_kv_heads=1,
            head_dim=WIDTH, max_position_embeddings=window,
        )  # fmt: skip
        self.dtype, self.device = dtype, torch.device("cpu")
        self.norm: Any = SimpleNamespace(weight=torch.empty(0, dtype=dtype))  # read by `computed_by`
        self.weight_bytes = 0
        self.lm_head = Linear(torch.zeros(vocab_size, WIDTH, dtype=dtype))
        self.after = _likely_successors(rng, vocab_size)  # [V, V]
        self.whole = torch.from_numpy(surprise * rng.standard_normal((SUMS, vocab_size))).float()
        self.worth = rng.integers(SUMS, size=(window, vocab_size))
        self.nan_after: set[tuple[int, ...]] = set()

    def scores(self, last: Any, total: Any) -> Tensor:
        """Return the logits [N, V] after texts with the last tokens `last` [N] and checksums `total` [N]."""
        return (self.after[last] + self.whole[total]).to(self.dtype)

    def forward(self, batch: Batch, kv_cache: Tensor, states: States = ()) -> Tensor:
        cache, slots = _bits(kv_cache), batch.slots.numpy()
        entries, kept = _encode(batch.input_ids.numpy(), batch.positions.numpy()), slots >= 0
        bits = entries[kept].view(np.int32)
        cache[:, slots[kept]] = bits if cache.dtype == np.int32 else bits >> 16  # bfloat16: the upper half
        hidden = np.zeros((batch.num_tokens, WIDTH), dtype=np.float32)
        block_size = kv_cache.shape[4]
        blocks, masks = batch.block_table.numpy(), batch.ancestors
        rows = zip(batch.q_start.tolist(), batch.q_len.tolist(), batch.base_len.tolist(), strict=True)
        for b, (start, count, base) in enumerate(rows):
            if count:
                j = np.arange(base + count)
                slots = blocks[b, j // block_size].astype(np.int64) * block_size + j % block_size
                text = _decode(cache[:, slots])
                row_masks = None if masks is None else masks[start : start + count].tolist()
                hidden[start : start + count, :4] = self._states(*text, base, row_masks)
        result = torch.from_numpy(hidden).to(self.dtype)
        for _, to in states:
            to.copy_(result)
        return result

    def _states(self, ids: Any, positions: Any, base: int, masks: list[int] | None) -> Any:
        """Return the hidden states [n, 4] of the entries from `base` on. `masks`: ancestors in a tree."""
        n = len(ids) - base
        worth = self.worth[positions % len(self.worth), ids]
        nan_after = np.zeros(n)
        if masks is None:
            assert (positions == np.arange(len(ids))).all(), f"a text has the positions {positions.tolist()}"
            totals = worth.cumsum()[base:]
            for text in self.nan_after:
                if base < len(text) <= len(ids) and tuple(ids[: len(text)].tolist()) == text:
                    nan_after[len(text) - 1 - base] = 1
        else:
            totals = np.zeros(n, dtype=np.int64)
            for i, mask in enumerate(masks):
                attended = [*range(base), *(base + q for q in range(n) if mask >> q & 1)]
                visible = sorted(positions[attended].tolist())
                assert visible == list(range(positions[base + i] + 1)), f"a node attends to {visible}"
                totals[i] = worth[attended].sum()
                path = sorted(attended, key=positions.__getitem__) if self.nan_after else ()
                nan_after[i] = tuple(ids[list(path)].tolist()) in self.nan_after
        last = ids[base:]
        return np.stack([last // BASE, last % BASE, totals % SUMS, nan_after], 1)

    def logits(self, hidden: Tensor, out: Tensor | None = None, num_used: Tensor | None = None) -> Tensor:
        high, low, total = hidden[:, :3].long().unbind(1)
        logits = self.scores(high * BASE + low, total)
        if self.nan_after:
            logits[hidden[:, 3] > 0] = float("nan")
        return logits if out is None else out[: len(logits)].copy_(logits)


class MockReader(Drafter):
    """A drafter that reads the hidden states of a `Mock`, and drafts the likeliest successors of each token.
    Before it drafts, it checks that it has read the states of the whole text."""

    name, hidden_state_layers, runs_model, makes_trees = "dflash", (1,), True, True

    def __init__(self, model: Mock, width: int) -> None:
        self.after, self.width, self.memory = model.after.argsort(1, descending=True), width, Memory(0, 64)

    def attach(self, table: Table, num_blocks: int, max_tokens: int) -> None:
        self.read_ids = torch.full((num_blocks, table.block_size), -1)  # by slot

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        self.read_ids[blocks[num_kept:]] = -1

    def read_hidden_states(self, table: Table, batch: Batch, hidden: Tensor) -> None:
        ids = hidden[:, 0].long() * BASE + hidden[:, 1].long()
        at = torch.arange(len(ids))
        b = torch.searchsorted(batch.q_start, at, right=True) - 1
        kept = at < (batch.q_start + batch.q_len)[b]  # others were rejected
        kept &= batch.positions < table.num_tokens[batch.rows[b]]  # others follow a stop token
        assert torch.equal(ids[kept], batch.input_ids[kept].long()), "states belong to other tokens"
        self.read_ids.view(-1)[batch.slots[kept].long()] = ids[kept]

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        drafts, parents = torch.zeros(2, len(rows), k, dtype=torch.int32)
        limits = draft_limits(table, rows, k)
        for b, row in enumerate(rows.tolist()):
            if limits[b]:
                ids = table.tokens[row, : int(table.num_tokens[row])]
                known = self.read_ids[table.block_table[row].long()].flatten()[: len(ids) - 1]
                assert torch.equal(known, ids[:-1].long()), f"read {known.tolist()} of {ids.tolist()}"
                width, nodes = min(self.width, int(table.tree_width[row])), [int(ids[-1])]
                for i in range(k):
                    parents[b, i] = max(0, i + 1 - width)
                    nodes.append(int(self.after[nodes[parents[b, i]], i % width]))
                drafts[b] = torch.tensor(nodes[1:])
        return make_proposal(drafts, limits, parents if self.width > 1 else None)


def entries_of(kv_cache: Tensor) -> tuple[Any, Any]:
    """Return the tokens and positions [num_blocks, block_size] in the cache."""
    shape = kv_cache.shape[3:5]
    ids, positions = _decode(_bits(kv_cache))
    return ids.reshape(shape), positions.reshape(shape)


def _likely_successors(rng: np.random.Generator, vocab_size: int) -> Tensor:
    """Return logits [V, V] where each token has up to three likely successors, some shared by many tokens."""
    scores = rng.standard_normal((vocab_size, vocab_size)).astype(np.float32)
    for token in range(vocab_size):
        for bonus in (6.0, 5.0, 4.0):
            scores[token, int(vocab_size * rng.random() ** 2)] += bonus
    return torch.from_numpy(scores)


def _encode(ids: Any, positions: Any) -> Any:
    """Return entries [n, WIDTH] of digits, which are exact in every dtype. A 1 marks them as not zeroed."""
    entries = np.zeros((len(ids), WIDTH), dtype=np.float32)
    entries[:, 0], entries[:, 1], entries[:, 2] = ids // BASE, ids % BASE, 1
    entries[:, 3], entries[:, 4] = positions // BASE, positions % BASE
    return entries


def _bits(kv_cache: Tensor) -> Any:
    """Return the cache as integers [2, slots, WIDTH] in the same memory, since numpy has no bfloat16."""
    integer = torch.int16 if kv_cache.dtype == torch.bfloat16 else torch.int32
    return kv_cache[0, :, 0].view(2, -1, WIDTH).view(integer).numpy()


def _decode(bits: Any) -> tuple[Any, Any]:
    """Return the tokens and positions [n] of entries [2, n, WIDTH]. Invalid entries have position -1."""
    keys, values = bits
    first = keys[:, :5]
    floats = (first if bits.dtype == np.int32 else first.astype(np.int32) << 16).view(np.float32)
    valid = (floats[:, 2] == 1) & (keys == values).all(1)
    digits = np.where(valid, floats.T, 0).astype(np.int64)
    ids, positions = digits[0] * BASE + digits[1], digits[3] * BASE + digits[4]
    return ids, np.where(valid, positions, -1)
