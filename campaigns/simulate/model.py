"""A mock model with known distributions that verifies the contents of the KV cache.

A cache entry encodes its token and position. A query decodes all entries that it attends to and checks that
they form one text in which each position up to its own occurs once. Its logits are the sum of a row for the
last token, which makes texts repetitive, and a row for a checksum of the whole text.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanospec.kernels.batch import Batch
from nanospec.kernels.layer.linear import Linear
from nanospec.models.decoder import Model
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

    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
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
        return torch.from_numpy(hidden).to(self.dtype)

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

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        high, low, total = hidden[:, :3].long().unbind(1)
        logits = self.scores(high * BASE + low, total)
        if self.nan_after:
            logits[hidden[:, 3] > 0] = float("nan")
        return logits if out is None else out[: len(logits)].copy_(logits)


class MockHeads:
    """Medusa heads of a `Mock`. Each head predicts the most likely successor of the previous head's token."""

    token_map, weight_bytes = None, 0

    def __init__(self, model: Mock, num_heads: int) -> None:
        self.model, self.num_heads = model, num_heads

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, num_heads, V] for hidden states [N, H]."""
        last = hidden[:, 0].long() * BASE + hidden[:, 1].long()
        logits = []
        for _ in range(self.num_heads):
            last = self.model.after[last].argmax(1)
            logits.append(self.model.after[last])
        return torch.stack(logits, 1).to(self.model.dtype)

    def tokens(self, index: Tensor) -> Tensor:
        return index.int()


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
