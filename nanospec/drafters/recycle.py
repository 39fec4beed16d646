"""Guess what the target said before (Token Recycling; `kernels/speculation/recycled.py`).

Alone, or on what others guess, whose chain becomes a branch of its tree: `--spec ngram+recycle`. What it
remembers serves later requests too, among those that may share cached prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.batch import Batch
from ..kernels.codes import NOBODY
from ..kernels.speculation.grow import Marks, grow
from ..kernels.speculation.learn import learn
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.recycled import ROWS, WIDTH, Recycled
from ..kernels.speculation.report import emitted_tokens
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..text.checks import shown
from .base import Drafter, Option, Target, nothing

if TYPE_CHECKING:
    from ..config import SpecConfig

# Tokens of prompts that are scored in a step for what the target says of them: what one reads on a GPU, and
# the most. On a CPU, where by the work it is that takes as much as several steps, none. (Not timed.)
PROMPT, MOST_PROMPT = 256, 2048
TIMED = 8  # tokens to learn from, when it is timed


class RecycleDrafter(
    Drafter, method="recycle", help="what the model itself found likely after the same tokens, in any request"
):
    """Grows a tree of recycled tokens, on the chains of `base` if there is one."""

    grows = True
    reads_logits = True

    options = (
        Option("recycle_prompt", f"tokens of prompts to learn from (on a GPU {PROMPT})", int, "N"),
    )

    def __init__(self, vocab_size: int, reads_prompts: int = 0, base: Drafter | None = None) -> None:
        self.vocab_size, self.reads_prompts, self.base = vocab_size, reads_prompts, base
        # What is kept, and the logits of prompts.
        self.state_bytes = 4 * ROWS * (WIDTH + 1) + 4 * reads_prompts * vocab_size
        self._guessed: Proposal | None = None  # by `base`
        self._marks: Marks | None = None  # of the step that is under way, or being captured
        if base is not None:
            self._base_learns = any(type(part).learn is not Drafter.learn for part in base.parts)
            self.runs_model, self.reads_on_host = base.runs_model, base.reads_on_host
            self.kv_bytes_per_token, self.max_context = base.kv_bytes_per_token, base.max_context

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> RecycleDrafter:
        usual = PROMPT if target.model.device.type == "cuda" else 0
        asked = spec.options.get("recycle_prompt", usual)
        if not isinstance(asked, int) or not 0 <= asked <= MOST_PROMPT:
            said = f"recycle_prompt={shown(asked)}"
            raise ValueError(f"{said} must be a number of tokens from 0 to {MOST_PROMPT}.")
        return cls(target.model.config.vocab_size, asked)

    def behind(self, first: Drafter) -> Drafter:
        return RecycleDrafter(self.vocab_size, self.reads_prompts, first)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self,) if self.base is None else (*self.base.parts, self)

    @property
    def names(self) -> tuple[str, ...]:
        joined = () if self.base is None else (f"{name}+{self.method}" for name in self.base.names)
        return self.method, *joined

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        super().attach(table, num_blocks, max_tokens, may_wait)
        self._table, self._learn_ms = table, 0.0
        self.state = Recycled.empty(table.num_rows, self.vocab_size, table.device)

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_cached: int) -> None:
        self.state.record[row].zero_()

    def share(self, row: int, salt: int) -> None:
        self.state.salts[row].fill_(salt)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        base = nothing(rows, k) if self.base is None else self.base.propose(table, rows, k)
        if base.parents is not None:
            raise ValueError("Recycled tokens grow on chains, and a drafter before them has guessed a tree.")
        tree, self._marks = grow(base, self.state, table, rows, k)
        self._guessed = base
        return tree

    def learn(
        self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor, logits: Tensor
    ) -> None:
        marks, self._marks = self._marks, None
        learn(self.state, logits, table, batch, proposal, marks, verdict)
        if self.base is not None and self._base_learns:
            base, self._guessed = self._own_chains(proposal, verdict), None
            self.base.learn(table, base, batch, verdict, hidden, logits)

    def _own_chains(self, proposal: Proposal, verdict: Verdict) -> Proposal:
        """What `base` had guessed, up to the first draft that is not in the text now."""
        base = self._guessed
        if base is None:
            return proposal
        _, k = base.drafts.shape
        emitted = F.pad(emitted_tokens(verdict.report), (0, k), value=-1)[:, :k]
        right = (base.drafts == emitted).int().cumprod(1).sum(1)
        drafter = torch.where(proposal.drafter == NOBODY, NOBODY, base.drafter)
        return base._replace(num_drafts=torch.minimum(base.num_drafts, right + 1).int(), drafter=drafter)

    def read(self, table: Table, batch: Batch, logits: Tensor) -> None:
        learn(self.state, logits, table, batch, nothing(batch.rows, 0), None, None)

    def measure(self) -> None:
        table, n, times = self._table, min(TIMED, self._table.max_context), list[float]()
        rows = torch.zeros(1, dtype=torch.int32, device=table.device)
        batch = Batch.of_grid(table, rows, rows, rows + n, n, bound=n)
        logits = torch.linspace(-10, 10, self.vocab_size, device=table.device).repeat(n, 1)
        for _ in range(4):
            start = time.perf_counter()
            self.read(table, batch, logits)
            times.append((time.perf_counter() - start) * 1e3 / n)
        self._learn_ms = min(times)
        self.state.tags.zero_()

    def learn_ms(self, tokens: int) -> float:
        return tokens * self._learn_ms

    def ms(self, batch: int, passes: int) -> float:
        return 0.0 if self.base is None else self.base.ms(batch, passes)
