"""Base classes of drafters: `Drafter` works on tensors of all rows, `SimpleDrafter` on one row in Python.

A step calls `propose`, verifies the drafts, then calls `learn` and `read_hidden_states`. These calls may be
captured in a CUDA graph, so they must not synchronize with a GPU unless the drafter `reads_on_host`.
Per-request state belongs in device tensors with one entry per request row, plus a last entry that padding
rows may write to.

Pass an instance to `LLM(model, drafter=...)`; `docs/extend-drafter.md` shows how to write a drafter.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import SpecConfig
from ..kernels import GENERATED, MAX_DRAFTS
from ..kernels.batch import Batch
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.proposal import draft_limits as draft_limits  # for drafters
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..models.decoder import Model
from ..text.tokenizer import Tokenizer
from ..text.validation import as_int, shown


class Target(NamedTuple):
    """The target model, the folder it was loaded from, and its tokenizer."""

    model: Model
    folder: Path | None = None
    tokenizer: Tokenizer | None = None


class Memory(NamedTuple):
    """Bytes of weights, bytes of KV cache per token, and maximum context length (None: no limit)."""

    weights: int = 0
    kv_per_token: int = 0
    max_context: int | None = None


class Drafter:
    """Base class of drafters. A subclass must define `propose`; the other methods are optional."""

    name: str = "Drafter"  # shown in statistics; the name of the class by default
    max_drafts: int = MAX_DRAFTS  # maximum number of drafts per row and step
    runs_model: bool = False  # whether drafting takes significant time; such a drafter must be the last
    reads_on_host: bool = False  # whether `propose` waits for the device, so that steps cannot be captured
    makes_trees: bool = False  # whether a tree width above 1 is supported
    # Hidden states of the target to read: its residual stream after each of these numbers of layers.
    hidden_state_layers: tuple[int, ...] = ()
    memory: Memory = Memory()  # the memory that it needs

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> "Drafter":
        """Load the drafter and its weights for the target model. Raises ValueError if a setting is missing or
        wrong, FileNotFoundError if a file is missing."""
        return cls()

    def attach(self, table: Table, num_blocks: int, max_tokens: int) -> None:
        """Allocate per-row state and caches; their addresses must not change afterwards. `catch_up` computes
        at most `max_tokens` tokens per call."""

    # Called by the host between steps.

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        """Update the KV cache blocks of a row, when its request is admitted and when it gets more blocks. The
        row has at least `num_tokens` tokens; blocks after the first `num_kept` hold no K/V yet."""

    def release(self, row: int) -> None:
        """Drop the state of a row whose request has finished or was preempted."""

    def catch_up(self, rows: Sequence[int]) -> None:
        """Prefill missing state of the rows that this drafter may draft for, before `propose`. On a CPU, only
        called if `runs_model`."""

    # Called in a step.

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        """Return a proposal with k >= 1 columns for the request rows [B] int32; -1 is padding. A row gets
        at most `draft_limits` drafts. Must not write to `table` or `rows`. Invalid drafts are dropped."""
        raise NotImplementedError(f"{self.name} must define propose(self, table, rows, k).")

    def learn(self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict) -> None:
        """Update state after a step, from the verdict on `batch`. `proposal.drafter` is NO_DRAFTER for rows
        without drafts from this drafter."""

    def read_hidden_states(self, table: Table, batch: Batch, hidden: Tensor) -> None:
        """Update state from hidden states [T, n * H] of the target, without the final norm, after each of the
        n `hidden_state_layers`. The first `batch.q_len` tokens of each row are a prompt chunk or, after a
        step, the last token committed before it and the accepted drafts (of a row that has ended, also those
        after its end); ignore the others."""


class SimpleDrafter(Drafter):
    """Base class of drafters in plain Python. A subclass must define `draft`; it need not call
    `super().__init__()`. The target verifies drafts, so wrong ones only cost time.

        class RepeatLast(SimpleDrafter):
            def draft(self, tokens, k):
                return tokens[-1:] * k

    `draft` runs on the host, so steps cannot be captured as CUDA graphs. On a CPU this does not matter; on
    a GPU a `Drafter` that proposes on the device is faster.
    """

    runs_model = True  # the time that `draft` takes is measured
    reads_on_host = True
    # State of the request that `draft` is called for: empty when it starts, or restarts after a preemption.
    notes: dict[str, Any]

    def draft(self, tokens: list[int], k: int) -> Iterable[int]:
        """Return up to `k` >= 1 token ids that may follow `tokens`, a copy of the prompt and output so far.

        Any iterable of integers will do, [] for no drafts; at most k items are read. Exceptions and invalid
        ids end `generate` with an error. With automatic K, steps that drafting would slow down skip it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draft(self, tokens, k).")

    def attach(self, table: Table, num_blocks: int, max_tokens: int) -> None:
        self._notes: dict[int, dict[str, Any]] = {}

    def release(self, row: int) -> None:
        self._notes.pop(row, None)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        limits = draft_limits(table, rows, min(k, self.max_drafts)).tolist()
        pairs = zip(rows.tolist(), limits, strict=True)
        drafts = [self._draft_row(table, row, limit) if limit else [] for row, limit in pairs]
        counts = torch.tensor([len(ids) for ids in drafts], dtype=torch.int32, device=rows.device)
        padded = [ids + [0] * (k - len(ids)) for ids in drafts]
        return make_proposal(torch.tensor(padded, dtype=torch.int32, device=rows.device), counts)

    def _draft_row(self, table: Table, row: int, limit: int) -> list[int]:
        """Call `draft` for one row and check the token ids."""
        tokens, name = table.tokens[row, : int(table.num_tokens[row])].tolist(), type(self).__name__
        length, self.notes = len(tokens), self._notes.setdefault(row, {})
        try:
            returned = self.draft(tokens, limit)
            drafts: list[Any] = [as_int(token) for token in islice(returned, limit)]
        except NotImplementedError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{name}.draft failed on {length} tokens, k={limit}: {cause}") from error
        for token in drafts:
            if type(token) is not int or not 0 <= token < table.vocab_size:
                ids = f"token ids must be integers from 0 to {table.vocab_size - 1}"
                raise ValueError(f"{name}.draft returned {shown(token)}; {ids}.")
        return drafts


def make_proposal(drafts: Tensor, num_drafts: Tensor, parents: Tensor | None = None) -> Proposal:
    """Return a proposal of the first `num_drafts` [B] drafts [B, K] of each row; with `parents`, of trees."""
    source, match_len = torch.full_like(drafts, GENERATED), torch.zeros_like(num_drafts)
    drafter = num_drafts.clamp(max=1) - 1  # 0, or NO_DRAFTER
    return Proposal(drafts, num_drafts, source, match_len, drafter, parents)


def no_drafts(rows: Tensor, k: int) -> Proposal:
    """Return an empty proposal for the rows [B]."""
    return make_proposal(rows.new_zeros(len(rows), k), torch.zeros_like(rows))
