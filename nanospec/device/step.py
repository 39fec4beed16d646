"""The complete speculative step:

    propose -> lay out -> forward -> sample -> accept -> commit -> learn

It reads and writes the request rows (`kernels/table.py`), the KV cache and the state of the drafters. The
tokens of a row are its last committed token and its drafts. One forward pass scores them all. At each of
these positions the target samples the next token, and a draft is accepted as long as it equals the token
sampled at the position before it. The output is therefore the same as without speculation.

Rows are laid out back to back (`kernels/batch.py`). On a GPU, shapes are those of K + 1 tokens per row, and
the number of tokens in use is known on the device only, so the step never waits and can be captured
(`graphs.py`). On a CPU, tensors have the size of the tokens, and a drafter that runs a model is skipped if no
row needs it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafters import Drafter, composition
from ..drafters.policy import Choice
from ..kernels.batch import Batch
from ..kernels.sampling.sample import sample
from ..kernels.sampling.typical import accept_typical
from ..kernels.speculation.kv_move import kv_move
from ..kernels.speculation.layout import lay_out
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.trim import Estimates, trim
from ..kernels.speculation.verify import Verdict, commit
from ..kernels.table import Table
from ..models.decoder import Model, new_states
from .extension import Extension
from .stopwatch import STAGES, Stopwatch


class StepResult(NamedTuple):
    """The result of a step of B rows, on the device. Token j of row b was sampled from
    logits[q_start[b] + path[b, j]]. Captured steps share the memory of the logits, so reads of them must be
    queued before the next step."""

    report: Tensor  # [B, ...] int32, see `kernels/speculation/report.py`
    path: Tensor  # [B, Q] int32
    q_start: Tensor  # [B] int32
    logits: Tensor  # [T, V]


class Step:
    """The step of a model with its KV cache, request rows and drafters."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        table: Table,
        drafters: Sequence[Drafter],
        extensions: Sequence[Extension],
        exact: bool,
        estimates: Estimates | None = None,
    ) -> None:
        """`exact`: all requests use the acceptance rule "exact", so `accept_typical` is skipped. `estimates`:
        the numbers by which drafts are selected for verification; None: all are verified."""
        self.model, self.kv_cache, self.table = model, kv_cache, table
        self.drafters, self.extensions, self.exact, self.estimates = drafters, extensions, exact, estimates
        # The hidden states that the drafters read, as numbers of layers.
        self.layers = composition.layers_of(drafters, model.config.num_layers)
        self.stages = {name: Stopwatch() for name in STAGES}
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def prefill(self, batch: Batch) -> None:
        """Write the K/V of prompt chunks, the target's and those of the drafters that read its states."""
        kept, states = new_states(self.model, batch.num_tokens, self.layers)
        self.model.write_kv(batch, self.kv_cache, states)
        composition.read_hidden_states(self.drafters, self.table, batch, kept)

    def share_logits(self, num_tokens: int) -> None:
        """Allocate a buffer for the logits of all steps of up to `num_tokens` tokens. Otherwise each captured
        step would keep its own."""
        model, shape = self.model, (num_tokens, self.model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def __call__(self, rows: Tensor, choice: Choice, requested: Sequence[Extension] = ()) -> StepResult:
        """Run a step over the request `rows` [B] int32, -1 for padding. The `requested` extensions take part,
        along with those that always do."""
        extensions = [each for each in self.extensions if each.always or each in requested]
        with self.stages["propose"]:
            proposal = self._propose(rows, choice, extensions)
            batch = self._lay_out(rows, proposal)
        with self.stages["forward"]:
            logits, states = self._forward(batch)
        with self.stages["verify"]:
            targets = self._sample(logits, batch, extensions)
            verdict = commit(targets, batch, self.table, proposal)
            self._learn(proposal, batch, verdict, states)
        return StepResult(verdict.report, verdict.path, batch.q_start, logits)

    def _propose(self, rows: Tensor, choice: Choice, extensions: Sequence[Extension]) -> Proposal:
        min_match = None if self.estimates is None else self.estimates.min_match
        proposal = composition.propose(self.drafters, self.table, rows, choice.k, choice.model_k, min_match)
        for extension in extensions if choice.k else ():
            proposal = extension.propose(self.table, rows, proposal)
        return proposal

    def _lay_out(self, rows: Tensor, proposal: Proposal) -> Batch:
        """Return the batch of each row's last committed token and the drafts to verify."""
        table, width = self.table, proposal.drafts.shape[1] + 1
        q_len = trim(table, rows, proposal, self.estimates)
        last = (table.num_tokens[rows.clamp(min=0)] - 1).clamp(min=0)
        return lay_out(table, rows, last, q_len, width, proposal.drafts, proposal.parents)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits [T, V], and the hidden states [T, n * H] that drafters read."""
        kept, states = new_states(self.model, batch.num_tokens, self.layers)
        hidden = self.model.forward(batch, self.kv_cache, states)
        T, shared = len(hidden), self._logits
        return self.model.logits(hidden, shared[:T] if len(shared) >= T else None, batch.num_used), kept

    def _sample(self, logits: Tensor, batch: Batch, extensions: Sequence[Extension]) -> Tensor:
        """Return the target's token [T] after each token of the batch."""
        for extension in extensions:
            extension.process_logits(logits, batch)
        targets = sample(logits, self.table, batch)
        if not self.exact and batch.max_q_len > 1:
            targets = accept_typical(targets, logits, self.table, batch)
        return targets

    def _learn(self, proposal: Proposal, batch: Batch, verdict: Verdict, states: Tensor) -> None:
        """Move the K/V of accepted tree nodes, and update the drafters."""
        if batch.parents is not None:
            kv_move(self.kv_cache, verdict, batch)
        composition.learn(self.drafters, self.table, proposal, batch, verdict)
        composition.read_hidden_states(self.drafters, self.table, batch, states, verdict)
