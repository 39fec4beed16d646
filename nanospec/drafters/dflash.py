"""DFlash: a block drafter that proposes all tokens of a step in one forward pass (z-lab, arXiv 2602.06036).

For each layer, keys and values of the text are projections of one vector per position, the normalized `fc`
of the target's hidden states (`hidden_states.py`). The block is the last committed token followed by mask
tokens; its queries attend to the text and to the whole block, without causality. The output at mask token i
is the distribution of the i-th token after the last committed one.

    position     0 ... n - 2                    n - 1          n       n + 1  ...
    K/V from     hidden states of the target    token n - 1    mask    mask
    drafts                                                     n       n + 1
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.batch import MAX_QUERIES, Batch
from ..kernels.layer.residual import rms_norm
from ..kernels.layer.rope_cache import rope_cache
from ..kernels.native import call, packed
from ..kernels.speculation.layout import lay_out
from ..kernels.table import Table
from ..models.config import ModelConfig
from ..models.cpu import CompiledModel
from ..text.validation import check_number
from .hidden_states import HiddenStateDrafter


class DFlashDrafter(HiddenStateDrafter):
    """Drafts a block per forward pass; see the module docstring."""

    name = "dflash"

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return config.parameter_shapes() | {"hidden_norm.weight": (config.hidden_size,)}

    def _read_settings(self, raw: dict[str, Any], config: ModelConfig, target: ModelConfig) -> None:
        self.mask = check_number("mask_token_id", raw.get("mask_token_id"), 0, config.vocab_size - 1)
        self.max_drafts = check_number("block_size", raw.get("block_size"), 2, MAX_QUERIES - 1) - 1

    def read_hidden_states(self, table: Table, batch: Batch, hidden: Tensor) -> None:
        model, x = self.model, rms_norm(self.fc(hidden), self.hidden_norm)
        if isinstance(model, CompiledModel):
            arguments = *model.words(self.kv), *batch.native_args, *packed.row_words(x)
            call("nanospec_write_kv", *arguments, torch.get_num_threads())
            return
        angles = model.angles(batch)
        for layer, cache in zip(model.layers, self.kv, strict=True):
            rope_cache(layer.qkv(x), cache, batch, angles[layer.rope], layer.qk_norms)

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, k: int) -> Tensor:
        depth = min(k, self.max_drafts)
        first = table.num_tokens[rows.clamp(min=0)] - 1
        # The last committed token and a mask per draft; none for a row without drafts.
        q_len = torch.where(num_drafts > 0, num_drafts + 1, 0).int()
        masks = rows.new_full((len(rows), depth), self.mask)
        block = as_block(lay_out(table, rows, first, q_len, depth + 1, masks))
        if not block.num_tokens:
            return rows.new_zeros(len(rows), k)
        hidden, i = self.model.forward(block, self.kv), torch.arange(depth, device=rows.device)
        at = (block.q_start[:, None] + 1 + i).clamp(max=block.num_tokens - 1).flatten()
        positions = (first[:, None] + 1 + i).flatten()
        best = self._best(hidden[at], table, rows.repeat_interleave(depth), positions)
        return F.pad(best.view(len(rows), depth), (0, k - depth))


def as_block(batch: Batch) -> Batch:
    """Return a batch with masks in which each query attends to all queries of its row."""
    bits = (1 << batch.q_len.long()) - 1
    ancestors = bits[batch.row_of_token.clamp(min=0)]
    return replace(batch, ancestors=ancestors, parents=torch.zeros_like(batch.input_ids))
