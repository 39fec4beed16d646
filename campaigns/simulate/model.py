"""A model of known distributions, which knows whether the KV cache is right.

A cache entry holds its token and its position. A query decodes all entries that it sees: they must be one
text, each position once, up to its own. The scores after it are a row for the last token, which makes texts
repeat themselves, and some of a row for the sum over the text, which makes them depend on all of it.
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

BASE, SUMS, WIDTH = 64, 61, 16  # numbers to a digit, different sums, numbers to a cache entry


class Mock(Model):
    """See the module docstring. `surprise`: how much the whole text counts beside its last token; `spoilt`:
    texts behind which all scores are NaN."""

    def __init__(
        self, vocab_size: int, window: int, seed: int, surprise: float, dtype: torch.dtype = torch.float32
    ) -> None:
        rng = np.random.default_rng(seed)
        self.config = tiny_config(
            vocab_size=vocab_size, hidden_size=WIDTH, num_layers=1, num_heads=1, num_kv_heads=1,
            head_dim=WIDTH, max_position_embeddings=window,
        )  # fmt: skip
        self.dtype, self.device = dtype, torch.device("cpu")
        self.norm: Any = SimpleNamespace(weight=torch.empty(0, dtype=dtype))  # says what computes the model
        self.weight_bytes = 0
        self.lm_head = Linear(torch.zeros(vocab_size, WIDTH, dtype=dtype))
        self.after = _likely_successors(rng, vocab_size)  # [V, V]
        self.whole = torch.from_numpy(surprise * rng.standard_normal((SUMS, vocab_size))).float()
        self.worth = rng.integers(SUMS, size=(window, vocab_size))
        self.spoilt: set[tuple[int, ...]] = set()

    def scores(self, last: Any, total: Any) -> Tensor:
        """[N, V] after texts that end with the tokens `last` [N] and have the sums `total` [N]."""
        return (self.after[last] + self.whole[total]).to(self.dtype)

    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        keys, values = (part.view(-1, WIDTH) for part in kv_cache[0, :, 0])
        kept = (batch.slots >= 0).nonzero().squeeze(1)
        entries = torch.from_numpy(_encode(batch.input_ids.numpy(), batch.positions.numpy())).to(self.dtype)
        for part in (keys, values):
            part[batch.slots[kept].long()] = entries[kept]
        hidden = torch.zeros(batch.num_tokens, WIDTH)
        block_size = kv_cache.shape[4]
        pages, masks = batch.block_table.numpy(), batch.ancestors
        rows = zip(batch.q_start.tolist(), batch.q_len.tolist(), batch.base_len.tolist(), strict=True)
        for b, (start, count, base) in enumerate(rows):
            if count:
                j = np.arange(base + count)
                slots = pages[b, j // block_size].astype(np.int64) * block_size + j % block_size
                text = _decode(keys[slots], values[slots])
                own = None if masks is None else masks[start : start + count].tolist()
                hidden[start : start + count, :4] = torch.from_numpy(self._states(*text, base, own))
        return hidden.to(self.dtype)

    def _states(self, ids: Any, positions: Any, base: int, masks: list[int] | None) -> Any:
        """The hidden states [n, 4] of the entries from `base` on, for chains or by what each query sees."""
        n = len(ids) - base
        worth = self.worth[np.clip(positions, 0, len(self.worth) - 1), ids]
        spoilt = np.zeros(n)
        if masks is None:
            assert (positions == np.arange(len(ids))).all(), f"a text has the positions {positions.tolist()}"
            totals = worth.cumsum()[base:]
            for text in self.spoilt:
                if base < len(text) <= len(ids) and tuple(ids[: len(text)].tolist()) == text:
                    spoilt[len(text) - 1 - base] = 1
        else:
            totals = np.zeros(n, dtype=np.int64)
            for i, mask in enumerate(masks):
                sees = [*range(base), *(base + q for q in range(n) if mask >> q & 1)]
                found = sorted(positions[sees].tolist())
                assert found == list(range(positions[base + i] + 1)), f"a node sees the positions {found}"
                totals[i] = worth[sees].sum()
                path = sorted(sees, key=positions.__getitem__) if self.spoilt else ()
                spoilt[i] = tuple(ids[list(path)].tolist()) in self.spoilt
        last = ids[base:]
        return np.stack([last // BASE, last % BASE, totals % SUMS, spoilt], 1).astype(np.float32)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        high, low, total = hidden[:, :3].long().unbind(1)
        found = self.scores(high * BASE + low, total)
        if self.spoilt:
            found[hidden[:, 3] > 0] = float("nan")
        return found if out is None else out[: len(found)].copy_(found)


class MockHeads:
    """Heads of a `Mock`: head i writes the likeliest successors of the last token ahead."""

    token_map, weight_bytes = None, 0

    def __init__(self, model: Mock, num_heads: int) -> None:
        self.model, self.num_heads = model, num_heads

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, num_heads, V]."""
        last = hidden[:, 0].long() * BASE + hidden[:, 1].long()
        found = []
        for _ in range(self.num_heads):
            last = self.model.after[last].argmax(1)
            found.append(self.model.after[last])
        return torch.stack(found, 1).to(self.model.dtype)

    def tokens(self, index: Tensor) -> Tensor:
        return index.int()


def entries_of(kv_cache: Tensor, block: int) -> tuple[list[int], list[int]]:
    """The tokens and the positions that a block holds."""
    ids, positions = _decode(*kv_cache[0, :, 0, block])
    return ids.tolist(), positions.tolist()


def _likely_successors(rng: np.random.Generator, vocab_size: int) -> Tensor:
    """[V, V] scores: each token has up to three likely successors, some of which are many tokens'."""
    scores = rng.standard_normal((vocab_size, vocab_size)).astype(np.float32)
    for token in range(vocab_size):
        for bonus in (6.0, 5.0, 4.0):
            scores[token, int(vocab_size * rng.random() ** 2)] += bonus
    return torch.from_numpy(scores)


def _encode(ids: Any, positions: Any) -> Any:
    """[n, WIDTH]: digits, which all dtypes hold exactly. Position 0 of a zeroed block is no entry."""
    found = np.zeros((len(ids), WIDTH), dtype=np.float32)
    found[:, 0], found[:, 1], found[:, 2] = ids // BASE, ids % BASE, 1
    found[:, 3], found[:, 4] = positions // BASE, positions % BASE
    return found


def _decode(keys: Tensor, values: Tensor) -> tuple[Any, Any]:
    """Tokens and positions [n] of entries [n, WIDTH]; -1 is the position of what is none."""
    found = keys.float().numpy().astype(np.int64)
    whole = (found[:, 2] == 1) & (values == keys).all(1).numpy()
    ids, positions = found[:, 0] * BASE + found[:, 1], found[:, 3] * BASE + found[:, 4]
    return np.where(whole, ids, 0), np.where(whole, positions, -1)
