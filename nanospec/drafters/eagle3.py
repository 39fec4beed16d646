"""EAGLE-3: a drafter of one layer, which proposes a token per forward pass (Li et al., arXiv 2503.01840).

Entry t of the text combines the `fc` of the target's hidden states at position t with the embedding of token
t + 1. The query of entry n - 2 gives the distribution of token n, the first draft. For the next entries, the
target has not computed hidden states yet, so the layer's own output takes their place.

    entry          0 ... n - 2                       n - 1                  n
    inputs         states of entry t, token t + 1    output, draft n        output, draft n + 1
    drafts         n (from entry n - 2)              n + 1                  n + 2

A cached block ends with an entry that depends on the first token of the next block. A request that shares the
block and continues with another token reads that of the request that wrote it; this can only cost drafts.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.layer.attention import attention
from ..kernels.layer.residual import Residual, look_up, rms_norm
from ..kernels.layer.rope_cache import rope_cache
from ..kernels.native import NativeArg, call, packed, words
from ..kernels.speculation.layout import lay_out
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from ..models.config import ModelConfig
from ..models.cpu import CompiledModel, padded_norm
from ..models.families import get_value
from . import make_proposal
from .hidden_states import CONTENDERS, LAYER_IDS, HiddenStateDrafter

# In C++, a chain ends where the product of the largest probabilities of its positions falls below this.
LEAST_CHANCE = 0.12
NO_ENTRY = -2  # `entry` of an empty row: that before the first token is -1


class Eagle3Drafter(HiddenStateDrafter):
    """Drafts a token per forward pass; see the module docstring."""

    name = "eagle3"
    max_drafts = 8  # later drafts are rarely accepted

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        shapes, layer, H = config.parameter_shapes(), "model.layers.0", config.hidden_size
        for name in (f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"):
            shapes[name] = shapes[name][0], 2 * H  # embedding and features
        return shapes | {f"{layer}.hidden_norm.weight": (H,)}

    def _read_settings(self, raw: dict[str, Any], config: ModelConfig, target: ModelConfig) -> None:
        if config.num_layers != 1:
            raise ValueError(f"num_hidden_layers={config.num_layers} must be 1 for EAGLE-3.")
        self.norm_before_residual = get_value(raw, "norm_before_residual", bool, False)
        if not raw.keys() & LAYER_IDS.keys():
            n = target.num_layers
            raw["eagle_aux_hidden_state_layer_ids"] = [2, n // 2, n - 3]

    def attach(self, table: Table, num_blocks: int, max_tokens: int) -> None:
        S, H = table.num_rows, self.model.config.hidden_size
        # [S + 1, H] and [S + 1]: the features of the last entry of each row, and its index; the last element
        # of both is padding.
        self.features = torch.zeros(S + 1, H, dtype=self.model.dtype, device=table.device)
        self.entry = torch.full((S + 1,), NO_ENTRY, dtype=torch.int32, device=table.device)
        self.num_pending = torch.zeros_like(self.entry)
        super().attach(table, num_blocks, max_tokens)
        if isinstance(self.model, CompiledModel):
            # The hidden states of the entries that follow and their number: kept until a block of the cache
            # is complete or the row drafts.
            shape = (S + 1) * table.block_size, len(self.hidden_state_layers) * H
            self.pending, self._norm = self.features.new_empty(shape), padded_norm(self.hidden_norm)
            # Arguments that do not change: the first fields of `Drafter` in kernels/native/eagle3.cpp.
            self._words = words(
                *self.model.words(self.kv), *self.fc.weight.words(), *self.lm_head.weight.words(),
                self.token_map, self._norm, self.norm_before_residual, *packed.row_words(self.features),
                self.entry, *packed.row_words(self.pending), self.num_pending, CONTENDERS,
                packed.double(LEAST_CHANCE),
            )  # fmt: skip

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        if not isinstance(self.model, CompiledModel):
            return super().propose(table, rows, k)
        drafts, count = rows.new_zeros(len(rows), k), torch.full_like(rows, min(k, self.max_drafts))
        self._call("nanospec_eagle3_draft", table, rows, drafts, count, *drafts.shape)
        return make_proposal(drafts, count)

    def release(self, row: int) -> None:
        self.entry[row].fill_(NO_ENTRY)
        self.num_pending[row].fill_(0)

    def _ready(self, table: Table, rows: Tensor, num_drafts: Tensor) -> Tensor:
        index = rows.clamp(min=0)
        # The entry is a later one only in timing runs, which repeat a step.
        return torch.where(self.entry[index] >= table.num_tokens[index] - 2, num_drafts, 0)

    def read_hidden_states(self, table: Table, batch: Batch, hidden: Tensor) -> None:
        if isinstance(self.model, CompiledModel):
            return self._call("nanospec_eagle3_read", table, *batch.native_args, *packed.row_words(hidden))
        features = self.fc(hidden)
        following = (batch.positions + 1).clamp(max=table.max_context - 1)
        ids = table.tokens[batch.rows.clamp(min=0)[batch.row_of_token], following]
        self._write_kv(replace(batch, input_ids=ids), features)
        rows = torch.where(batch.q_len > 0, batch.rows, -1)
        self.features[rows] = features[batch.last_tokens()]
        self.entry[rows] = batch.base_len + batch.q_len - 1

    def _call(self, name: str, table: Table, *values: NativeArg) -> None:
        """Call a function of `kernels/native/eagle3.cpp`."""
        call(name, *self._words, torch.get_num_threads(), *table, *values)

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, k: int) -> Tensor:
        index, drafts = rows.clamp(min=0), rows.new_zeros(len(rows), k)
        first = (table.num_tokens[index] - 2).clamp(min=0)
        ids, inputs = table.tokens[index, first + 1], self.features[index]  # by row
        for j in range(min(k, self.max_drafts)):
            batch = lay_out(table, rows, first + j, (num_drafts > j).int(), 1)
            if not batch.num_tokens:
                break
            b, at = batch.row_of_token, batch.last_tokens()
            outputs = self._run_layer(replace(batch, input_ids=ids[b]), inputs[b])
            best = self._best(rms_norm(outputs, self.model.norm), table, rows[b], batch.positions + 2)
            ids, inputs = best[at], outputs[at]
            drafts[:, j] = ids
        return drafts

    def _run_layer(self, batch: Batch, features: Tensor) -> Tensor:
        """Return the output [T, H] of the layer for tokens and their features [T, H]."""
        [layer], config = self.model.layers, self.model.config
        q, residual = self._write_kv(batch, features)
        out = attention(q, self.kv[0], batch, None, config.attention_scale).flatten(1)
        residual = layer.o.add_to(residual, out, layer.post_norm)
        h = layer.gate_up.gated(residual, config.gate)
        return layer.down.add_to(residual, h, self.model.norm).x

    def _write_kv(self, batch: Batch, features: Tensor) -> tuple[Tensor, Residual]:
        """Write keys and values of tokens with these features [T, H]. Return the queries [T, Hq, D] and the
        residual stream."""
        model, layer = self.model, self.model.layers[0]
        embeddings = rms_norm(look_up(batch.input_ids, model.embedding), layer.input_norm)
        normed = rms_norm(features, self.hidden_norm)
        qkv = layer.qkv(torch.cat((embeddings, normed), 1))
        q = rope_cache(qkv, self.kv[0], batch, model.angles(batch)[layer.rope], layer.qk_norms)
        stream = normed if self.norm_before_residual else features
        return q, Residual(stream, layer.input_norm, num_used=batch.num_used)
