"""A small model with the target's vocabulary drafts one token per forward pass (Leviathan et al., 2023).

The draft model samples with the target's noise at the same positions. Where both distributions agree, so do
the sampled tokens, so the acceptance rate is high for sampled requests too.

The draft model has its own KV cache but uses the target's block tables: a block holds the K/V of the same
tokens in both caches, so both are allocated, shared, preempted and freed together. The K/V of tokens from
`computed[row]` on are missing after a prompt, after steps without drafts of this model, and in cached blocks
that only the target has written; they are computed before the model drafts.

Invariants: the K/V of the first `computed[row]` tokens of a row are in this cache (K/V of rejected drafts lie
beyond them and are overwritten); the host's `_RowState.computed` is never larger; the blocks in `_drafted`
hold the draft model's K/V of all their tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import SpecConfig
from ..kernels import NO_DRAFTER
from ..kernels.batch import Batch, Chunk
from ..kernels.launch import use_triton
from ..kernels.sampling.sample import sample
from ..kernels.speculation.layout import lay_out
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..kernels.transfer import to_host
from ..models.decoder import Model
from ..models.folders import resolve_model
from ..models.warm_up import warm_up
from ..models.weights import load_model
from ..text.tokenizer import Tokenizer, check_same_vocabulary
from . import Drafter, Memory, Target, draft_limits, make_proposal, no_drafts

NONE_MISSING = torch.iinfo(torch.int32).max  # `computed` of an empty row, so that timing runs can draft


@dataclass(eq=False)
class _RowState:
    """The host's view of a row; with captured steps, it is one step behind the device."""

    num_tokens: int
    computed: int
    blocks: list[int]


