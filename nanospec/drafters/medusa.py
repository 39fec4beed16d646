"""Guess several tokens at once from the target's last hidden state (Medusa, Cai et al., 2024).

Head i guesses the token i + 1 places behind the one that the target drew from that hidden state, not
knowing what that token was. So the hidden state from which a row's last token was drawn is kept; a row
has none, and drafts nothing, before its first step and after a preemption.

With a tree width W above 1 the W likeliest tokens of every head are combined to a tree. Which
combinations it has is settled beforehand: of all paths of ranks (r1, r2, ...) the K with the largest
product of (1 + r) ** -1.5 / 2, a rough fit of how often a head's candidate of rank r is right.
"""

from __future__ import annotations

import heapq
import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.batch import Batch
from ..kernels.sampling import noise
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..models.heads import Heads
from ..models.hub import default_heads
from .base import Drafter, Memory, Target, guesses, nothing, room

if TYPE_CHECKING:
    from ..config import SpecConfig
    from ..models.decoder import Model

CONTENDERS = 16  # tokens of a head among which it draws


class MedusaDrafter(Drafter):
    """Medusa heads and the hidden states they start from.

    Attributes:
        hidden: [S + 1, H] the hidden state that each row's last token was drawn from; the last row is written
            for padding.
        ready: [S + 1] bool, whether `hidden` has it.
    """

    name = "medusa"
    runs_model = True
    makes_trees = True

    def __init__(self, spec: SpecConfig, heads: Heads, target: Model) -> None:
        known = target.config.vocab_size if heads.token_map is None else len(heads.token_map)
        if spec.tree_width > known:
            raise ValueError(f"tree_width={spec.tree_width} is more than the {known} tokens of the heads.")
        self.heads, self.width, self._target = heads, spec.tree_width, target
        if self.width == 1:
            self.max_drafts = heads.num_heads
        self.memory = Memory(heads.weight_bytes)
        self._trees: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> MedusaDrafter:
        file = spec.heads
        if file is None and target.folder is None:
            raise ValueError(f"method={spec.method!r} needs heads: --heads FILE, or SpecConfig(heads=...).")
        heads = Heads.load(file or default_heads(target.folder), target.model)  # type: ignore[arg-type]
        return cls(spec, heads, target.model)

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        rows, size = table.num_rows + 1, self._target.config.hidden_size
        self.may_wait = may_wait
        self.hidden = torch.zeros(rows, size, dtype=self._target.dtype, device=table.device)
        self.ready = torch.zeros(rows, dtype=torch.bool, device=table.device)

    def release(self, row: int) -> None:
        self.ready[row].fill_(False)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        index = rows.clamp(min=0)
        wanted = torch.where(self.ready[index], room(table, rows, k), 0)
        if self.may_wait and not bool(wanted.any()):
            return nothing(rows, k)
        candidate, parents, sizes = self._tree(k)
        width = (table.width[index] - 1).clamp(0, self.width - 1).long()
        drafts = self._likely(table, index).flatten(1).gather(1, candidate[width])
        wanted = torch.minimum(wanted, sizes[width])
        return guesses(drafts, wanted, parents[width] if self.width > 1 else None)

    def _likely(self, table: Table, index: Tensor) -> Tensor:
        """Return what each head finds likeliest, [B, num_heads, W] int32. Where a request samples it is what
        the head draws of its CONTENDERS likeliest tokens with the noise that the target will have there, so
        that they agree where their probabilities do."""
        hidden, heads = self.hidden[index], self.heads
        if self.may_wait and not bool((table.temperature[index] > 0).any()):
            return heads.top(hidden, self.width)
        scores = heads.logits(hidden).float()
        likely, place = scores.topk(min(max(CONTENDERS, self.width), scores.shape[2]))
        ids = place if heads.token_map is None else heads.token_map[place]
        position = table.num_tokens[index, None] + torch.arange(heads.num_heads, device=index.device)
        luck = noise.naive(table.seed[index, None], position, ids)
        best = (likely - table.temperature[index, None, None] * luck).topk(self.width).indices
        return ids.gather(2, best).int()

    def _tree(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """For every width: which candidate (head * W + rank) each node is, its parent's place, and the
        number of nodes. [W, k] int64, [W, k] int32, [W] int32."""
        if k not in self._trees:
            candidate, parents, sizes = [], [], []
            for width in range(1, self.width + 1):
                paths = tree_paths(self.heads.num_heads, width, k)
                place = {(): 0} | {path: i for i, path in enumerate(paths, 1)}
                fill = [0] * (k - len(paths))
                candidate.append([(len(p) - 1) * self.width + p[-1] for p in paths] + fill)
                parents.append([place[p[:-1]] for p in paths] + fill)
                sizes.append(len(paths))
            tensor = partial(torch.tensor, dtype=torch.int32, device=self.hidden.device)
            self._trees[k] = tensor(candidate).long(), tensor(parents), tensor(sizes)
        return self._trees[k]

    def learn(self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor) -> None:
        last = (verdict.num_emitted - 1).clamp(min=0).long()
        query = batch.q_start + verdict.path.gather(1, last[:, None]).squeeze(1)
        row = torch.where((batch.rows >= 0) & (verdict.num_emitted > 0), batch.rows, -1)
        self.hidden[row] = hidden[query.clamp(max=len(hidden) - 1)]
        self.ready[row] = torch.ones_like(row, dtype=torch.bool)  # True would be copied from the host


def tree_paths(num_heads: int, width: int, k: int) -> list[tuple[int, ...]]:
    """The ranks along the path to each of the (at most k) nodes of a tree, in the order of how likely they
    are, which puts parents first."""

    def entry(path: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return -math.prod(0.5 * (1 + rank) ** -1.5 for rank in path), path

    paths: list[tuple[int, ...]] = []
    heap = [entry((0,))]
    while heap and len(paths) < k:
        _, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < num_heads:
            heapq.heappush(heap, entry((*path, 0)))
        if path[-1] + 1 < width:
            heapq.heappush(heap, entry((*path[:-1], path[-1] + 1)))
    return paths
