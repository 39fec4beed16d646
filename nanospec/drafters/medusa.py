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
import time

import torch
from torch import Tensor

from ..costs import synchronize
from ..kernels.batch import Batch
from ..kernels.dispatch import use_triton
from ..kernels.speculation.proposal import GUESSED, HEADS, NOBODY, OWN, Proposal
from ..kernels.speculation.verify import Verdict
from ..models.heads import Heads
from ..state import State
from .base import Drafter, nothing, room


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


class MedusaDrafter(Drafter):
    """Parallel heads and the hidden states they start from."""

    has_model = True

    def __init__(self, heads: Heads, state: State, hidden_size: int, dtype: torch.dtype, width: int) -> None:
        self.heads, self.width = heads, width
        self.num_rows, self.device = len(state.num_tokens), state.device
        if width == 1:
            self.max_drafts = heads.num_heads
        self.hidden = torch.zeros(self.num_rows + 1, hidden_size, dtype=dtype, device=state.device)
        self.drawn_at = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=state.device)
        self._trees: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._ms: dict[int, float] = {}

    def admit(self, row: int, num_computed: int) -> None:
        self.drawn_at[row] = 0

    def propose(self, state: State, rows: Tensor, k: int, passes: int, max_kv_len: int) -> Proposal:
        index = rows.clamp(min=0).long()
        wanted = room(state, rows, k).masked_fill(self.drawn_at[index] != state.num_tokens[index], 0)
        if passes == 0 or (not use_triton(state.tokens) and not bool(wanted.any())):
            return nothing(rows, k)
        candidate, parents, sizes = self._tree(k)
        width = (state.width[index] - 1).clamp(0, self.width - 1).long()
        tops = self.heads.top(self.hidden[index], self.width).flatten(1)  # [B, num_heads * W]
        wanted = torch.minimum(wanted, sizes[width])
        place = torch.arange(k, device=rows.device)
        return Proposal(
            tops.gather(1, candidate[width]),
            wanted,
            torch.where(place < wanted[:, None], GUESSED, OWN).int(),
            torch.zeros_like(rows),
            torch.where(wanted > 0, HEADS, NOBODY).int(),
            parents[width] if self.width > 1 else None,
        )

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
            i32 = torch.int32
            self._trees[k] = (
                torch.tensor(candidate, device=self.device),
                torch.tensor(parents, dtype=i32, device=self.device),
                torch.tensor(sizes, dtype=i32, device=self.device),
            )
        return self._trees[k]

    def learn(
        self, state: State, rows: Tensor, proposal: Proposal, hidden: Tensor, batch: Batch, verdict: Verdict
    ) -> None:
        last = (verdict.num_emitted - 1).clamp(min=0).long()
        query = batch.q_start + verdict.path.gather(1, last[:, None]).squeeze(1)
        takes_part = (rows >= 0) & (verdict.num_emitted > 0)
        row = torch.where(takes_part, rows, self.num_rows).long()
        self.hidden[row] = hidden[query.clamp(max=len(hidden) - 1).long()]
        self.drawn_at[row] = state.num_tokens[rows.clamp(min=0).long()]

    def rehearse(self, state: State, count: int) -> None:
        self.drawn_at[:count] = state.num_tokens[:count]

    def measure(self) -> None:
        for batch in (1, 8, 64):
            hidden, times = self.hidden[:1].expand(batch, -1).contiguous(), []
            for _ in range(4):
                start = time.perf_counter()
                self.heads.top(hidden, self.width)
                synchronize(self.device)
                times.append((time.perf_counter() - start) * 1e3)
            self._ms[batch] = min(times)

    def ms(self, batch: int, passes: int) -> float:
        size = next((size for size in self._ms if size >= batch), 64)
        return self._ms.get(size, 0.0) if passes else 0.0
