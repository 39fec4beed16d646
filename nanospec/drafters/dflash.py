"""DFlash: a block drafter that proposes all tokens of a step in one forward pass (z-lab, arXiv 2602.06036).

For each layer, keys and values of the text are projections of one vector per position, the normalized `fc`
of the target's hidden states (`hidden_states.py`). The block is the last committed token followed by mask
tokens; its queries attend to the text and to the whole block, without causality. The output at mask token i
is the distribution of the i-th token after the last committed one.

    position     0 ... n - 2                    n - 1          n       n + 1  ...
    K/V from     hidden states of the target    token n - 1    mask    mask
    drafts                                                     n       n + 1

With a tree width W above 1, the W best tokens of each position are combined into a tree of fixed shape.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import SpecConfig
from ..kernels.batch import MAX_QUERIES, Batch
from ..kernels.layer.residual import rms_norm
from ..kernels.layer.rope_cache import rope_cache
from ..kernels.native import call, packed
from ..kernels.speculation.proposal import lay_out_text
from ..kernels.table import Table
from ..models.config import ModelConfig
from ..models.cpu import CompiledModel
from ..models.decoder import Model
from ..text import check_number
from .hidden_states import HiddenStateDrafter


class DFlashDrafter(HiddenStateDrafter):
    """Drafts a block per forward pass; see the module docstring."""

    name = "dflash"
    makes_trees = True

    def __init__(self, spec: SpecConfig, folder: Path, target: Model) -> None:
        super().__init__(spec, folder, target)
        known = self.model.config.vocab_size if self.token_map is None else len(self.token_map)
        self.width = min(spec.tree_width, known)
        if self.width == 1:
            self.max_drafts = self.max_depth
        self._trees: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @staticmethod
    def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return config.parameter_shapes() | {"hidden_norm.weight": (config.hidden_size,)}

    def _read_settings(self, raw: dict[str, Any], config: ModelConfig, target: ModelConfig) -> None:
        self.mask = check_number("mask_token_id", raw.get("mask_token_id"), 0, config.vocab_size - 1)
        self.max_depth = check_number("block_size", raw.get("block_size"), 2, MAX_QUERIES - 1) - 1

    def read_hidden_states(self, table: Table, batch: Batch, hidden: Tensor) -> None:
        model, x = self.model, rms_norm(self.fc(hidden), self.hidden_norm)
        if isinstance(model, CompiledModel):
            arguments = *model.words(self.kv), *batch.native_args, *packed.row_words(x)
            call("nanospec_write_kv", *arguments, torch.get_num_threads())
            return
        angles = model.angles(batch)
        for layer, cache in zip(model.layers, self.kv, strict=True):
            rope_cache(layer.qkv(x), cache, batch, angles[layer.rope], layer.qk_norms)

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, k: int) -> tuple[Tensor, ...]:
        depth, index = min(k, self.max_depth), rows.clamp(min=0)
        width = (table.tree_width[index] - 1).clamp(0, self.width - 1).long()
        parents, candidate, sizes = (part[width] for part in self._trees_of(k))
        num_drafts, first = torch.minimum(num_drafts, sizes), table.num_tokens[index] - 1
        # The last committed token and a mask per draft; none for a row without drafts.
        count = torch.where(num_drafts > 0, (num_drafts + 1).clamp(max=depth + 1), 0)
        bound = int((first + count).max()) if self.may_wait else None
        block = as_block(lay_out_text(table, rows, first, count, depth + 1, bound))
        ids = block.input_ids.view(-1, depth + 1).clone()
        ids[:, 1:].fill_(self.mask)  # an assignment may copy the number from the host
        hidden = self.model.forward(replace(block, input_ids=ids.flatten()), self.kv)
        hidden = hidden.view(len(rows), depth + 1, -1)[:, 1:].flatten(0, 1)
        positions = first[:, None] + 1 + torch.arange(depth, device=rows.device)
        best = self._best(hidden, table, rows, positions, self.width).flatten(1)  # [B, depth * W]
        parts = best.gather(1, candidate), num_drafts, parents
        return parts if self.width > 1 else parts[:2]

    def _trees_of(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trees of widths 1 .. W with up to k drafts, most likely first: `parents` [W, k] int32,
        the index of each draft among the candidates of all depths [W, k], and their number [W] int32."""
        if k not in self._trees:
            parents, candidate, sizes = [], [], []
            for width in range(1, self.width + 1):
                paths = tree_paths(self.max_depth, width, k)
                node, fill = {(): 0} | {path: i for i, path in enumerate(paths, 1)}, [0] * (k - len(paths))
                parents.append([node[path[:-1]] for path in paths] + fill)
                candidate.append([(len(path) - 1) * self.width + path[-1] for path in paths] + fill)
                sizes.append(len(paths))
            ints = partial(torch.tensor, device=self.model.device, dtype=torch.int32)
            self._trees[k] = ints(parents), ints(candidate).long(), ints(sizes)
        return self._trees[k]


def tree_paths(max_depth: int, width: int, k: int) -> list[tuple[int, ...]]:
    """Return the candidate ranks (r1, r2, ...) on the path to each of the k most likely nodes of a tree, most
    likely first, so that parents come first. The probability that a candidate of rank r is accepted is taken
    as (1 + r) ** -1.5 / 2, a rough fit."""
    paths: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]  # the k most likely nodes of one depth
    for _ in range(max_depth):
        further = [(p * 0.5 * (1 + r) ** -1.5, (*path, r)) for p, path in level for r in range(width)]
        level = sorted(further)[:k]
        paths += level
    return [path for _, path in sorted(paths)[:k]]


def as_block(batch: Batch) -> Batch:
    """Return a padded batch of chains with masks in which each query attends to all queries of its row."""
    bits = (1 << batch.q_len.long()) - 1
    ancestors = bits[:, None].expand(-1, batch.max_q_len).flatten()
    return replace(batch, ancestors=ancestors.contiguous(), parents=torch.zeros_like(batch.input_ids))
