"""Let a small model with the target's vocabulary write ahead, one token per pass (Leviathan et al., 2023).

It draws with the target's noise at the same positions, so that sampled requests accept often too: where
the two distributions agree, so do the draws. Its cache and how it keeps up with the text: `draft_cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import NOBODY
from ..kernels.batch import Batch
from ..kernels.layer.linear import make_linear
from ..kernels.sampling.sample import sample
from ..kernels.speculation.layout import lay_out_text
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..models.decoder import Model
from ..models.hub import resolve_model
from ..models.token_map import lm_head_rows, load_token_map, over_vocabulary
from ..models.weights import load_model
from ..text.tokenizer import Tokenizer, check_same_vocabulary
from .base import Drafter, Memory, Target, guesses, nothing, room
from .draft_cache import DraftCache

if TYPE_CHECKING:
    from ..config import SpecConfig


class ModelDrafter(Drafter):
    """A draft model with its cache.

    Attributes:
        first_pass: how many tokens of a text the first pass of a step computes; rows that miss more do not
            draft. After a step that it drafted for one is missing or, if all was accepted, two; in a captured
            step behind lookup more.
    """

    name = "draft"
    runs_model = True

    def __init__(
        self, spec: SpecConfig, model: Model, vocab_size: int, token_map: Tensor | None = None
    ) -> None:
        """`vocab_size` is the target's; where the two differ in padding, what the target lacks is never
        drafted. `token_map` [Vd] int64: the only tokens to draft, None for all."""
        self.model, self.vocab_size = model, vocab_size
        self.token_map = None if token_map is None else token_map.to(model.device)
        self._lm_head = model.lm_head if token_map is None else make_linear(lm_head_rows(model, token_map))
        self._keep_logits = spec.acceptance != "exact"
        self.first_pass = 2 if len(spec.methods) == 1 else spec.max_k + 2
        per_token, window = model.config.kv_bytes_per_token(model.dtype), model.config.max_position_embeddings
        self.memory = Memory(model.weight_bytes, per_token, window)

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> ModelDrafter:
        if spec.draft_model is None:
            raise ValueError(f"method={spec.method!r} needs a draft model: set draft_model to one.")
        folder = resolve_model(spec.draft_model)
        if target.tokenizer is not None:
            check_same_vocabulary(target.tokenizer, Tokenizer(folder))
        split = target.split if spec.draft_tensor_parallel_size > 1 else None
        own = target.model
        model = load_model(folder, own.dtype, own.device, split=split)
        vocab_size = own.config.vocab_size
        token_map = load_token_map(folder, min(vocab_size, model.config.vocab_size))
        return cls(spec, model, vocab_size, token_map)

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        self.may_wait = may_wait
        if may_wait:  # `catch_up` knows what is missing
            self.first_pass = 2
        self.cache = DraftCache(self.model, table, num_blocks, max_tokens, may_wait)

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        self.cache.admit(row, num_tokens, blocks, num_kept)

    def release(self, row: int) -> None:
        self.cache.release(row)

    def catch_up(self, rows: Sequence[int]) -> None:
        self.cache.catch_up(rows, self.first_pass)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        ready = self.cache.missing(rows) <= self.first_pass
        wanted = torch.where(ready, room(table, rows, k), 0)
        num_tokens, width, bound = table.num_tokens[rows.clamp(min=0)], self.first_pass, None
        last = num_tokens - 1
        first = torch.minimum(self.cache.computed[rows], last)
        count = torch.where(wanted > 0, num_tokens - first, 0)
        if self.may_wait:
            width, bound = int(count.max()), int(num_tokens.max()) + k
            if not width:
                return nothing(rows, k)
        batch = lay_out_text(table, rows, first, count, width, bound)
        hidden = self.cache.forward(batch)[(batch.q_start + batch.q_len - 1).clamp(min=0)]
        drafts: list[Tensor] = []
        logits: list[Tensor] = []
        for j in range(k):
            active = (wanted - j).clamp(0, 1)
            batch = lay_out_text(table, rows, last + j if j else last, active, 1, bound)
            if j:
                batch = replace(batch, input_ids=drafts[-1])
                hidden = self.cache.forward(batch)
            scores = self.model.logits(hidden, head=self._lm_head)
            logits.append(over_vocabulary(scores, self.vocab_size, self.token_map))
            drafts.append(sample(logits[-1], table, batch).clamp(min=0) * active)
        proposal = guesses(torch.stack(drafts, 1), wanted)
        return proposal._replace(logits=torch.stack(logits, 1)) if self._keep_logits else proposal

    def learn(self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor) -> None:
        # The last draft was never fed to the model.
        right = torch.minimum(verdict.num_emitted, proposal.num_drafts.clamp(min=1)) - 1
        drafted = (batch.rows >= 0) & (proposal.drafter != NOBODY)
        self.cache.computed[torch.where(drafted, batch.rows, -1)] = batch.base_len + 1 + right
