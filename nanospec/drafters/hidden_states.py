"""Base class of drafters that read the target's hidden states, DFlash and EAGLE-3.

The target's forward pass keeps the residual stream after the layers that the drafter names. `fc` projects
these hidden states to the features of a token, one vector, from which the drafter computes keys and values
for each position of the text (EAGLE-3 also uses the next token's embedding). They are stored in the drafter's
own KV cache, which has the blocks of the target's cache, whenever the target stores its own: for prompt
chunks, and in every step for the tokens that it commits. So when the drafter runs, the cache holds the K/V of
all positions before the last committed token, also after steps without drafts, preemption and prefix cache
hits. In C++, EAGLE-3 stores them only when a block is complete or the row drafts, so steps without drafts
cost less. Positions that follow may hold the K/V of drafts, which are overwritten.

Drafts of one position are ranked by the logits. For a request that samples, the `CONTENDERS` most likely
tokens are ranked with the noise that the target will use at that position, so drafter and target draw the
same token if their distributions agree. With a tree width W above 1, the W best tokens of each position are
combined into a tree of fixed shape.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import SpecConfig
from ..kernels.batch import Batch
from ..kernels.sampling import noise
from ..kernels.speculation.proposal import Proposal, depths_and_masks, lay_out_text
from ..kernels.table import Table
from ..models.folders import default_drafter, resolve_model
from ..models.warm_up import warm_up
from . import Drafter, Memory, Target, draft_limits, make_proposal, no_drafts
from .checkpoint import DraftCheckpoint, load_checkpoint

CONTENDERS = 16  # most likely tokens of a position from which drafts are sampled


class Trees(NamedTuple):
    """Trees of up to k drafts, most likely first: N trees, of widths 1 .. W or of the rows of a batch. Node 0
    is the last committed token."""

    parents: Tensor  # [N, k] int32, the node that each draft follows
    depth: Tensor  # [N, k] int64, 1 for the children of node 0
    rank: Tensor  # [N, k] int64, the rank of each draft among the candidates of its position
    sizes: Tensor  # [N] int32, the number of drafts
    masks: Tensor  # [N, k + 1] int64, ancestor mask of each node
    ranges: Sequence[range]  # for each depth from 0 on, a range of nodes that contains those of this depth


class HiddenStateDrafter(Drafter):
    """Base class of drafters whose KV cache is computed from the target's hidden states. Subclasses define
    `max_depth`, `read_hidden_states` and `_draft`."""

    runs_model = True
    makes_trees = True
    max_depth: int  # the largest depth of a draft

    def __init__(self, spec: SpecConfig, target_vocab: int, loaded: DraftCheckpoint) -> None:
        self.model, self.fc, self.lm_head = loaded.model, loaded.fc, loaded.lm_head
        self.hidden_state_layers, self.token_map = loaded.layers, loaded.token_map
        self.width = spec.tree_width
        if self.width == 1:
            self.max_drafts = self.max_depth
        known = target_vocab if loaded.token_map is None else len(loaded.token_map)
        if self.width > known:
            raise ValueError(f"tree_width={self.width} exceeds the {known} tokens that are drafted.")
        per_token = self.model.config.kv_bytes_per_token(self.model.dtype)
        self.memory = Memory(loaded.weight_bytes, per_token)
        self._trees: dict[int, Trees] = {}

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> "HiddenStateDrafter":
        if spec.draft_model is not None:
            folder = resolve_model(spec.draft_model)
        elif target.folder is not None:
            folder = default_drafter(target.folder)
        else:
            raise ValueError(f"method={spec.method!r} needs a drafter; set draft_model.")
        loaded = load_checkpoint(folder, target.model, cls.name)
        return cls(spec, target.model.config.vocab_size, loaded)

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        self.may_wait = may_wait
        self.kv = self.model.allocate_kv_cache(num_blocks, table.block_size)
        if not may_wait:
            width = len(self.hidden_state_layers) * self.model.config.hidden_size
            states = torch.zeros(max_tokens, width, dtype=self.model.dtype, device=table.device)

            def read(batch: Batch) -> None:
                self.read_hidden_states(table, batch, states[: batch.num_tokens])

            warm_up(self.model, table, max_tokens, read)

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        self.model.zero_blocks(self.kv, blocks[num_kept:])

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        num_drafts = self._ready(table, rows, draft_limits(table, rows, min(k, self.max_drafts)))
        active: Any = num_drafts.nonzero().squeeze(1) if self.may_wait else slice(None)
        some, counts = rows[active], num_drafts[active]
        if not len(some):
            return no_drafts(rows, k)
        width = (table.tree_width[some.clamp(min=0)] - 1).clamp(0, self.width - 1).long()
        *columns, ranges = self._trees_of(k)
        trees = Trees._make((*(column[width] for column in columns), ranges))
        counts = torch.minimum(counts, trees.sizes)
        drafts = self._draft(table, some, counts, trees)

        def fill(part: Tensor) -> Tensor:
            whole = part.new_zeros(len(rows), *part.shape[1:])
            return whole.index_copy_(0, active, part) if self.may_wait else part

        return make_proposal(fill(drafts), fill(counts), fill(trees.parents) if self.width > 1 else None)

    # A subclass defines these; `_ready` is optional.

    def _ready(self, table: Table, rows: Tensor, num_drafts: Tensor) -> Tensor:
        """Return the number of drafts [B], 0 for the rows that cannot draft yet."""
        return num_drafts

    def _draft(self, table: Table, rows: Tensor, num_drafts: Tensor, trees: Trees) -> Tensor:
        """Return the drafts [B, k] int32 of rows [B] in `trees`, which have one entry per row."""
        raise NotImplementedError

    # Helpers of subclasses.

    def _lay_out(self, table: Table, rows: Tensor, first: Tensor, num_drafts: Tensor, width: int) -> Batch:
        """Return a batch padded to `width` tokens per row, from text index `first` [B] on. A row has one more
        than its drafts, at most `width`; without drafts, it has none."""
        count = torch.where(num_drafts > 0, (num_drafts + 1).clamp(max=width), 0)
        bound = int((first + count).max()) if self.may_wait else None
        return lay_out_text(table, rows, first, count, width, bound)

    def _best(self, hidden: Tensor, table: Table, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the W best tokens [B, n, W] int32 at positions [B, n] from hidden states [B * n, H]."""
        index = rows.clamp(min=0)[:, None]
        scores = self.lm_head(hidden).float().unflatten(0, positions.shape)  # [B, n, Vd]
        temperature = table.temperature[index]
        is_greedy = self.may_wait and not temperature.any()
        number = self.width if is_greedy else max(CONTENDERS, self.width)
        likely, place = scores.topk(min(number, scores.shape[2]))
        ids = (place if self.token_map is None else self.token_map[place]).int()
        if is_greedy:
            return ids
        seeds = table.seed[index].repeat(1, positions.shape[1]).flatten()
        log_e = noise.draw(seeds, positions.flatten(), ids.flatten(0, 1)).view_as(likely)
        best = (likely - temperature[..., None] * log_e).topk(self.width).indices
        return ids.gather(2, best)

    def _trees_of(self, k: int) -> Trees:
        """Return the trees of widths 1 .. W with up to k drafts."""
        if k not in self._trees:
            parents, depth, rank, sizes = [], [], [], []
            nodes: dict[int, set[int]] = {0: {0}}  # by depth
            for width in range(1, self.width + 1):
                paths = tree_paths(self.max_depth, width, k)
                place, fill = {(): 0} | {path: i for i, path in enumerate(paths, 1)}, [0] * (k - len(paths))
                parents.append([place[path[:-1]] for path in paths] + fill)
                depth.append([len(path) for path in paths] + fill)
                rank.append([path[-1] for path in paths] + fill)
                sizes.append(len(paths))
                for path, node in place.items():
                    nodes.setdefault(len(path), set()).add(node)
            tensor = partial(torch.tensor, device=self.model.device)
            ranges = [range(min(nodes[d]), max(nodes[d]) + 1) for d in sorted(nodes)]
            first = tensor(parents, dtype=torch.int32)
            masks = depths_and_masks(first)[1].view(self.width, k + 1)
            tensors = first, tensor(depth), tensor(rank), tensor(sizes, dtype=torch.int32), masks
            self._trees[k] = Trees(*tensors, ranges)
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