class ModelDrafter(Drafter):
    """Drafts with a small model; see the module docstring."""

    name = "draft"
    runs_model = True

    def __init__(self, spec: SpecConfig, model: Model, vocab_size: int) -> None:
        """`vocab_size` is the target's. If the models pad it differently, only common tokens are drafted."""
        self.model, self.vocab_size = model, vocab_size
        self._max_missing = 2 if len(spec.methods) == 1 else spec.max_k + 2
        per_token, window = model.config.kv_bytes_per_token(model.dtype), model.config.max_position_embeddings
        self.memory = Memory(model.weight_bytes, per_token, window)

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> "ModelDrafter":
        if spec.draft_model is None:
            raise ValueError(f"method={spec.method!r} needs a draft model; set draft_model.")
        folder = resolve_model(spec.draft_model)
        if target.tokenizer is not None:
            check_same_vocabulary(target.tokenizer, Tokenizer(folder))
        model = load_model(folder, target.model.dtype, target.model.device)
        return cls(spec, model, target.model.config.vocab_size)

    def attach(self, table: Table, num_blocks: int, max_tokens: int) -> None:
        self.table, self.max_tokens = table, max_tokens
        self._lags = use_triton(table.tokens)  # whether `catch_up` uses counts of an earlier step
        # Maximum number of tokens per row in the first forward pass of a step; rows that lack the K/V of more
        # get no drafts. After a step with its drafts, a row lacks one, or two if all were accepted; more if
        # n-gram lookup runs first and `catch_up` lags.
        self.first_pass = self._max_missing if self._lags else 2
        self.kv = self.model.allocate_kv_cache(num_blocks, table.block_size)
        # [S + 1] for S rows: number of tokens with K/V in `kv`; last entry: padding.
        self.computed = table.num_tokens.new_full((table.num_rows + 1,), NONE_MISSING)
        self._states: dict[int, _RowState] = {}
        self._drafted: set[int] = set()
        self._copy = self._start_copy()
        if self._lags:
            warm_up(self.model, table, max_tokens, lambda batch: self.model.write_kv(batch, self.kv))

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        new = blocks[num_kept:]
        self._drafted.difference_update(new)
        if row in self._states:
            self._states[row].blocks = list(blocks)
            return
        drafted = sum(1 for _ in takewhile(self._drafted.__contains__, blocks[:num_kept]))
        computed = drafted * self.table.block_size
        self._states[row] = _RowState(num_tokens, computed, list(blocks))
        self.computed[row].fill_(computed)

    def release(self, row: int) -> None:
        if self._states.pop(row, None) is not None:
            self.computed[row].fill_(NONE_MISSING)  # its blocks stay in `_drafted` until they are reallocated

    def catch_up(self, rows: Sequence[int]) -> None:
        """Compute the missing K/V of these rows, except that of the last token and what the first pass of a
        step computes anyway; at most `max_tokens` tokens in total. The host does not wait for a GPU: it
        uses the counts that the previous call began to copy."""
        if not self._lags:
            self._copy = self._start_copy()
        states, wait = self._copy
        computed, num_tokens = wait()
        for row, state in states.items():
            if self._states.get(row) is state:  # not released since
                state.num_tokens = num_tokens[row]
                self._note(state, computed[row])
        chunks, budget = [], self.max_tokens
        for row, state in ((row, self._states[row]) for row in rows if row in self._states):
            length = min(state.num_tokens - 1 - state.computed, budget)
            if length >= self.first_pass:
                chunks.append(Chunk(row, state.computed, length))
                budget -= length
        if chunks:
            batch = Batch.from_chunks(self.table, chunks)
            self.model.write_kv(self._clamped(batch), self.kv)
            end = batch.base_len + batch.q_len
            self.computed[batch.rows] = torch.maximum(self.computed[batch.rows], end)
            for row, start, length in chunks:
                self._note(self._states[row], start + length)
        self._copy = self._start_copy()

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        num_tokens = table.num_tokens[rows.clamp(min=0)]
        computed = self.computed[rows].minimum(num_tokens - 1)
        ready = num_tokens - computed <= self.first_pass
        num_drafts = torch.where(ready, draft_limits(table, rows, k), 0)
        missing = torch.where(num_drafts > 0, num_tokens - computed, 0)
        batch = lay_out(table, rows, computed, missing, self.first_pass)
        if not batch.num_tokens:
            return no_drafts(rows, k)
        drafts = rows.new_zeros(len(rows), k)
        hidden = self._forward(batch)[batch.last_tokens()]  # [B, H]
        for j in range(k):
            # The last token, then the drafts: one per row that is still drafting.
            batch = lay_out(table, rows, num_tokens - 1 + j, (num_drafts > j).int(), 1, drafts)
            if not batch.num_tokens:
                break
            hidden = self._forward(batch) if j else hidden[batch.row_of_token]
            scores = self.model.logits(hidden, num_used=batch.num_used)[:, : self.vocab_size]
            if missing_ids := self.vocab_size - scores.shape[1]:
                scores = F.pad(scores, (0, missing_ids), value=-torch.inf)
            ids = sample(scores, table, batch).clamp(min=0)[batch.last_tokens()]
            drafts[:, j] = torch.where(num_drafts > j, ids, 0)
        return make_proposal(drafts, num_drafts)

    def learn(self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict) -> None:
        # The last draft was never fed to the model.
        num_kept = torch.minimum(verdict.num_emitted, proposal.num_drafts.clamp(min=1)) - 1
        drafted = (batch.rows >= 0) & (proposal.drafter != NO_DRAFTER)
        self.computed[torch.where(drafted, batch.rows, -1)] = batch.base_len + 1 + num_kept

    def _forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, H] of the batch."""
        return self.model.forward(self._clamped(batch), self.kv)

    def _clamped(self, batch: Batch) -> Batch:
        """Return the batch with token ids limited to the draft model's vocabulary. Ids beyond it are padding
        of the target's vocabulary, not text, so any other token will do."""
        vocab_size = self.model.config.vocab_size
        if vocab_size >= self.table.vocab_size:
            return batch
        return replace(batch, input_ids=batch.input_ids.clamp(max=vocab_size - 1))

    def _start_copy(self) -> tuple[dict[int, _RowState], Callable[[], list[list[int]]]]:
        """Start copying `computed` and the number of tokens of all rows to the host."""
        return dict(self._states), to_host(torch.stack([self.computed[:-1], self.table.num_tokens]))

    def _note(self, state: _RowState, computed: int) -> None:
        size = self.table.block_size
        self._drafted.update(state.blocks[state.computed // size : computed // size])
        state.computed = computed
