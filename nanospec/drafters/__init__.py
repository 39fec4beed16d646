"""The interface of drafters: `Drafter` works on tensors of all rows, `SimpleDrafter` on the tokens of one.

A step calls `propose`, verifies the drafts, and calls `learn`. Both calls may be captured, so they must not
wait for the device unless `attach` said that they may. What a drafter remembers of requests lies in device
rows of its own, one per request row, and a last one that padding rows may write to.

`LLM(model, drafter=Echo())` uses an object; `docs/extend-drafter.md` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import GUESSED, MAX_DRAFTS, NO_DRAFTER
from ..kernels.batch import Batch
from ..kernels.speculation.proposal import Proposal
from ..kernels.speculation.proposal import room as room  # for drafters
from ..kernels.speculation.verify import Verdict
from ..kernels.table import Table
from ..text import as_int, shown

if TYPE_CHECKING:
    from ..config import SpecConfig
    from ..models.decoder import Model
    from ..text.tokenizer import Tokenizer


class Target(NamedTuple):
    """The model to guess for, and where it was loaded from."""

    model: Model
    folder: Path | None = None
    tokenizer: Tokenizer | None = None


class Memory(NamedTuple):
    """Bytes of a drafter's weights, bytes of its own KV cache per token, and the tokens of its window, None
    for any number."""

    weights: int = 0
    kv_per_token: int = 0
    max_context: int | None = None


class Drafter:
    """Drafts tokens for request rows. Only `propose` must be defined.

    Attributes:
        name: for statistics; the method, or the name of the class.
        max_drafts: the most drafts that it makes for a row.
        runs_model: whether drafting takes time that must pay; such a drafter comes last.
        reads_on_host: whether it must wait for the device, so that steps with it cannot be captured.
        makes_trees: whether it has a use for a tree width above 1.
        memory: what it takes, see `Memory`.
    """

    name: str = "Drafter"
    max_drafts: int = MAX_DRAFTS
    runs_model: bool = False
    reads_on_host: bool = False
    makes_trees: bool = False
    memory: Memory = Memory()

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    @classmethod
    def load(cls, spec: SpecConfig, target: Target) -> Drafter:
        """Return the drafter with its weights. Raises ValueError or FileNotFoundError if something is
        missing."""
        return cls()

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        """Allocate device rows and caches, whose addresses must not change. `max_tokens`: the most that
        `catch_up` may compute at once. `may_wait`: steps are not captured, so `propose` may wait."""

    # Called by the host between steps.

    def admit(self, row: int, num_tokens: int, blocks: Sequence[int], num_kept: int) -> None:
        """Take in the pages of a row whose text has at least `num_tokens` tokens: when a request took the
        row, and when it got further pages. Those behind the first `num_kept` hold nothing yet."""

    def release(self, row: int) -> None:
        """Forget the request of a row, which has left it and its pages."""

    def catch_up(self, rows: Sequence[int]) -> None:
        """Compute what is missing of texts to draft for next: before captured steps, or with `runs_model`."""

    # Called in a step.

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        """Return up to `k` >= 1 drafts, in k columns, for each of the request rows [B] int32: none for -1,
        none beyond `room`; `lay_out` in `proposal.py` drops invalid ones. Must not write to table or rows."""
        raise NotImplementedError(f"{self.name} must define propose(self, table, rows, k).")

    def learn(self, table: Table, proposal: Proposal, batch: Batch, verdict: Verdict, hidden: Tensor) -> None:
        """Take in the target's hidden states [T, H] and its verdict over `batch`, which is committed already.
        `proposal.drafter` is NO_DRAFTER for rows without drafts of this drafter."""


class SimpleDrafter(Drafter):
    """Drafts on the host, in plain Python. Only `draft` must be defined; `__init__` is the subclass's own.

        class Again(SimpleDrafter):
            def draft(self, tokens, k):
                return tokens[-1:] * k

    It reads texts on the host, so steps with it are not captured: natural on a CPU, on a GPU slower than a
    `Drafter` that proposes on the device. A wrong guess costs speed or gives an error, never another output:
    guesses are checked here, and verified as those of other drafters.

    Attributes:
        max_drafts: the most it ever guesses; may be set lower by the subclass.
        notes: a dict for what `draft` remembers of the request that it is asked about; empty when the request
            begins, or begins again after it had to make room for others.
    """

    runs_model = True  # drafting takes time
    reads_on_host = True
    notes: dict[str, Any]

    def draft(self, tokens: list[int], k: int) -> Iterable[int]:
        """Return up to `k` >= 1 tokens that may follow `tokens`, prompt and output so far; [] for no guess.

        Any iterable of integers will do; what is beyond k is not read. With an automatic number of drafts it
        is not called in every step, and seldom if a call takes longer than it saves.
        """
        raise NotImplementedError(f"{type(self).__name__} must define guess(self, tokens, k).")

    def attach(self, table: Table, num_blocks: int, max_tokens: int, may_wait: bool) -> None:
        self._notes: dict[int, dict[str, Any]] = {}

    def release(self, row: int) -> None:
        self._notes.pop(row, None)

    def propose(self, table: Table, rows: Tensor, k: int) -> Proposal:
        wanted = room(table, rows, min(k, self.max_drafts)).tolist()
        if not any(wanted):
            return no_drafts(rows, k)
        found = [self._ask(table, row, n) if n else [] for row, n in zip(rows.tolist(), wanted, strict=True)]
        counts = torch.tensor([len(drafts) for drafts in found], dtype=torch.int32, device=rows.device)
        padded = [drafts + [0] * (k - len(drafts)) for drafts in found]
        return make_proposal(torch.tensor(padded, dtype=torch.int32, device=rows.device), counts)

    def _ask(self, table: Table, row: int, most: int) -> list[int]:
        """Return the guesses for one row, checked."""
        text, name = table.tokens[row, : int(table.num_tokens[row])].tolist(), type(self).__name__
        length, self.notes = len(text), self._notes.setdefault(row, {})
        try:
            given = self.draft(text, most)
            found: list[Any] = [as_int(token) for token in islice(given, most)]
        except NotImplementedError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{name}.draft failed on {length} tokens, k={most}: {what}") from error
        for token in found:
            if type(token) is not int or not 0 <= token < table.vocab_size:
                ids = f"token ids are integers from 0 to {table.vocab_size - 1}"
                raise ValueError(f"{name}.draft gave {shown(token)}; {ids}.")
        return found


def make_proposal(drafts: Tensor, num_drafts: Tensor, parents: Tensor | None = None) -> Proposal:
    """Return a model's proposal: drafts [B, K], of which `num_drafts` [B] count; other parts are shared."""
    none, drafter = no_drafts(num_drafts, drafts.shape[1]), num_drafts.clamp(max=1) - 1  # 0, or NO_DRAFTER
    return Proposal(drafts, num_drafts, none.source, none.match_len, drafter, parents)


def no_drafts(rows: Tensor, k: int) -> Proposal:
    """Return no drafts for the rows [B]. Launches kernels at its first call only; not to be changed."""
    return _no_drafts(rows.shape[0], k, rows.device)


@cache
def _no_drafts(B: int, k: int, device: torch.device) -> Proposal:
    zeros = torch.zeros(B, dtype=torch.int32, device=device)
    source = torch.full((B, k), GUESSED, dtype=torch.int32, device=device)
    return Proposal(torch.zeros_like(source), zeros, source, zeros, torch.full_like(zeros, NO_DRAFTER))
