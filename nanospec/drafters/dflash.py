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

import torch
from torch import Tensor

from ..config import SpecConfig
from ..kernels.batch import Batch
from ..kernels.layer.residual import Norm, rms_norm
from ..kernels.table import Table
from .checkpoint import DraftCheckpoint
from .hidden_states import HiddenStateDrafter, Trees


class DFlashDrafter(HiddenStateDrafter):
    """Drafts a block per forward pass; see the module docstring."""

    name = "dflash"

    def __init__(self, spec: SpecConfig, target_vocab: int, loaded: DraftCheckpoint) -> None:
        self.mask, self.max_depth = loaded.settings["mask_token_id"], loaded.settings["block_size"] - 1
        super().__init__(spec, target_vocab, loaded)
        assert loaded.hidden_norm is not None
        self.hidden_norm = Norm(loaded.hidden_norm, self.model.config.rms_norm_eps)

    def read_hidden_states(self, table: Table, batch: Batch, hidden: Tensor) -> None:
        self.model.write_kv_from(rms_norm(self.fc(hidden), self.hidden_norm), batch, self.kv)

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, trees: Trees) -> Tensor:
        k = trees.depth.shape[1]
        depth = min(k, self.max_depth)
        first = table.num_tokens[rows.clamp(min=0)] - 1
        block = as_block(self._lay_out(table, rows, first, num_drafts, depth + 1))
        ids = block.input_ids.view(-1, depth + 1).clone()
        ids[:, 1:].fill_(self.mask)  # an assignment may copy the number from the host
        hidden = self.model.forward(replace(block, input_ids=ids.flatten()), self.kv)
        hidden = hidden.view(len(rows), depth + 1, -1)[:, 1:].flatten(0, 1)
        positions = first[:, None] + 1 + torch.arange(depth, device=rows.device)
        best = self._best(hidden, table, rows, positions).flatten(1)  # [B, depth * W]
        return best.gather(1, (trees.depth - 1).clamp(min=0) * self.width + trees.rank)


def as_block(batch: Batch) -> Batch:
    """Return a padded batch of chains with masks in which each query attends to all queries of its row."""
    bits = (1 << batch.q_len.long()) - 1
    ancestors = bits[:, None].expand(-1, batch.max_q_len).flatten()
    return replace(batch, ancestors=ancestors.contiguous(), parents=torch.zeros_like(batch.input_ids))
