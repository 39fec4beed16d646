"""Let a small model with the target's vocabulary write ahead, one token per pass (Leviathan et al., 2023).

It draws with the target's noise at the same positions, so that sampled requests accept often too: where
the two distributions agree, so do the draws.

Its K/V lie in a cache of its own, but in the same blocks as the target's: a block has room for the same
tokens in both, so the two are allocated, shared, preempted and freed as one. Invariants:

* `computed[row]` tokens of the row's text have their K/V in this cache. A rejected draft leaves only
  garbage behind it, so going back costs nothing.
* Before it drafts, a row's missing tokens are computed: after a step that it drafted for, one or, if all
  was accepted, two; more if others drafted meanwhile, or nobody, or if cached blocks hold only the
  target's half. A recorded step computes up to `catch_up` of them in its first pass, and rows that miss
  more do not draft; the host then has them computed like a piece of a prompt (`Engine._catch_up`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..costs import StepCosts, forward_cost, kv_shape
from ..kernels.batch import Batch
from ..kernels.dispatch import use_triton
from ..kernels.layer.linear import linear, pack
from ..kernels.sampling.sample import sample
from ..kernels.speculation.proposal import GUESSED, MODEL, NOBODY, OWN, Proposal
from ..kernels.speculation.verify import Verdict
from ..models.decoder import Model
from ..models.token_map import lm_head_rows
from ..state import State
from .base import Drafter, nothing, room

MAX_CATCH_UP = 2048  # tokens of all rows, where a step is not recorded


class ModelDrafter(Drafter):
    """A draft model with its cache."""

    has_model = True
    has_cache = True

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        state: State,
        num_blocks: int,
        block_size: int,
        keep_logits: bool = False,
        catch_up: int = 2,
        token_map: Tensor | None = None,
    ) -> None:
        """`vocab_size` is the target's; where the two differ in padding, what the target lacks is never
        drafted. `keep_logits`: proposals tell what drafts were drawn from. `token_map` [Vd] int64: the only
        tokens to draft, None for all."""
        self.token_map = None if token_map is None else token_map.to(model.device)
        self._lm_head = model.lm_head if token_map is None else pack(lm_head_rows(model, token_map))
        self.keep_logits, self.catch_up = keep_logits, catch_up
        self.model, self.vocab_size, self.block_size = model, vocab_size, block_size
        shape = kv_shape(model, num_blocks, block_size)
        self.kv_cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._table = state.block_table
        self.num_rows = len(state.num_tokens)
        self.computed = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=model.device)
        self._cost: StepCosts | None = None

    def admit(self, row: int, num_computed: int) -> None:
        self.computed[row] = num_computed

    def clear(self, blocks: Sequence[int]) -> None:
        if not use_triton(self.kv_cache):
            for block in blocks:
                self.kv_cache[:, :, :, block] = 0

    def prefill(self, rows: Tensor, input_ids: Tensor, batch: Batch) -> None:
        self.model.forward(self._known(input_ids), self.kv_cache, batch)
        self.computed[rows] = torch.maximum(self.computed[rows], batch.base_len + batch.q_len)

    def propose(self, state: State, rows: Tensor, k: int, passes: int, max_kv_len: int) -> Proposal:
        wanted = room(state, rows, min(k, passes))
        if passes and use_triton(state.tokens):
            missing = state.num_tokens[rows.clamp(min=0).long()] - self.computed[rows.clamp(min=0).long()]
            return self._write_ahead(
                state, rows, wanted.masked_fill(missing > self.catch_up, 0), k, passes, max_kv_len
            )
        proposal = nothing(rows, k)
        chosen = wanted.nonzero().squeeze(1)
        if len(chosen):
            chosen = chosen[self._catch_up(state, rows[chosen].long())]
        if len(chosen):
            part = self._write_ahead(state, rows[chosen], wanted[chosen], k, passes, max_kv_len)
            for whole, own in zip(proposal[:5], part[:5], strict=True):
                assert whole is not None
                whole[chosen] = own
            if part.logits is not None:
                logits = part.logits.new_zeros(len(rows), *part.logits.shape[1:])
                logits[chosen] = part.logits
                proposal = proposal._replace(logits=logits)
        return proposal

    def _catch_up(self, state: State, rows: Tensor) -> Tensor:
        """Compute what the request rows [B] miss but for their last two tokens, up to a limit; returns which
        of them are ready."""
        first, end = self.computed[rows], state.num_tokens[rows] - 2
        count = (end - first).clamp(min=0)
        before = count.cumsum(0) - count
        count = torch.minimum(count, (MAX_CATCH_UP - before).clamp(min=0))
        late = count.nonzero().squeeze(1)
        if len(late):
            b = torch.repeat_interleave(late, count[late])
            place = torch.arange(len(b)) - torch.repeat_interleave(before[late], count[late])
            positions, table = (first[b] + place).long(), state.block_table[rows]
            slots = table[b, positions // self.block_size] * self.block_size + positions % self.block_size
            batch = Batch(
                positions=positions.int(),
                slots=slots.int(),
                block_table=table[late],
                q_start=before[late].int(),
                q_len=count[late].int(),
                base_len=first[late],
                max_q_len=int(count.max()),
                max_kv_len=int(end.max()),
                prefill=True,
            )
            self.prefill(rows[late], state.tokens[rows[b], positions], batch)
        return self.computed[rows] >= end

    def _write_ahead(
        self, state: State, rows: Tensor, wanted: Tensor, k: int, passes: int, max_kv_len: int
    ) -> Proposal:
        """`wanted` [B] drafts for each of the rows, all but the first few tokens of which are computed."""
        index = rows.clamp(min=0).long()
        num_tokens, first = state.num_tokens[index], self.computed[index]
        table, count = state.block_table[index], torch.where(wanted > 0, num_tokens - first, 0)
        hidden = self._first_pass(state, index, first, count, table, max_kv_len)
        drafts: list[Tensor] = []
        logits: list[Tensor] = []
        for j in range(min(k, passes)):
            active = wanted > j
            position = num_tokens - 1 + j
            batch = self._batch(position[:, None], active.int(), table, max_kv_len)
            if j:
                hidden = self.model.forward(drafts[-1], self.kv_cache, batch)
            logits.append(self._fit(linear(hidden, self._lm_head)))
            running = torch.where(active, rows, -1)
            drawn = sample(logits[-1], torch.zeros_like(rows), running, state.params, batch)
            drafts.append(torch.where(active, drawn.clamp(min=0), 0))
        tokens = F.pad(torch.stack(drafts, 1), (0, k - len(drafts)))
        place = torch.arange(k, device=rows.device)
        return Proposal(
            tokens,
            wanted,
            torch.where(place < wanted[:, None], GUESSED, OWN).int(),
            torch.zeros_like(rows),
            torch.where(wanted > 0, MODEL, NOBODY).int(),
            logits=torch.stack(logits, 1) if self.keep_logits else None,
        )

    def _first_pass(
        self, state: State, index: Tensor, first: Tensor, count: Tensor, table: Tensor, max_kv_len: int
    ) -> Tensor:
        """Compute `count` [B] tokens of the rows' texts from `first` [B] on; the hidden states [B, H] of
        the last ones."""
        width = self.catch_up if use_triton(first) else int(count.max())
        place = torch.arange(width, dtype=torch.int32, device=first.device)
        positions = first[:, None] + place
        batch = self._batch(positions, count, table, max_kv_len)
        ids = state.tokens[index[:, None], batch.positions.view(-1, width).long()]
        hidden = self.model.forward(self._known(ids.flatten()), self.kv_cache, batch)
        hidden = hidden.view(len(index), width, -1)
        return hidden[torch.arange(len(index), device=first.device), (count - 1).clamp(min=0).long()]

    def _batch(self, positions: Tensor, count: Tensor, table: Tensor, max_kv_len: int) -> Batch:
        """`count` [B] queries of each row at consecutive positions [B, Q]."""
        B, Q = positions.shape
        place = torch.arange(Q, dtype=torch.int32, device=count.device)
        inside = place < count[:, None]
        safe = torch.where(inside, positions, 0)
        slots = table.gather(1, (safe // self.block_size).long()) * self.block_size + safe % self.block_size
        return Batch(
            positions=safe.flatten(),
            slots=torch.where(inside, slots, -1).flatten(),
            block_table=table,
            q_start=torch.arange(0, B * Q, Q, dtype=torch.int32, device=count.device),
            q_len=count,
            base_len=positions[:, 0].contiguous(),
            max_q_len=Q,
            max_kv_len=max_kv_len,
        )

    def _known(self, input_ids: Tensor) -> Tensor:
        """What the draft model's padding lacks stands for no text, so any other token will do."""
        return input_ids.clamp(max=self.model.config.vocab_size - 1)

    def _fit(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, which may be padded to another size; -inf for what is never
        drafted."""
        if self.token_map is not None:
            everything = logits.new_full((len(logits), self.vocab_size), float("-inf"))
            return everything.index_copy_(1, self.token_map, logits)
        missing = self.vocab_size - logits.shape[1]
        if missing > 0:
            return F.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.vocab_size]

    def learn(
        self, state: State, rows: Tensor, proposal: Proposal, hidden: Tensor, batch: Batch, verdict: Verdict
    ) -> None:
        # The last draft was never fed to the model.
        right = torch.minimum(verdict.num_emitted, proposal.num_drafts.clamp(min=1)) - 1
        row = torch.where((rows < 0) | (proposal.drafter != MODEL), self.num_rows, rows).long()
        self.computed[row] = batch.base_len + 1 + right

    def rehearse(self, state: State, count: int) -> None:
        self.computed[:count] = state.num_tokens[:count] - 1

    def measure(self) -> None:
        self._cost = forward_cost(self.model, self.kv_cache, self._table, self.block_size)

    def ms(self, batch: int, passes: int) -> float:
        return passes * self._cost.cost(batch, batch) if self._cost else 0.0
