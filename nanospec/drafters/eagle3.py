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

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.native import NativeArg, call, packed, words
from ..kernels.speculation.proposal import Proposal
from ..kernels.table import Table
from ..models.cpu import CompiledModel
from ..models.decoder import new_states
from . import make_proposal
from .hidden_states import CONTENDERS, HiddenStateDrafter, Trees

# In C++, a chain ends where the product of the largest probabilities of its positions falls below this.
LEAST_CHANCE = 0.12


class Eagle3Drafter(HiddenStateDrafter):
    """Drafts a token per forward pass; see the module docstring."""

    name = "eagle3"
    max_depth = 8  # forward passes per step: deeper drafts are rarely accepted

    def attach(self, table: Table, num_blocks: int, max_tokens: int) -> None:
        S, H = table.num_rows, self.model.config.hidden_size
        # [S + 1, H] and [S + 1]: the features of the last entry of each row, and its index; the last element
        # of both is padding.
        self.features = torch.zeros(S + 1, H, dtype=self.model.dtype, device=table.device)
        self.entry = torch.full((S + 1,), -2, dtype=torch.int32, device=table.device)
        self.num_pending = torch.zeros_like(self.entry)
        super().attach(table, num_blocks, max_tokens)
        if isinstance(self.model, CompiledModel):
            # The hidden states of the entries that follow and their number: kept until a block of the cache
            # is complete or the row drafts.
            shape = (S + 1) * table.block_size, len(self.hidden_state_layers) * H
            self.pending = self.features.new_empty(shape)
            weights = *self.fc.weight.words(), *self.lm_head.weight.words(), self.token_map
            pending = *packed.row_words(self.pending), self.num_pending
            state = *packed.row_words(self.features), self.entry, *pending
            numbers = CONTENDERS, packed.double(LEAST_CHANCE)
            # Arguments that do not change: the first fields of `Drafter` in kernels/native/eagle3.cpp.
            self._words = words(*self.model.drafter_words(self.kv), *weights, *state, *numbers)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        if not isinstance(self.model, CompiledModel):
            return super().propose(table, rows, k)
        limit = min(k, self.max_drafts) if self.width == 1 else 0  # for trees, only read the pending states
        drafts, count = rows.new_zeros(len(rows), k), torch.full_like(rows, limit)
        self._call("nanospec_eagle3_draft", table, rows, drafts, count, *drafts.shape)
        return make_proposal(drafts, count) if self.width == 1 else super().propose(table, rows, k)

    def release(self, row: int) -> None:
        self.entry[row].fill_(-2)
        self.num_pending[row].fill_(0)

    def _ready(self, table: Table, rows: Tensor, num_drafts: Tensor) -> Tensor:
        index = rows.clamp(min=0)
        return torch.where(self.entry[index] == table.num_tokens[index] - 2, num_drafts, 0)

    def read_hidden_states(self, table: Table, batch: Batch, hidden: Tensor) -> None:
        if isinstance(self.model, CompiledModel):
            return self._call("nanospec_eagle3_read", table, *batch.native_args, *packed.row_words(hidden))
        T = batch.num_tokens
        features = self.fc(hidden)
        row = torch.searchsorted(batch.q_start, torch.arange(T, device=hidden.device), right=True) - 1
        following = (batch.positions + 1).clamp(max=table.max_context - 1)
        ids = table.tokens[batch.rows.clamp(min=0)[row], following]
        self.model.write_kv_from(self.model.wide_inputs(ids, features), batch, self.kv)
        rows = torch.where(batch.q_len > 0, batch.rows, -1)
        self.features[rows] = features[(batch.q_start + batch.q_len - 1).clamp(0, T - 1)]
        self.entry[rows] = batch.base_len + batch.q_len - 1

    def _call(self, name: str, table: Table, *values: NativeArg) -> None:
        """Call a function of `kernels/native/eagle3.cpp`."""
        call(name, *self._words, torch.get_num_threads(), *table, *values)

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, trees: Trees) -> Tensor:
        B, k = trees.depth.shape
        index = rows.clamp(min=0)
        first = (table.num_tokens[index] - 2).clamp(min=0)
        # Of each node [B, k + 1]: depth, parent, rank, token and input.
        columns = trees.depth, trees.parents, trees.rank
        depth, parent, rank = (F.pad(column, (1, 0)).long() for column in columns)
        ids = F.pad(table.tokens[index, first + 1][:, None], (0, k))
        inputs = F.pad(self.features[index][:, None], (0, 0, 0, k))
        positions = first[:, None] + depth
        width = 0
        for level, nodes in enumerate(trees.ranges[:-1]):
            width = max(width, nodes.stop)  # nodes that have a token, and perhaps others
            batch = self._lay_out(table, rows, first, num_drafts, width)
            batch = replace(batch, input_ids=_flat(ids[:, :width]))
            if self.width > 1:
                at = torch.where(batch.slots >= 0, positions[:, :width].flatten(), 0).int()
                masks = _flat(trees.masks[:, :width])
                batch = replace(batch, positions=at, ancestors=masks, parents=torch.zeros_like(at))
            outputs, states = new_states(self.model, B * width, [1])
            hidden = self.model.forward(batch, self.kv, states, _flat(inputs[:, :width]))
            hidden = hidden.view(B, width, -1)[:, nodes.start : nodes.stop].flatten(0, 1)
            best = self._best(hidden, table, rows, positions[:, nodes.start : nodes.stop] + 2)
            # The children of these nodes: the next level.
            above = (parent - nodes.start).clamp(0, len(nodes) - 1)
            new = best.flatten(1).gather(1, above * self.width + rank)
            follows = depth == level + 1
            ids = torch.where(follows, new, ids)
            parent_of = parent.clamp(max=width - 1)[..., None].expand_as(inputs)
            inputs = torch.where(follows[..., None], outputs.view(B, width, -1).gather(1, parent_of), inputs)
        return ids[:, 1:]


def _flat(nodes: Tensor) -> Tensor:
    """Return values of nodes [B, n, ...] as [B * n, ...]. `flatten` alone may return a view that is not
    contiguous."""
    return nodes.contiguous().flatten(0, 1)
