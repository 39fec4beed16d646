"""The complete speculative step:

    propose -> lay out -> forward -> sample -> accept -> commit -> learn

It reads and writes the request rows (`kernels/table.py`), the KV cache and the state of the drafters. The
tokens of a row are its last committed token and its drafts. One forward pass scores them all. At each of
these positions the target samples the next token, and a draft is accepted as long as it equals the token
sampled at the position before it. The output is therefore the same as without speculation.

A step has one of two layouts. *Padded*: every row has K + 1 tokens and all shapes are known in advance, so
the step never waits for the device and can be captured (`graphs.py`). *Packed* (the default on a CPU): the
step reads the drafts on the host, the policy drops unlikely ones, and rows without drafts cost one token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafters import Drafter, methods
from ..drafters.estimates import DraftTimes, RowProposal
from ..drafters.policy import Choice
from ..kernels.batch import Batch
from ..kernels.sampling.sample import sample
from ..kernels.sampling.typical import accept_typical
from ..kernels.speculation.kv_move import kv_move
from ..kernels.speculation.proposal import Proposal, lay_out
from ..kernels.speculation.verify import commit
from ..kernels.table import Table
from ..models.decoder import Model, new_states
from .extension import Extension
from .messages import STAGES, Stopwatch

CountDrafts = Callable[[list[RowProposal]], list[int]]
"""Type of `Policy.count_drafts`, which returns the number of drafts to verify for each row."""


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
    ) -> None:
        """`exact`: all requests use the acceptance rule "exact", so `accept_typical` is skipped."""
        self.model, self.kv_cache, self.table = model, kv_cache, table
        self.drafters, self.extensions, self.exact = drafters, extensions, exact
        # The hidden states that the drafters read, as numbers of layers.
        self.layers = methods.layers_of(drafters, model.config.num_layers)
        self.draft_times = DraftTimes()
        self.stages = {name: Stopwatch() for name in STAGES}
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def prefill(self, batch: Batch) -> None:
        """Write the K/V of prompt chunks, the target's and those of the drafters that read its states."""
        kept, states = new_states(self.model, batch.num_tokens, self.layers)
        self.model.write_kv(batch, self.kv_cache, states)
        methods.read_hidden_states(self.drafters, self.table, batch, kept)

    def share_logits(self, num_tokens: int) -> None:
        """Allocate a buffer for the logits of all steps of up to `num_tokens` tokens. Otherwise each captured
        step would keep its own."""
        model, shape = self.model, (num_tokens, self.model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def __call__(
        self,
        rows: Tensor,
        choice: Choice,
        requested: Sequence[Extension] = (),
        count_drafts: CountDrafts | None = None,
    ) -> StepResult:
        """Run a step over the request `rows` [B] int32, -1 for padding. The `requested` extensions take part,
        along with those that always do. The step is packed if `count_drafts` is given, else padded."""
        table, packed = self.table, count_drafts is not None
        extensions = [each for each in self.extensions if each.always or each in requested]
        with self.stages["propose"]:
            times = self.draft_times if packed else None
            proposal = methods.propose(self.drafters, table, rows, choice, times)
            for extension in extensions if choice.k else ():
                proposal = extension.propose(table, rows, proposal)
            if count_drafts is not None and choice.k:
                proposal = _truncate(rows, proposal, count_drafts)
            batch = lay_out(table, rows, proposal, packed)
        with self.stages["forward"]:
            kept, states = new_states(self.model, batch.num_tokens, self.layers)
            hidden = self.model.forward(batch, self.kv_cache, states)
            T, shared = len(hidden), self._logits
            logits = self.model.logits(hidden, shared[:T] if len(shared) >= T else None)
        with self.stages["verify"]:
            for extension in extensions:
                extension.process_logits(logits, batch)
            targets = sample(logits, table, batch)
            if not self.exact and batch.max_q_len > 1:
                targets = accept_typical(targets, logits, table, batch)
            verdict = commit(targets, batch, table, proposal)
            if batch.parents is not None:
                kv_move(self.kv_cache, verdict, batch)
            learned = batch
            for extension in extensions if self.drafters else ():
                proposal, learned = extension.for_drafters(proposal, learned)
            methods.learn(self.drafters, table, proposal, learned, verdict)
            methods.read_hidden_states(self.drafters, table, batch, kept, verdict)
        return StepResult(verdict.report, verdict.path, batch.q_start, logits)


def _truncate(rows: Tensor, proposal: Proposal, count_drafts: CountDrafts) -> Proposal:
    """Return the proposal with the number of drafts of each row reduced by the policy."""
    columns = rows, proposal.drafter.clamp(min=0), proposal.num_drafts, proposal.match_len.clamp(min=0)
    kept = count_drafts(list(map(RowProposal, *(column.tolist() for column in columns))))
    return proposal._replace(num_drafts=torch.tensor(kept, dtype=torch.int32, device=rows.device))
